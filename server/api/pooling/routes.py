"""The routes of scores, ranks, classes and plain vectors."""

from __future__ import annotations

from quire.server.api.pooling import protocol
from quire.server.api.pooling.classify import classify, pool
from quire.server.api.pooling.score import rerank, score
from quire.server.api.pooling.tei import TeiEmbedRequest, TeiRank, embed, rerank_texts
from quire.server.http.by_field import by_field
from quire.server.http.route import ANY_OBJECT, Route

ROUTES = [
    *(Route("POST", path, score, protocol.ScoreRequest, protocol.ScoreList) for path in ("/v1/score", "/score")),
    *(
        Route("POST", path, rerank, protocol.RerankRequest, protocol.RerankList)
        for path in ("/v1/rerank", "/v2/rerank")
    ),
    Route(
        "POST",
        "/rerank",
        by_field(
            "rerank",
            "Order texts by their relevance to a query: as /v1/rerank with `documents`, as Text Embeddings Inference "
            "with `texts`.",
            {"texts": rerank_texts, "documents": rerank},
        ),
        ANY_OBJECT,
        (protocol.RerankList, list[TeiRank]),
    ),
    Route("POST", "/embed", embed, TeiEmbedRequest, list[list[float]]),
    Route("POST", "/classify", classify, protocol.ClassifyRequest, protocol.ClassificationList),
    Route("POST", "/pooling", pool, protocol.PoolingRequest, protocol.PoolingList),
]
