"""POST /v1/score and /v1/rerank: how well documents answer queries."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response

from quire.server.api import needs
from quire.server.api.pooling.protocol import (
    Document,
    RerankList,
    RerankRequest,
    RerankResult,
    Score,
    ScoreList,
    ScoreRequest,
)
from quire.server.errors import BadRequest
from quire.server.generate.pooling import text_limit
from quire.server.generate.scoring import Scoring, prepare_scoring
from quire.server.http import sse
from quire.server.http.caller import caller
from quire.server.http.read_body import use_body
from quire.server.http.vectors import VectorFields, VectorUsage, admit, answer_size, to_spec, vectors


async def score(request: Request, state: needs.Vectors) -> Response:
    """Score how well pairs of texts fit together. Raises ApiError."""

    def prepare(body: ScoreRequest) -> tuple[ScoreRequest, str, Scoring]:
        request_id = admit(request, body, state, "score-")
        return body, request_id, _scoring(request, body, state, request_id, _pairs(body), "text_2")

    body, request_id, scoring = await use_body(request, ScoreRequest, state, prepare)
    found = await vectors(request, state, scoring.requests, "text_2")

    def answer() -> Response:
        scores = [Score(i, value) for i, value in enumerate(scoring.scores(found))]
        return sse.JsonResponse(
            ScoreList(
                id=request_id,
                created=int(time.time()),
                model=state.answering(body.model),
                data=scores,
                usage=VectorUsage.from_vectors(found),
            )
        )

    return await state.threads.run(answer_size(found), answer, caller(request).turn)


async def rerank(request: Request, state: needs.Vectors) -> Response:
    """Order documents by their relevance to a query. Raises ApiError."""

    def prepare(body: RerankRequest) -> tuple[RerankRequest, str, Scoring]:
        if body.max_tokens_per_doc is not None and body.truncate_prompt_tokens is None:
            body.truncate_prompt_tokens = min(body.max_tokens_per_doc, text_limit(state.require_ready()))
        request_id = admit(request, body, state, "rerank-")
        pairs = [(body.query, _text(document)) for document in body.documents]
        return body, request_id, _scoring(request, body, state, request_id, pairs, "documents")

    body, request_id, scoring = await use_body(request, RerankRequest, state, prepare)
    found = await vectors(request, state, scoring.requests, "documents")

    def answer() -> Response:
        scores = scoring.scores(found)
        order = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n or None]
        results = [RerankResult(i, scores[i]) for i in order]
        if body.return_documents is not False:
            for result in results:
                result.document = Document(_text(body.documents[result.index]))
        return sse.JsonResponse(
            RerankList(
                id=request_id, model=state.answering(body.model), results=results, usage=VectorUsage.from_vectors(found)
            )
        )

    return await state.threads.run(answer_size(found), answer, caller(request).turn)


def _scoring(
    request: Request,
    body: VectorFields,
    state: needs.Vectors,
    request_id: str,
    pairs: list[tuple[str, str]],
    param: str,
) -> Scoring:
    return prepare_scoring(to_spec(request, body, state, request_id, param), pairs, state, body.use_activation)


def _pairs(body: ScoreRequest) -> list[tuple[str, str]]:
    """Return (query, document) pairs: one query for all documents, or one query per document."""
    first, second = body.text_1 or body.queries, body.text_2 or body.documents
    for param, value in (("text_1", first), ("text_2", second)):
        if value is None:
            raise BadRequest(f"Missing required parameter: {param}.", param=param, code="missing_required_parameter")
    queries, documents = ([value] if isinstance(value, str) else value for value in (first, second))
    if len(queries) not in (1, len(documents)):
        raise BadRequest(
            f"text_1 has {len(queries)} texts and text_2 {len(documents)}; text_1 must have one, or as many as text_2.",
            param="text_1",
        )
    return list(zip(queries * len(documents) if len(queries) == 1 else queries, documents, strict=True))


def _text(document: str | Document) -> str:
    return document if isinstance(document, str) else document.text
