"""POST /embed, and /rerank with `texts`: as Text Embeddings Inference (TEI) has them."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from quire.server.api import needs
from quire.server.api.pooling.protocol import Texts
from quire.server.generate.pooling import PoolingSpec, embed_params, prepare
from quire.server.generate.scoring import Scoring, prepare_scoring
from quire.server.http import sse
from quire.server.http.caller import caller
from quire.server.http.read_body import use_body
from quire.server.http.vectors import Prompts, VectorFields, admit, answer_size, prompts_of, to_spec, vectors
from quire.server.request.generation_request import GenerationRequest
from quire.server.request.limits import Text


class _Fields(msgspec.Struct, kw_only=True):
    truncate: bool | None = None  # default: true; false: a text that is too long is refused
    truncation_direction: Literal["Left", "Right", "left", "right"] | None = None

    harmless: ClassVar = frozenset()
    unsupported: ClassVar[dict[str, tuple]] = {}


class TeiEmbedRequest(_Fields, kw_only=True):
    """POST /embed"""

    inputs: Text | Prompts
    normalize: bool | None = None  # default: true
    dimensions: Annotated[int, Meta(ge=1, le=2**20)] | None = None

    unsupported: ClassVar[dict[str, tuple]] = {"prompt_name": ()}


class TeiRerankRequest(_Fields, kw_only=True):
    """POST /rerank with `texts`"""

    query: Text
    texts: Texts
    raw_scores: bool | None = None  # true: the classifier's logits
    return_text: bool | None = None


class TeiRank(msgspec.Struct):
    index: int
    score: float
    text: str | UnsetType = UNSET


def _spec(request: Request, body: _Fields, state: needs.Admission, param: str) -> PoolingSpec:
    """Admit the request and return its spec. Raises Unavailable, BadRequest."""
    fields = VectorFields(
        truncate_prompt_tokens=None if body.truncate is False else -1,
        truncation_side=body.truncation_direction and body.truncation_direction.lower(),
    )
    spec = to_spec(request, fields, state, admit(request, fields, state, "tei-"), param)
    spec.refuses_long = body.truncate is False
    return spec


async def embed(request: Request, state: needs.Vectors) -> Response:
    """Return the embeddings of one or several texts as lists of numbers. Raises ApiError."""

    def work(body: TeiEmbedRequest) -> list[GenerationRequest]:
        spec = _spec(request, body, state, "inputs")
        spec.prompts = prompts_of(body.inputs, "inputs")
        spec.params = embed_params(state.model, body.dimensions, body.normalize is not False)
        return prepare(spec, state)

    found = await vectors(request, state, await use_body(request, TeiEmbedRequest, state, work), "inputs")

    def answer() -> Response:
        return sse.JsonResponse([vector.values.tolist() for vector in found])

    return await state.threads.run(answer_size(found), answer, caller(request).turn)


async def rerank_texts(request: Request, state: needs.Vectors) -> Response:
    """Return texts by their relevance to a query, the most relevant first. Raises ApiError."""

    def work(body: TeiRerankRequest) -> tuple[TeiRerankRequest, Scoring]:
        spec = _spec(request, body, state, "texts")
        scoring = prepare_scoring(spec, [(body.query, text) for text in body.texts], state, False)
        scoring.activation = "identity" if body.raw_scores else "sigmoid"
        return body, scoring

    body, scoring = await use_body(request, TeiRerankRequest, state, work)
    found = await vectors(request, state, scoring.requests, "texts")

    def answer() -> Response:
        scores = scoring.scores(found)
        ranks = [TeiRank(i, scores[i]) for i in sorted(range(len(scores)), key=lambda i: -scores[i])]
        if body.return_text:
            for rank in ranks:
                rank.text = body.texts[rank.index]
        return sse.JsonResponse(ranks)

    return await state.threads.run(answer_size(found), answer, caller(request).turn)
