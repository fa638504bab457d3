"""POST /classify and /pooling: a classifier's outputs, and vectors as they are."""

from __future__ import annotations

import time
from array import array

from starlette.requests import Request
from starlette.responses import Response

from quire.engine.messages import PoolingParams
from quire.server.api import needs
from quire.server.api.pooling.protocol import (
    Classification,
    ClassificationList,
    ClassifyRequest,
    PooledData,
    PoolingList,
    PoolingRequest,
)
from quire.server.generate.pooling import Vector, embed_params, require_task
from quire.server.generate.scoring import activated
from quire.server.http import sse
from quire.server.http.caller import caller
from quire.server.http.read_body import use_body
from quire.server.http.vectors import VectorUsage, admit, answer_size, prompts_of, to_requests, vectors, written
from quire.server.request.generation_request import GenerationRequest


async def classify(request: Request, state: needs.Vectors) -> Response:
    """Return the probabilities of the classes of one or several texts. Raises ApiError."""

    def prepare(body: ClassifyRequest) -> tuple[ClassifyRequest, str, list[GenerationRequest]]:
        request_id = admit(request, body, state, "classify-")
        require_task(state.model, "classify")
        prompts, params = prompts_of(body.input, "input"), PoolingParams("classify")
        return body, request_id, to_requests(request, body, state, request_id, prompts, params, "input")

    body, request_id, requests = await use_body(request, ClassifyRequest, state, prepare)
    found, name = await vectors(request, state, requests, "input"), state.answering(body.model)
    labels = state.model.pooling.labels

    def answer() -> Response:
        data = []
        for i, vector in enumerate(found):
            probs = _outputs(vector.values, state, body.use_activation)
            data.append(Classification(i, labels[probs.index(max(probs))], probs, len(probs)))
        return sse.JsonResponse(
            ClassificationList(
                id=request_id, created=int(time.time()), model=name, data=data, usage=VectorUsage.from_vectors(found)
            )
        )

    return await state.threads.run(answer_size(found), answer, caller(request).turn)


async def pool(request: Request, state: needs.Vectors) -> Response:
    """Return embeddings or, of a classifier, the probabilities of classes, of texts or of tokens. Raises ApiError."""

    def prepare(body: PoolingRequest) -> tuple[PoolingRequest, str, list[GenerationRequest]]:
        request_id = admit(request, body, state, "pool-")
        prompts = prompts_of(body.input, "input")
        return body, request_id, to_requests(request, body, state, request_id, prompts, _params(body, state), "input")

    body, request_id, requests = await use_body(request, PoolingRequest, state, prepare)
    found, name = await vectors(request, state, requests, "input"), state.answering(body.model)

    def answer() -> Response:
        data = [PooledData(i, _data(vector, requests[0].pooling.task, body, state)) for i, vector in enumerate(found)]
        return sse.JsonResponse(
            PoolingList(
                id=request_id, created=int(time.time()), model=name, data=data, usage=VectorUsage.from_vectors(found)
            )
        )

    return await state.threads.run(answer_size(found), answer, caller(request).turn)


def _params(body: PoolingRequest, state: needs.Model) -> PoolingParams:
    pooling = state.model.pooling
    task = body.task or (pooling.tasks[0] if pooling is not None else "embed")
    if task != "embed":
        require_task(state.model, task)
        return PoolingParams(task)
    return embed_params(state.model, body.dimensions, body.normalize)


def _data(vector: Vector, task: str, body: PoolingRequest, state: needs.Model) -> list[float] | list[list[float]] | str:
    if task == "embed":
        return written(vector, body.encoding_format or "float")
    if task == "classify":
        return _outputs(vector.values, state, body.use_activation)
    values, size = vector.values, len(state.model.pooling.labels)
    return [_outputs(values[i : i + size], state, body.use_activation) for i in range(0, len(values), size)]


def _outputs(values: array, state: needs.Model, use_activation: bool | None) -> list[float]:
    return activated(values, "identity" if use_activation is False else state.model.pooling.activation)
