"""Scores of documents for queries: by a cross-encoder, which reads both together, or as the cosine of embeddings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

from quire.engine.messages import PoolingInfo, PoolingParams
from quire.server.errors import BadRequest
from quire.server.generate import needs
from quire.server.generate.pooling import (
    PoolingSpec,
    Vector,
    embed_params,
    prepare,
    to_request,
    truncated_size,
    truncation_side_of,
)
from quire.server.request.generation_request import GenerationRequest
from quire.server.request.limits import MAX_PROMPTS

_MAX_CUTS = 4  # attempts to fit a rendered pair into its limit


@dataclass(slots=True)
class Scoring:
    """The requests whose vectors give the scores: one per pair for a cross-encoder, else one per text; `pairs` then
    holds (query, document) as indices of requests.
    """

    requests: list[GenerationRequest]
    pairs: list[tuple[int, int]] | None = None
    activation: str = "identity"

    def scores(self, vectors: Sequence[Vector]) -> list[float]:
        """Return one score per pair, from the vectors of all requests."""
        values = [vector.values for vector in vectors]
        if self.pairs is None:
            return [activated(logits, self.activation)[0] for logits in values]
        return [sum(map(mul, values[query], values[document])) for query, document in self.pairs]


def prepare_scoring(
    spec: PoolingSpec, pairs: Sequence[tuple[str, str]], state: needs.Encoding, use_activation: bool | None = None
) -> Scoring:
    """Return the scoring of `pairs`; runs in a thread. `spec` has no prompts yet. Raises BadRequest."""
    if len(pairs) > MAX_PROMPTS:
        raise BadRequest(
            f"{spec.prompt_param}: {len(pairs)} pairs are more than {MAX_PROMPTS}.", param=spec.prompt_param
        )
    pooling = state.model.pooling
    if pooling is not None and "classify" in pooling.tasks:
        return _cross_encoder(spec, pairs, state, pooling, use_activation)
    spec.params = embed_params(state.model, None, True)
    spec.prompts = list(dict.fromkeys(text for pair in pairs for text in pair))
    index = {text: i for i, text in enumerate(spec.prompts)}
    return Scoring(prepare(spec, state), [(index[query], index[document]) for query, document in pairs])


def _cross_encoder(
    spec: PoolingSpec,
    pairs: Sequence[tuple[str, str]],
    state: needs.Encoding,
    pooling: PoolingInfo,
    use_activation: bool | None,
) -> Scoring:
    if len(pooling.labels) != 1:
        raise BadRequest(
            f"The model has {len(pooling.labels)} labels; only a classifier with one label scores pairs.", param="model"
        )
    spec.params = PoolingParams("classify")
    size = truncated_size(spec, state.model)
    activation = "identity" if use_activation is False else pooling.activation
    if pooling.template:
        prompts = [_rendered(spec, *pair, state, size) for pair in pairs]
        return Scoring([to_request(spec, ids, state.model) for ids in prompts], activation=activation)
    requests = []
    for ids, sequence_ids, types in state.tokenizer.encode_pairs(pairs, spec.add_special_tokens):
        kept = _kept(spec, sequence_ids, size, truncation_side_of(spec, state.model))
        types = [types[i] for i in kept]
        second_start = types.index(1) if pooling.whole_prompts and 1 in types else 0
        spec.params = PoolingParams("classify", second_start=second_start)
        requests.append(to_request(spec, [ids[i] for i in kept], state.model))
    return Scoring(requests, activation=activation)


def _kept(spec: PoolingSpec, sequence_ids: list[int | None], size: int | None, side: str) -> Sequence[int]:
    """Return the indices of a joined pair's tokens that remain after truncation to `size` tokens. If the request sets
    the size, tokens of the document are dropped; for the model's limit, those of the longer text, then of both, as in
    transformers.
    """
    excess = 0 if size is None else len(sequence_ids) - size
    if excess <= 0:
        return range(len(sequence_ids))
    query, document = ([i for i, text in enumerate(sequence_ids) if text == number] for number in (0, 1))
    if spec.truncate_prompt_tokens is not None:
        kept = len(query), len(document) - excess
    else:
        kept = _balanced(len(query), len(document), len(query) + len(document) - excess)
    if min(kept) < 1:
        raise _no_room(size)
    dropped = set()
    for places, count in zip((query, document), kept, strict=True):
        dropped.update(places[count:] if side == "right" else places[: len(places) - count])
    return [i for i in range(len(sequence_ids)) if i not in dropped]


def _balanced(first: int, second: int, room: int) -> tuple[int, int]:
    """Return how many of `first` and `second` tokens fit into `room` tokens, if the longer text is cut first."""
    shorter = min(first, second)
    if shorter <= room // 2:
        return (shorter, room - shorter) if first <= second else (room - shorter, shorter)
    less, more = room // 2, room - room // 2
    return (less, more) if first <= second else (more, less)


def _rendered(spec: PoolingSpec, query: str, document: str, state: needs.Encoding, size: int | None) -> list[int]:
    """Return the token ids of a pair in the model's chat template, as messages of the roles query and document. Shorten
    the document until the ids number at most `size`.
    """
    tokenizer, prompt = state.tokenizer, state.model.pooling.prompt
    before = [{"role": "system", "content": prompt}] if prompt else []
    for _ in range(_MAX_CUTS):
        try:
            text = tokenizer.render_chat(
                [*before, {"role": "query", "content": query}, {"role": "document", "content": document}]
            )
        except ValueError as error:
            raise BadRequest(f"The model's chat template cannot render a pair: {error}.", param="model") from error
        ids = tokenizer.encode(text, add_special_tokens=False)
        if size is None or len(ids) <= size:
            return ids
        kept = tokenizer.encode(document, add_special_tokens=False)
        room = len(kept) - (len(ids) - size)
        if room < 1:
            break
        kept = kept[:room] if truncation_side_of(spec, state.model) == "right" else kept[-room:]
        document = tokenizer.decode(kept, skip_special_tokens=False)
    raise _no_room(size)


def _no_room(size: int) -> BadRequest:
    return BadRequest(
        f"truncate_prompt_tokens: {size} leaves no room for a document next to the query.",
        param="truncate_prompt_tokens",
    )


def activated(logits: Sequence[float], activation: str) -> list[float]:
    """Return the outputs of a classifier: softmax over all labels, or sigmoid or identity of each."""
    match activation:
        case "softmax":
            largest = max(logits)
            weights = [math.exp(logit - largest) for logit in logits]
            total = sum(weights)
            return [weight / total for weight in weights]
        case "sigmoid":
            return [(1 + math.tanh(logit / 2)) / 2 for logit in logits]
        case _:
            return list(logits)
