"""What every route with a body does first: read and judge it, tokenize, check lengths, and form the
`GenerationRequest`.

All of that but the reading is one function call (`take`), which runs in a thread unless the body is small. So nothing
in it may wait, or write to what others see.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from quire.engine.messages import SamplingParams
from quire.server.api.openai.protocol import GenerationFields
from quire.server.api.openai.sampling import check_max_tokens, fit, too_long
from quire.server.errors import ApiError, BadRequest, PayloadTooLarge, UnsupportedMediaType
from quire.server.generate.generation import GenerationRequest
from quire.server.http import sse
from quire.server.http.parse_body import parse
from quire.server.http.threads import SMALL
from quire.server.state import ModelInfo, ServerState
from quire.server.text.detokenizer import StopStrings

logger = logging.getLogger("quire.intake")

T = TypeVar("T", bound=msgspec.Struct)
R = TypeVar("R")

MIN_BODY_BYTES = 2 * 2**20  # the default limit
BYTES_PER_TOKEN = 32  # the default limit in long contexts; JSON writes a character in up to 6 bytes
_MAX_NAMES = 1000  # unknown names that the log has seen
_serial = itertools.count()


async def take(request: Request, cls: type[T], state: ServerState, use: Callable[[T], R]) -> R:
    """What `use` makes of the body, parsed as `cls`; what it keeps of a large one is freed on the event loop. Unknown
    fields leave a note that becomes the response's `Warning` header.

    Raises BadRequest, PayloadTooLarge, UnsupportedMediaType, what `use` raises, and ClientGone when the client leaves
    meanwhile, which ends work that waits for a thread.
    """
    content_type = _content_type(request)
    if content_type != "application/json":  # also keeps web pages from posting here without a CORS check
        raise UnsupportedMediaType(
            f"The body must be sent with Content-Type: application/json, not '{content_type[:100]}'."
        )
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise UnsupportedMediaType("Compressed bodies are not accepted.")
    raw = await _body(request, max_body_bytes(state))

    def work() -> tuple[R | None, list[str], ApiError | None]:
        try:
            parsed, unknown = parse(raw, cls, strict=state.config.server.strict_params)
            return use(parsed), unknown, None
        except ApiError as error:  # without the frames that hold what was parsed: to free a large body takes long, too
            error.__traceback__ = error.__context__ = error.__cause__ = None
            return None, [], error

    # a request's own template is a program: how long it takes has nothing to do with its size
    size = max(len(raw), SMALL) if state.config.server.trust_request_chat_template else len(raw)
    if state.threads.takes_long(size):
        used, unknown, refusal = await sse.unless_disconnected(request, state.threads.run(size, work))
    else:
        used, unknown, refusal = await state.threads.run(size, work)
    if (connection := request.scope.get("state", {}).get("connection")) is not None:
        connection.forget_body()
    if refusal is not None:
        raise refusal
    if unknown:
        request.scope["unknown_parameters"] = unknown
        _log_once(unknown, state)
    return used


def require_deliberate(request: Request) -> None:
    """For a POST that takes no body: it must have what a web page cannot send to a stranger without a CORS check.

    Raises UnsupportedMediaType.
    """
    if _content_type(request) != "application/json" and not any(
        name in request.headers for name in ("x-requested-with", "authorization", "x-api-key")
    ):
        raise UnsupportedMediaType(
            "This POST must be sent with Content-Type: application/json or with an X-Requested-With header, "
            "which web pages of others cannot."
        )


def _content_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def max_body_bytes(state: ServerState) -> int:
    limit = state.config.server.max_body_size
    return limit or max(MIN_BODY_BYTES, BYTES_PER_TOKEN * (state.model.max_model_len if state.model else 0))


async def _body(request: Request, limit: int) -> bytes:
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared[:20]) > limit:
        raise _too_large(limit)
    chunks, size = [], 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                raise _too_large(limit)
            chunks.append(chunk)
    except ClientDisconnect:
        raise sse.ClientGone from None
    return b"".join(chunks)


def _too_large(limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"The body is larger than {limit} bytes, the limit that --max-body-size sets.")


def _log_once(unknown: list[str], state: ServerState) -> None:
    for name in unknown:
        if name not in state.unknown_fields and len(state.unknown_fields) < _MAX_NAMES:
            state.unknown_fields.add(name)
            logger.warning(
                "requests have a field that is not known and is ignored (--strict-params refuses it): %s",
                name.encode("unicode_escape").decode("ascii"),
            )


def check_options(body: GenerationFields) -> None:
    """Combinations that no single field's type can express."""
    if body.stream_options is not None and not body.stream:
        raise BadRequest("stream_options needs stream to be true.", param="stream_options")
    if body.truncate_prompt_tokens == 0:
        raise BadRequest("truncate_prompt_tokens must be at least 1, or -1.", param="truncate_prompt_tokens")


