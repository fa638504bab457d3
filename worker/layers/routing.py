"""Choose the experts of each token, by the formulas of the model families."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from quire.worker.layers.rowwise import sigmoid

if TYPE_CHECKING:
    from quire.worker.spec.moe import RoutingSpec


def route(
    spec: RoutingSpec, logits: torch.Tensor, correction: torch.Tensor | None = None, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (weights float32 `[T, k]`, ids int64 `[T, k]`) for logits `[T, E]`; correction and bias, which is added to
    the logits, are `[E]` float32.
    """
    logits = logits.float()
    scores = _scores(spec, logits if bias is None else logits + bias)
    choice = scores if correction is None else scores + correction
    if spec.bounds_groups:
        choice = _in_best_groups(spec, choice)
    ids = choice.topk(spec.top_k, -1).indices
    return _weights(spec, scores.gather(-1, ids)) * spec.scale, ids


def weigh(spec: RoutingSpec, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the weights float32 `[T, k]` of the experts `ids` `[T, k]` for logits `[T, E]`."""
    return _weights(spec, _scores(spec, logits.float()).gather(-1, ids)) * spec.scale


def _scores(spec: RoutingSpec, logits: torch.Tensor) -> torch.Tensor:
    if spec.scores == "sigmoid":
        return sigmoid(logits)
    if spec.scores == "sqrtsoftplus":
        return F.softplus(logits).sqrt()
    return logits.softmax(-1) if spec.scores == "softmax" else logits


def _in_best_groups(spec: RoutingSpec, choice: torch.Tensor) -> torch.Tensor:
    """Return `choice`, -inf for the experts outside the best groups."""
    groups = choice.unflatten(-1, (spec.num_groups, -1))
    best = groups.topk(spec.group_best, -1).values.sum(-1).topk(spec.top_groups, -1).indices
    outside = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter_(-1, best, False)
    return groups.masked_fill(outside.unsqueeze(-1), -torch.inf).flatten(-2)


def _weights(spec: RoutingSpec, chosen: torch.Tensor) -> torch.Tensor:
    if spec.weights == "normalized":
        return chosen / (chosen.sum(-1, keepdim=True) + spec.epsilon)
    if spec.weights == "sigmoid":
        return sigmoid(chosen)
    return chosen.softmax(-1) if spec.weights == "softmax" else chosen
