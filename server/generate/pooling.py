"""Requests for vectors: texts or token ids -> `GenerationRequest`s without output tokens -> vectors, in the order of
the prompts.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from array import array
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from quire.engine.messages import AddRequest, EngineOutput, PoolingInfo, PoolingParams, SamplingParams, TokenCounts
from quire.server.engines.client import OutputStream
from quire.server.errors import BadRequest, EngineError
from quire.server.generate import needs
from quire.server.lora.served import Chosen
from quire.server.model_info import ModelInfo
from quire.server.prompt.encode import encode_texts
from quire.server.request.generation_request import GenerationRequest
from quire.server.request.limits import MAX_PROMPTS
from quire.server.request.sampling import fit, too_long_text
from quire.server.text.tokenizer import Tokenizer

PER_TURN = 128  # prompts of one request that are begun before others get their turn
_NO_OUTPUT = SamplingParams(max_tokens=0)
_serial = itertools.count()


@dataclass(slots=True, kw_only=True)
class PoolingSpec:
    """A request for one vector per prompt. `prompt_param` is the client's field name, for error messages."""

    request_id: str
    prompts: list[str] | list[list[int]] = field(default_factory=list)
    params: PoolingParams = PoolingParams()
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None  # -1: to the model's limit; None: texts, to the limit in its files
    truncation_side: str | None = None  # None: the model's
    refuses_long: bool = False  # with `truncate_prompt_tokens` None: long texts are an error in any case
    priority: int = 0
    cache_salt: str | None = None
    cache_key: str | None = None  # the conversation whose cached prefix is wanted for `cache_seconds`
    cache_seconds: float = 0.0
    tenant: str | None = None
    background: bool = False  # yields to all foreground requests; queue limits do not count it
    adapters: list[Chosen] = field(default_factory=list)  # for LoRA
    prompt_param: str = "input"


@dataclass(frozen=True, slots=True)
class Vector:
    """The answer to one prompt; `data` are float32 in the machine's byte order."""

    data: bytes
    num_prompt_tokens: int
    counts: TokenCounts

    @property
    def values(self) -> array:
        """Return the elements as an array of float32."""
        values = array("f")
        values.frombytes(self.data)
        return values


def require_task(model: ModelInfo, task: str) -> PoolingInfo:
    """Return the model's tasks. Raises BadRequest if `task` is none of them."""
    if model.pooling is None or task not in model.pooling.tasks:
        hint = "--pooling makes embeddings of its hidden states" if model.pooling is None and task == "embed" else ""
        what = {
            "embed": "makes no embeddings",
            "classify": "is no classifier of texts",
            "token_classify": "is no classifier of tokens",
        }[task]
        raise BadRequest(f"The model {what}{hint and f' (a server with {hint})'}.", param="model")
    return model.pooling


def embed_params(model: ModelInfo, dimensions: int | None, normalize: bool | None) -> PoolingParams:
    """Return parameters for embeddings. Raises BadRequest for invalid `dimensions` or a model without embeddings."""
    pooling = require_task(model, "embed")
    if dimensions is not None:
        _check_dimensions(dimensions, pooling)
    scaled = pooling.normalize if normalize is None else normalize
    return PoolingParams("embed", dimensions or pooling.default_dimensions, scaled)


def _check_dimensions(dimensions: int, pooling: PoolingInfo) -> None:
    if dimensions > pooling.num_dimensions:
        raise BadRequest(
            f"dimensions is {dimensions}, but the model's embeddings have {pooling.num_dimensions}.", param="dimensions"
        )
    if dimensions == pooling.num_dimensions:
        return
    if not pooling.matryoshka:
        raise BadRequest(
            f"dimensions must be {pooling.num_dimensions} or left out: the model's files do not say that its "
            "embeddings can be shortened (config.json: is_matryoshka or matryoshka_dimensions). A server with "
            "--matryoshka shortens them.",
            param="dimensions",
        )
    if pooling.matryoshka_sizes and dimensions not in pooling.matryoshka_sizes:
        sizes = ", ".join(map(str, sorted(pooling.matryoshka_sizes)))
        raise BadRequest(f"dimensions must be one of {sizes} for this model, not {dimensions}.", param="dimensions")


def prepare(spec: PoolingSpec, state: needs.Encoding) -> list[GenerationRequest]:
    """Return the requests for the engine, one per prompt. Runs in a thread. Raises BadRequest naming the parameter."""
    prompts, model, param = spec.prompts, state.model, spec.prompt_param
    if len(prompts) > MAX_PROMPTS:
        raise BadRequest(f"{param}: {len(prompts)} prompts are more than {MAX_PROMPTS}.", param=param)
    size = truncated_size(spec, model)
    if isinstance(prompts[0], str):
        prompts = _encode(spec, prompts, state, size)
    elif spec.truncate_prompt_tokens is not None:
        prompts = [_cut(ids, size, truncation_side_of(spec, model)) for ids in prompts]
    return [to_request(spec, ids, model) for ids in prompts]


def text_limit(model: ModelInfo) -> int:
    """Return the most tokens of a text that the model reads: its context length, or a lower limit in its files."""
    declared = model.pooling.max_tokens if model.pooling is not None else 0
    return min(declared or model.max_model_len, model.max_model_len)