def encode(
    texts: Sequence[str], add_special_tokens: bool, state: ServerState, param: str, *, may_truncate: bool = False
) -> list[list[int]]:
    """Token ids of each.

    A text that no tokenization could fit into the context is refused before it costs time, unless it may be cut.
    """
    longest = state.tokenizer.max_token_chars
    for text in texts:
        if not may_truncate and len(text) > state.model.max_model_len * longest:
            raise too_long(len(text) // longest, state.model, param, at_least=True)
    return state.tokenizer.encode_batch(texts, add_special_tokens)


def truncate(ids: list[int], body: GenerationFields, sampling: SamplingParams, model: ModelInfo) -> list[int]:
    """As `truncate_prompt_tokens` says; -1 leaves the output its room."""
    size = body.truncate_prompt_tokens
    if size is None:
        return ids
    if size > model.max_model_len:
        raise BadRequest(
            f"truncate_prompt_tokens ({size}) is more than the context length of {model.max_model_len}.",
            param="truncate_prompt_tokens",
        )
    if size == -1:
        wanted = sampling.max_tokens if sampling.max_tokens < model.max_model_len else 1
        size = model.max_model_len - wanted
    return ids[:size] if body.truncation_side == "right" else ids[-size:]


def generation_request(
    ids: list[int],
    body: GenerationFields,
    sampling: SamplingParams,
    model: ModelInfo,
    *,
    request_id: str,
    priority: int,
    param: str,
    tenant: str | None = None,
) -> GenerationRequest:
    """`tenant` keeps apart the cached prefixes of those who have different ones.

    Raises BadRequest for the field `param`.
    """
    sampling = fit(sampling, len(ids), model, param)
    check_max_tokens(body, len(ids), model)
    if ids and max(ids) >= model.vocab_size:  # an added token that the model was never given
        raise BadRequest(
            f"{param}: token ids must be between 0 and {model.vocab_size - 1}, not {max(ids)}.", param=param
        )
    return GenerationRequest(
        request_id=f"{request_id}-{next(_serial)}",  # clients may send one id twice
        prompt_token_ids=ids,
        sampling=sampling,
        n=body.n or 1,
        stop=StopStrings([body.stop] if isinstance(body.stop, str) else body.stop or []),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        spaces_between_special_tokens=body.spaces_between_special_tokens is not False,
        priority=priority,
        # no salt of a request has a slash
        cache_salt=body.cache_salt if tenant is None else f"{tenant}/{body.cache_salt or ''}",
        arrival_time=time.time(),
    )


def reserve_room(request: Request, state: ServerState, requests: Sequence[GenerationRequest], param: str) -> None:
    """Raises Unavailable when the queue is full. `Edge` gives the room back when the answer has ended."""
    num_choices = sum(one.n for one in requests)
    state.require_room(num_choices, sum(one.n * len(one.prompt_token_ids) for one in requests), param)
    state.num_reserved += num_choices
    request.scope["num_reserved"] = num_choices


def priority(request: Request, body: GenerationFields, model: ModelInfo) -> int:
    """The body's, else the X-Vllm-Priority header's.

    Raises BadRequest when it is not 0 and the scheduler does not heed priorities.
    """
    value = body.priority
    if value is None:
        try:
            value = int(request.headers.get("x-vllm-priority", "0"))
            if not -(2**63) <= value < 2**63:
                raise ValueError
        except ValueError:
            raise BadRequest("The X-Vllm-Priority header must be a 64-bit integer.", param="priority") from None
    if value and not model.priorities:
        raise BadRequest(
            "priority needs a server with --scheduling-policy priority; this one serves in order of arrival.",
            param="priority",
        )
    return value


def deadlines(request: Request, body: GenerationFields) -> tuple[float | None, float | None]:
    """Seconds that the request may still take (the X-Request-Timeout header counts from its arrival), and from its
    first token on (`t_max_predict_ms`).
    """
    total = None
    if (header := request.headers.get("x-request-timeout")) is not None:
        try:
            total = float(header)
        except ValueError:
            total = math.nan
        if not 0 < total < math.inf:
            raise BadRequest(
                "The X-Request-Timeout header must be a number of seconds above 0.", param="X-Request-Timeout"
            )
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
