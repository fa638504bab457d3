"""The routes of scores, ranks, classes and plain vectors."""

from __future__ import annotations

from quire.server.api.pooling import protocol
from quire.server.api.pooling.classify import classify, pool
from quire.server.api.pooling.score import rerank, score
from quire.server.http.route import Route

ROUTES = [
    *(Route("POST", path, score, protocol.ScoreRequest, protocol.ScoreList) for path in ("/v1/score", "/score")),
    *(
        Route("POST", path, rerank, protocol.RerankRequest, protocol.RerankList)
        for path in ("/v1/rerank", "/v2/rerank", "/rerank")
    ),
    Route("POST", "/classify", classify, protocol.ClassifyRequest, protocol.ClassificationList),
    Route("POST", "/pooling", pool, protocol.PoolingRequest, protocol.PoolingList),
]
