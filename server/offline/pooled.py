"""The results of `LLM.embed`, `LLM.classify` and `LLM.score`. Names and shapes are vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.engine.messages import PoolingParams
from quire.server.generate.pooling import PoolingSpec, Vector, embed_params, prepare, require_task
from quire.server.generate.scoring import Scoring, activated, prepare_scoring
from quire.server.http import needs
from quire.server.request.generation_request import GenerationRequest


@dataclass(slots=True)
class EmbeddingOutput:
    embedding: list[float]


@dataclass(slots=True)
class ClassificationOutput:
    probs: list[float]


@dataclass(slots=True)
class ScoringOutput:
    score: float


@dataclass(slots=True)
class PooledRequestOutput:
    """A prompt and its `outputs`. `num_cached_tokens` of the prompt were found in the prefix cache."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: object
    finished: bool
    num_cached_tokens: int


def embedding_requests(
    request_id: str,
    prompts: list[str] | list[list[int]],
    state: needs.Encoding,
    dimensions: int | None,
    normalize: bool | None,
    truncate_prompt_tokens: int | None,
) -> list[GenerationRequest]:
    """Raise BadRequest."""
    params = embed_params(state.model, dimensions, normalize)
    return prepare(_spec(request_id, "prompts", truncate_prompt_tokens, prompts, params), state)


def classification_requests(
    request_id: str, prompts: list[str] | list[list[int]], state: needs.Encoding, truncate_prompt_tokens: int | None
) -> list[GenerationRequest]:
    """Raise BadRequest."""
    require_task(state.model, "classify")
    params = PoolingParams("classify")
    return prepare(_spec(request_id, "prompts", truncate_prompt_tokens, prompts, params), state)


def scoring(
    request_id: str,
    first: Sequence[str],
    second: Sequence[str],
    state: needs.Encoding,
    truncate_prompt_tokens: int | None,
) -> Scoring:
    """Return one text of `first` for all of `second`, or as many. Raises BadRequest, ValueError."""
    if len(first) not in (1, len(second)):
        raise ValueError(f"data_1 has {len(first)} texts and data_2 {len(second)}: give one, or as many")
    pairs = list(zip(list(first) * len(second) if len(first) == 1 else first, second, strict=True))
    return prepare_scoring(_spec(request_id, "data_2", truncate_prompt_tokens), pairs, state)


def _spec(
    request_id: str,
    param: str,
    truncate_prompt_tokens: int | None,
    prompts: list[str] | list[list[int]] | None = None,
    params: PoolingParams | None = None,
) -> PoolingSpec:
    return PoolingSpec(
        request_id=request_id,
        prompts=prompts or [],
        params=params or PoolingParams(),
        truncate_prompt_tokens=truncate_prompt_tokens,
        prompt_param=param,
    )


def embedding_outputs(requests: Sequence[GenerationRequest], vectors: Sequence[Vector]) -> list[PooledRequestOutput]:
    return [
        output(request, vector, EmbeddingOutput(vector.values.tolist()))
        for request, vector in zip(requests, vectors, strict=True)
    ]


def classification_outputs(
    requests: Sequence[GenerationRequest], vectors: Sequence[Vector], activation: str
) -> list[PooledRequestOutput]:
    return [
        output(request, vector, ClassificationOutput(activated(vector.values, activation)))
        for request, vector in zip(requests, vectors, strict=True)
    ]


def scoring_outputs(found: Scoring, vectors: Sequence[Vector]) -> list[PooledRequestOutput]:
    """Return one per pair; its prompt is the pair, or the document if queries are read separately."""
    indices = range(len(vectors)) if found.pairs is None else [document for _, document in found.pairs]
    return [
        output(found.requests[i], vectors[i], ScoringOutput(score))
        for i, score in zip(indices, found.scores(vectors), strict=True)
    ]


def output(request: GenerationRequest, vector: Vector, outputs: object) -> PooledRequestOutput:
    return PooledRequestOutput(request.request_id, request.prompt_token_ids, outputs, True, vector.counts.cached)
