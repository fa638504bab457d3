"""Shared by the routes that answer with vectors: common fields, admission, and running the prompts."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request

from quire.engine.messages import PoolingParams
from quire.server.errors import BadRequest
from quire.server.generate import pooling
from quire.server.generate.deadlines import all_wait, within
from quire.server.generate.pooling import PoolingSpec, Vector
from quire.server.http import admission, needs, request_options
from quire.server.http.caller import caller
from quire.server.http.sse import unless_disconnected
from quire.server.request.generation_request import GenerationRequest
from quire.server.request.limits import (
    MAX_IDS,
    MAX_PROMPTS,
    AtLeastMinusOne,
    CacheSalt,
    Int64,
    Text,
    TokenId,
    TokenIds,
)

Prompts = Annotated[
    list[Text | TokenId | TokenIds],
    Meta(min_length=1, max_length=MAX_IDS, description=f"token ids of one prompt, or at most {MAX_PROMPTS} prompts"),
]


class VectorFields(msgspec.Struct, kw_only=True):
    """Fields that mean the same on all routes."""

    model: Annotated[str, Meta(max_length=256)] | None = None
    # -1: to the model's limit; default: texts to the limit in the model's files (max_seq_length), if there is one
    truncate_prompt_tokens: AtLeastMinusOne | None = None
    truncation_side: Literal["left", "right"] | None = None  # default: the model's; right drops the end of the text
    add_special_tokens: bool | None = None
    priority: Int64 | None = None
    cache_salt: CacheSalt | None = None
    request_id: Annotated[str, Meta(min_length=1, max_length=256, pattern=r"^[\x21-\x7e]+$(?![\s\S])")] | None = None

    harmless: ClassVar = frozenset({"user", "metadata"})
    unsupported: ClassVar[dict[str, tuple]] = {
        "messages": (),
        "mm_processor_kwargs": (),
        "embed_dtype": ("float32",),
        "endianness": ("native", "little"),
    }


def admit(request: Request, body: VectorFields, state: needs.Admission, prefix: str) -> str:
    """Check that the server can take a request now. Returns the request's id.

    Raises Unavailable, NotFound for the model, BadRequest.
    """
    return admission.admit(
        request,
        state,
        prefix,
        model=body.model,
        priority=body.priority,
        request_id=body.request_id,
    )["request_id"]


def to_spec(request: Request, body: VectorFields, state: needs.Adapters, request_id: str, param: str) -> PoolingSpec:
    """Return the settings in `body` for its prompts, which are in its field `param`."""
    return PoolingSpec(
        request_id=request_id,
        add_special_tokens=body.add_special_tokens is not False,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=body.truncation_side,
        priority=caller(request).priority,
        cache_salt=body.cache_salt,
        tenant=caller(request).tenant,
        **admission.cache_hint(request),
        background=caller(request).background,
        adapters=state.adapters.choose(body.model),
        prompt_param=param,
    )


def to_requests(
    request: Request,
    body: VectorFields,
    state: needs.Preparing,
    request_id: str,
    prompts: list[str] | list[list[int]],
    params: PoolingParams,
    param: str,
    refuses_long: bool = False,
) -> list[GenerationRequest]:
    """Return the requests for the engine. Runs in a thread. Raises BadRequest naming the field `param` that holds the
    prompts, or another; with `refuses_long` for texts that would be cut by default, too.
    """
    spec = to_spec(request, body, state, request_id, param)
    spec.prompts, spec.params, spec.refuses_long = prompts, params, refuses_long
    return pooling.prepare(spec, state)


def prompts_of(given: str | list[str | int | list[int]], param: str) -> list[str] | list[list[int]]:
    """Return the prompts of a field that takes texts, or token ids, of one or several. Raises BadRequest for a
    mixture.
    """
    if isinstance(given, str):
        return [given]
    kinds = {type(item) for item in given}
    if len(kinds) > 1:
        raise BadRequest(
            f"{param} must be a string, a list of strings, a list of token ids, or a list of such lists; not a "
            "mixture.",
            param=param,
        )
    return [given] if int in kinds else given


async def vectors(
    request: Request, state: needs.Running, requests: Sequence[GenerationRequest], param: str
) -> list[Vector]:
    """Return the vectors of all prompts.

    Raises Unavailable if the queue is full; RequestTimeout, GatewayTimeout and Unavailable if a deadline passes; and
    the errors of `pooling.run`.
    """
    limits = request_options.deadlines(request, state)
    ids = [one.request_id for one in requests]
    request_options.reserve_room(request, state, requests, param)
    found = within(pooling.run(state, requests), limits, lambda: all_wait(state.client, ids))
    return await unless_disconnected(request, found)


class VectorUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: dict[str, int]

    @classmethod
    def from_vectors(cls, vectors: Sequence[Vector]) -> VectorUsage:
        num_tokens = sum(vector.num_prompt_tokens for vector in vectors)
        cached = sum(vector.counts.cached for vector in vectors)
        return cls(num_tokens, num_tokens, 0, {"cached_tokens": cached})


def answer_size(vectors: Sequence[Vector]) -> int:
    """Return the work of serializing the vectors, for `Threads.run`."""
    return sum(len(vector.data) for vector in vectors)


def written(vector: Vector, encoding_format: str) -> list[float] | str:
    """Return a vector in JSON: numbers, or base64 of little-endian float32."""
    if encoding_format == "base64":
        return base64.b64encode(vector.data).decode("ascii")
    return vector.values.tolist()
