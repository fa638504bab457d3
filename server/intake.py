"""What every generating route does first: read and judge the body, tokenize, check lengths, and form the `GenerationRequest`."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from engine.messages import SamplingParams
from server.errors import BadRequest, PayloadTooLarge, UnsupportedMediaType
from server.generation import GenerationRequest
from server.parsing import parse
from server.protocol import GenerationFields
from server.sampling import fit, too_long
from server.state import ModelInfo, ServerState

T = TypeVar("T", bound=msgspec.Struct)

MAX_BODY_BYTES = 64 * 2**20
_serial = itertools.count()


async def read(request: Request, cls: type[T], state: ServerState) -> T:
    """The body as `cls`. Unknown fields leave a note that becomes the response's `Warning` header. Raises BadRequest, PayloadTooLarge, UnsupportedMediaType."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":  # also keeps web pages from posting here without a CORS check
        raise UnsupportedMediaType(f"The body must be sent with Content-Type: application/json, not '{content_type[:100]}'.")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise UnsupportedMediaType("Compressed bodies are not accepted.")
    parsed, unknown = parse(await _body(request), cls, strict=state.config.server.strict_params)
    if (connection := request.scope.get("state", {}).get("connection")) is not None:
        connection.forget_body()
    if unknown:
        request.scope["unknown_parameters"] = unknown
    return parsed


async def _body(request: Request) -> bytes:
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > MAX_BODY_BYTES:
        raise _too_large()
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            raise _too_large()
        chunks.append(chunk)
    return b"".join(chunks)


def _too_large() -> PayloadTooLarge:
    return PayloadTooLarge(f"The body is larger than {MAX_BODY_BYTES} bytes.")


def check_options(body: GenerationFields) -> None:
    """Combinations that no single field's type can express."""
    if body.stream_options is not None and not body.stream:
        raise BadRequest("stream_options needs stream to be true.", param="stream_options")
    if body.truncate_prompt_tokens == 0:
        raise BadRequest("truncate_prompt_tokens must be at least 1, or -1.", param="truncate_prompt_tokens")


async def encode(text: str, add_special_tokens: bool, state: ServerState, param: str, *, may_truncate: bool = False) -> list[int]:
    """Token ids. A text that no tokenization could fit into the context is refused before it costs time, unless it may be cut."""
    longest = state.tokenizer.max_token_chars
    if not may_truncate and len(text) > state.model.max_model_len * longest:
        raise too_long(len(text) // longest, state.model, param, at_least=True)
    return await state.tokenizer.encode_async(text, add_special_tokens)


def truncate(ids: list[int], body: GenerationFields, sampling: SamplingParams, model: ModelInfo) -> list[int]:
    """As `truncate_prompt_tokens` says; -1 leaves the output its room."""
    size = body.truncate_prompt_tokens
    if size is None:
        return ids
    if size > model.max_model_len:
        raise BadRequest(f"truncate_prompt_tokens ({size}) is more than the context length of {model.max_model_len}.", param="truncate_prompt_tokens")
    if size == -1:
        wanted = sampling.max_tokens if sampling.max_tokens < model.max_model_len else 1
        size = model.max_model_len - wanted
    return ids[:size] if body.truncation_side == "right" else ids[-size:]


def generation_request(ids: list[int], body: GenerationFields, sampling: SamplingParams, model: ModelInfo, *, request_id: str, priority: int,
                       param: str) -> GenerationRequest:
    """Raises ContextLengthExceeded for the field `param`."""
    sampling = fit(sampling, len(ids), model, param)
    return GenerationRequest(
        request_id=f"{request_id}-{next(_serial)}",  # clients may send one id twice
        prompt_token_ids=ids, sampling=sampling, n=body.n or 1, stop=[body.stop] if isinstance(body.stop, str) else body.stop or [],
        include_stop_str_in_output=bool(body.include_stop_str_in_output), skip_special_tokens=body.skip_special_tokens is not False,
        spaces_between_special_tokens=body.spaces_between_special_tokens is not False, priority=priority, cache_salt=body.cache_salt,
        arrival_time=time.time())


def priority(request: Request, body: GenerationFields, model: ModelInfo) -> int:
    """The body's, else the X-Vllm-Priority header's. Raises BadRequest when it is not 0 and the scheduler does not heed priorities."""
    value = body.priority
    if value is None:
        try:
            value = int(request.headers.get("x-vllm-priority", "0"))
            if not -(2**63) <= value < 2**63:
                raise ValueError
        except ValueError:
            raise BadRequest("The X-Vllm-Priority header must be a 64-bit integer.", param="priority") from None
    if value and not model.priorities:
        raise BadRequest("priority needs a server with --scheduling-policy priority; this one serves in order of arrival.", param="priority")
    return value


def deadlines(request: Request, body: GenerationFields) -> tuple[float | None, float | None]:
    """Seconds that the request may still take (the X-Request-Timeout header counts from its arrival), and from its first token on (`t_max_predict_ms`)."""
    total = None
    if (header := request.headers.get("x-request-timeout")) is not None:
        try:
            total = float(header)
        except ValueError:
            total = math.nan
        if not 0 < total < math.inf:
            raise BadRequest("The X-Request-Timeout header must be a number of seconds above 0.", param="X-Request-Timeout")
        now = asyncio.get_running_loop().time()
        total = max(total - (now - request.scope.get("state", {}).get("arrived", now)), 0.001)
    return total, body.t_max_predict_ms / 1000 if body.t_max_predict_ms else None


def request_id(request: Request, body: GenerationFields) -> str:
    """The body's `request_id`, else the X-Request-Id header, else the one made up at the door; the response repeats it."""
    if body.request_id is not None:
        request.scope["request_id"] = body.request_id
    return request.scope["request_id"]


def resolve(value: Any, default: Any) -> Any:
    return default if value is None else value