def truncated_size(spec: PoolingSpec, model: ModelInfo) -> int | None:
    """Return the number of tokens to which texts are truncated, or None for no truncation. Raises BadRequest."""
    size, limit = spec.truncate_prompt_tokens, text_limit(model)
    if size is None:
        declared = model.pooling is not None and model.pooling.max_tokens
        return limit if declared and not spec.refuses_long else None
    if size == 0 or size > limit:
        raise BadRequest(
            f"truncate_prompt_tokens must be -1 or between 1 and {limit}, the most that the model reads.",
            param="truncate_prompt_tokens",
        )
    return limit if size == -1 else size


def truncation_side_of(spec: PoolingSpec, model: ModelInfo) -> str:
    """Return the side on which texts are cut: right drops their end."""
    return spec.truncation_side or (model.pooling.truncation_side if model.pooling is not None else "right")


def _encode(spec: PoolingSpec, texts: Sequence[str], state: needs.Encoding, size: int | None) -> list[list[int]]:
    """Return token ids of each text. A text is truncated between its special tokens, as Hugging Face's
    tokenizers do.
    """
    special, param = spec.add_special_tokens, spec.prompt_param
    if prompt := state.model.pooling.prompt:
        texts = [prompt + text for text in texts]
    if size is None:
        return encode_texts(texts, state, special, param)
    encoded = encode_texts(texts, state, special, param, may_truncate=True)
    if all(len(ids) <= size for ids in encoded):
        return encoded
    before, after = special_frame(state.tokenizer) if special else ([], [])
    room, side = size - len(before) - len(after), truncation_side_of(spec, state.model)
    if room < 1:
        raise BadRequest(
            f"truncate_prompt_tokens: {size} leaves no room next to the tokenizer's special tokens.",
            param="truncate_prompt_tokens",
        )
    return [
        ids if len(ids) <= size else [*before, *_cut(ids[len(before) : len(ids) - len(after)], room, side), *after]
        for ids in encoded
    ]


def special_frame(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the special tokens that the tokenizer puts before and after a text."""
    plain, framed = (tokenizer.encode("a", add_special_tokens=special) for special in (False, True))
    start = next(i for i in range(len(framed)) if framed[i : i + len(plain)] == plain)
    return framed[:start], framed[start + len(plain) :]


def _cut(ids: list[int], size: int, side: str) -> list[int]:
    return ids[:size] if side == "right" else ids[-size:]


def to_request(spec: PoolingSpec, ids: list[int], model: ModelInfo) -> GenerationRequest:
    """Return the request for one prompt. Raises BadRequest."""
    param = spec.prompt_param
    if not ids:
        raise BadRequest(f"{param} must not be empty.", param=param)
    limit = model.pooling.max_tokens if model.pooling is not None else 0
    if limit and len(ids) > limit:
        raise too_long_text(len(ids), limit, param)
    fit(_NO_OUTPUT, len(ids), model, param)
    if max(ids) >= model.vocab_size:
        raise BadRequest(
            f"{param}: token ids must be between 0 and {model.vocab_size - 1}, not {max(ids)}.", param=param
        )
    return GenerationRequest(
        request_id=f"{spec.request_id}-{next(_serial)}",  # clients may send one id twice
        prompt_token_ids=ids,
        sampling=_NO_OUTPUT,
        priority=spec.priority,
        cache_salt=spec.cache_salt if spec.tenant is None else f"{spec.tenant}/{spec.cache_salt or ''}",
        cache_key=spec.cache_key,
        cache_seconds=spec.cache_seconds,
        arrival_time=time.time(),
        pooling=spec.params,
        background=spec.background,
        adapters=spec.adapters,
    )


async def run(state: needs.Running, requests: Sequence[GenerationRequest]) -> list[Vector]:
    """Return the vectors of all requests. Cancelling it aborts what still runs.

    Raises EngineError when a request fails, BadRequest when the engine refuses it.
    """
    streams: list[OutputStream] = []
    vectors = []
    try:
        for number, request in enumerate(requests, start=1):
            streams.append(state.client.generate(_message(request)))
            if number % PER_TURN == 0:
                await asyncio.sleep(0)
        for request, stream in zip(requests, streams, strict=True):
            async with aclosing(stream):
                async for output in stream:
                    vectors.append(_vector(state, request, stream, output))
    finally:
        for stream in streams[len(vectors) :]:
            await stream.aclose()
            if state.metrics is not None:
                state.metrics.for_engine(stream.engine).observe_abort()
    return vectors


def _message(request: GenerationRequest) -> AddRequest:
    return AddRequest(
        request.request_id,
        request.prompt_token_ids,
        request.sampling,
        priority=request.priority,
        cache_salt=request.cache_salt,
        cache_key=request.cache_key,
        cache_seconds=request.cache_seconds,
        pooling=request.pooling,
        background=request.background,
        media=[one.item for one in request.media],
        tenant=request.tenant,
        weight=request.weight,
        adapters=[one.use for one in request.adapters],
        engine=request.engine,
    )


def _vector(state: needs.Metrics, request: GenerationRequest, stream: OutputStream, output: EngineOutput) -> Vector:
    """Return the result of a request from its only output."""
    if state.metrics is not None:
        metrics = state.metrics.for_engine(stream.engine)
        metrics.observe_prompt(len(request.prompt_token_ids), output.counts.cached)
        metrics.observe_request(request, output.finish_reason, 0, 0.0, output.timing)
        metrics.observe_group(request, 0)
    if output.error is not None:
        raise BadRequest(output.error) if output.error_kind == "invalid_request" else EngineError(output.error)
    return Vector(output.pooled, len(request.prompt_token_ids), output.counts)
