"""LoRA for the experts of a mixture-of-experts layer. Where the platform has no product of all experts that takes
adapters, tokens that use one pass their experts one by one, each product followed by the adapters' products; the other
tokens of a step keep the product of all experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from quire.worker.layers.lora import Group, LinearLora, LoraRows, StepLora, add_lora

Halves = Callable[[int, torch.Tensor], torch.Tensor]


class ExpertProduct:
    """One of the two products of an expert, as adapters see it: a linear layer of `in_features` and `out_features` of
    this rank; the first is [gate, up].
    """

    def __init__(self, step: StepLora, in_features: int, out_features: int):
        self.lora = LinearLora(step)
        self.in_features, self.out_features = in_features, out_features


@dataclass(frozen=True, slots=True)
class ExpertForm:
    """The computation of single experts, by their numbers: rows `[n, H]` to the gate and up, `[n, 2 I]`, of the
    model's dtype or float32; the activation; and rows `[n, I]` to `[n, H]`.
    """

    gate_up: Halves
    activate: Callable[[torch.Tensor], torch.Tensor]
    down: Halves
    add: Callable[..., None] | None  # the platform's `add_lora`


class ExpertsLora:
    """The adapters of the experts of one layer. `start` and `length` are this rank's share of `size` intermediate
    entries; `interleaved` says that gate and up rows alternate in tensors of all experts.
    """

    def __init__(
        self, step: StepLora, local: range, num_experts: int, hidden_size: int, size: int, start: int, length: int,
        interleaved: bool,
    ):  # fmt: skip
        self.step, self.num_experts, self.hidden_size, self.size = step, num_experts, hidden_size, size
        self.start, self.length, self.interleaved = start, length, interleaved
        self.gate_up = {i: ExpertProduct(step, hidden_size, 2 * length) for i in local}
        self.down = {i: ExpertProduct(step, length, hidden_size) for i in local}

    @property
    def width(self) -> int:
        """Return entries per LoRA rank of an adapter of all experts on this rank."""
        return sum(one.in_features + one.out_features for one in (*self.gate_up.values(), *self.down.values()))

    def groups(self, num_rows: int) -> list[LoraRows]:
        """Return the rows of a step whose adapters have matrices for some of the experts."""
        if self.step.recorded is not None:  # no adapter of a recorded step has matrices for experts
            return []
        keys = {key for one in (*self.gate_up.values(), *self.down.values()) for key in one.lora.weights}
        return [rows for rows in self.step.rows_for(num_rows) if rows.key in keys] if keys else []

    def run(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        groups: Sequence[LoraRows],
        form: ExpertForm,
        weigh_inputs: bool,
    ) -> torch.Tensor:
        """Return `moe.run_experts` of x `[T, H]` for the rows of `groups`; the results of other rows are 0."""
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        scales = [_scale_per_row(rows, len(x)) for rows in groups]
        adapted = torch.stack(scales).isnan().all(0).logical_not()
        weights = weights.float()
        hit = set(ids[adapted].unique().tolist())
        for expert in sorted(hit & self.gate_up.keys()):
            tokens, choice = torch.where((ids == expert) & adapted[:, None])
            rows, weight = x[tokens], weights[tokens, choice, None]
            if weigh_inputs:
                rows = (rows * weight).to(x.dtype)
            some = [_subset(group.key, scale[tokens]) for group, scale in zip(groups, scales)]
            result = self._expert(expert, rows, [group for group in some if len(group.index)], form).float()
            out.index_add_(0, tokens, result if weigh_inputs else result * weight)
        return out.to(x.dtype)

    def _expert(self, expert: int, rows: torch.Tensor, groups: list[LoraRows], form: ExpertForm) -> torch.Tensor:
        add = form.add or add_lora
        halves = form.gate_up(expert, rows)
        if some := _with_weights(groups, self.gate_up[expert]):
            add(rows, halves, some, self.step.fixed_order)
        inner = form.activate(halves).to(rows.dtype)
        out = form.down(expert, inner)
        if some := _with_weights(groups, self.down[expert]):
            add(inner, out, some, self.step.fixed_order)
        return out


def _scale_per_row(rows: LoraRows, num_rows: int) -> torch.Tensor:
    """Return the scale of each row of the step, NaN for rows without the adapter."""
    scales = torch.full((num_rows,), float("nan"), device=rows.index.device)
    scales[rows.index] = 1.0 if rows.scales is None else rows.scales
    return scales


def _subset(key: str, scales: torch.Tensor) -> LoraRows:
    index = scales.isnan().logical_not().nonzero()[:, 0]
    return LoraRows(key, index, scales[index], len(index) == len(scales), overlaps=True)


def _with_weights(groups: Sequence[LoraRows], product: ExpertProduct) -> list[Group]:
    weights = product.lora.weights
    return [(rows, weights[rows.key]) for rows in groups if rows.key in weights]


def run_mixed(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    lora: ExpertsLora,
    form: ExpertForm,
    weigh_inputs: bool,
    base: Callable[..., torch.Tensor],
    adapted: Callable[..., torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return the experts' outputs of a step, `[T, H]`: `base(x, weights, ids)` for rows without an adapter of experts,
    or `adapted(x, weights, ids, groups, lora)` for all, if the platform has that.
    """
    groups = lora.groups(len(x))
    if not groups:
        return base(x, weights, ids)
    if adapted is not None:
        return adapted(x, weights, ids, groups, lora)
    out = lora.run(x, weights, ids, groups, form, weigh_inputs)
    others = torch.ones(len(x), dtype=torch.bool, device=x.device)
    for rows in groups:
        others[rows.index] = False
    if bool(others.any()):
        out[others] = base(x[others], weights[others], ids[others])
    return out
