"""POST /v1/embeddings: one or several texts or lists of token ids -> their embeddings."""

from __future__ import annotations

import time
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from quire.server.api import needs
from quire.server.generate.pooling import embed_params
from quire.server.http import sse
from quire.server.http.caller import caller
from quire.server.http.read_body import use_body
from quire.server.http.vectors import (
    Prompts,
    VectorFields,
    VectorUsage,
    admit,
    answer_size,
    prompts_of,
    to_requests,
    vectors,
    written,
)
from quire.server.request.generation_request import GenerationRequest
from quire.server.request.limits import Text

ID_PREFIX = "embd-"


class EmbeddingRequest(VectorFields, kw_only=True):
    """POST /v1/embeddings"""

    input: Text | Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=2**20)] | None = None  # the first ones are kept
    normalize: bool | None = None  # default: as the model's modules.json says
    use_activation: bool | None = None  # vLLM's name of `normalize`

    hints: ClassVar[dict[str, tuple]] = {"input_type": ()}  # no model here has prompts of its own for it


class Embedding(msgspec.Struct):
    index: int
    embedding: list[float] | str  # base64 of little-endian float32
    object: str = "embedding"


class EmbeddingList(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[Embedding]
    model: str
    usage: VectorUsage
    id: str
    created: int


async def embeddings(request: Request, state: needs.Vectors) -> Response:
    """Return the embeddings of one or several texts. Raises ApiError."""

    def prepare(body: EmbeddingRequest) -> tuple[EmbeddingRequest, str, list[GenerationRequest]]:
        request_id = admit(request, body, state, ID_PREFIX)
        normalize = body.normalize if body.use_activation is None else body.use_activation
        params = embed_params(state.model, body.dimensions, normalize)
        prompts = prompts_of(body.input, "input")
        return body, request_id, to_requests(request, body, state, request_id, prompts, params, "input")

    body, request_id, requests = await use_body(request, EmbeddingRequest, state, prepare)
    found = await vectors(request, state, requests, "input")

    def answer() -> Response:
        return sse.JsonResponse(
            EmbeddingList(
                data=[Embedding(i, written(vector, body.encoding_format or "float")) for i, vector in enumerate(found)],
                model=state.answering(body.model),
                usage=VectorUsage.from_vectors(found),
                id=request_id,
                created=int(time.time()),
            )
        )

    return await state.threads.run(answer_size(found), answer, caller(request).turn)
