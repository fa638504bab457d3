"""LoRA beside a linear layer: for the rows of a step that have an adapter, `scale * B A x` is added to the layer's own
product, whatever the format of its weights (arXiv:2106.09685).

The rows of a step are grouped by adapter (`StepLora`), so that a step may mix any adapters and none.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(slots=True)
class LoraRows:
    """The rows of a step that use one adapter. `index` is None if they are all rows; `scales` `[n, 1]` is None if all
    are 1.
    """

    key: str
    index: torch.Tensor | None
    scales: torch.Tensor | None


@dataclass(slots=True)
class StepLora:
    """Which rows of the current step use which adapters. One per model; the runner writes it before each step.

    The last layer computes fewer rows than the others: those whose hidden states are needed.
    """

    num_tokens: int = 0
    rows: list[LoraRows] = field(default_factory=list)
    needed: list[LoraRows] = field(default_factory=list)
    fixed_order: bool = False  # a row's result has the same bits in any step

    @property
    def applies(self) -> bool:
        """Whether any row of the step has an adapter."""
        return bool(self.rows)

    def of(self, num_rows: int) -> list[LoraRows]:
        """The rows by adapter of a layer that computes `num_rows`."""
        return self.rows if num_rows == self.num_tokens else self.needed


@dataclass(slots=True)
class LoraWeights:
    """One adapter's matrices for one layer, float32: A `[r, in]` of all its parts, and per part the columns of A's
    product, the columns of the layer's output and B `[out, r]`, which includes the adapter's scale.
    """

    a: torch.Tensor
    parts: list[tuple[slice, slice, torch.Tensor]]

    def to(self, device: torch.device) -> LoraWeights:
        return LoraWeights(self.a.to(device), [(rows, columns, b.to(device)) for rows, columns, b in self.parts])

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + sum(b.nbytes for _, _, b in self.parts)


class LinearLora:
    """The adapters of one linear layer, by key."""

    def __init__(self, step: StepLora):
        self.step = step
        self.weights: dict[str, LoraWeights] = {}

    def applies(self) -> bool:
        """Whether an adapter of the step has matrices for this layer."""
        return any(rows.key in self.weights for rows in self.step.rows)

    def add(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """`out` `[T, out]`, the layer's product of x `[T, in]`, with what the adapters add. Overwrites `out`."""
        for rows in self.step.of(len(x)):
            if (weights := self.weights.get(rows.key)) is not None:
                self._add_one(weights, rows, x, out)
        return out

    def _add_one(self, weights: LoraWeights, rows: LoraRows, x: torch.Tensor, out: torch.Tensor) -> None:
        multiply = _one_by_one if self.step.fixed_order else _matmul
        inner = multiply((x if rows.index is None else x[rows.index]).float(), weights.a)
        if rows.scales is not None:
            inner = inner * rows.scales
        for ranks, columns, b in weights.parts:
            added, target = multiply(inner[:, ranks], b), out[:, columns]
            if rows.index is None:
                target.copy_(target.float() + added)
            else:
                target[rows.index] = (target[rows.index].float() + added).to(out.dtype)


def _matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight.t()


def _one_by_one(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Every row by itself, so that the order of its sums does not depend on the number of rows."""
    return torch.cat([torch.mv(weight, row)[None] for row in x.contiguous()])
