"""LoRA in addition to a linear layer: for the rows of a step that have an adapter, `scale * B A x` is added to the
layer's own product, whatever the format of its weights (arXiv:2106.09685).

The rows of a step are grouped by adapter (`StepLora`), so that a step may mix any adapters and none. Platforms replace
`add_lora`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from quire.worker.layers.layer_ops import LayerOps


@dataclass(slots=True)
class LoraRows:
    """The rows of a step that use one adapter: `index` int64 `[n]`, ascending; `scales` float32 `[n]`, None if all are
    1.
    """

    key: str
    index: torch.Tensor
    scales: torch.Tensor | None
    is_all: bool  # whether they are all rows
    overlaps: bool = False  # whether some of them use another adapter, too
    packed: Any = None  # the same for the platform's kernels, made once per step


@dataclass(slots=True)
class LoraWeights:
    """One adapter's matrices for one layer, of the model's dtype: A `[r, in]` of all its parts, and per part the
    columns of A's product, the columns of the layer's output and B `[out, r]`, which includes the adapter's scale.
    """

    a: torch.Tensor
    parts: list[tuple[slice, slice, torch.Tensor]]
    packed: Any = None  # the same in the form of the platform's kernels, made with the first use

    def to(self, device: torch.device) -> LoraWeights:
        return LoraWeights(self.a.to(device), [(rows, columns, b.to(device)) for rows, columns, b in self.parts])

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + sum(b.nbytes for _, _, b in self.parts)


Adapted = list[tuple[nn.Module, LoraWeights]]  # an adapter's linear layers
Group = tuple[LoraRows, LoraWeights]


@dataclass(slots=True)
class StepLora:
    """The adapters of the current step's rows. One per model; `lora.adapters.Adapters` writes it before each
    step.

    The last layer computes fewer rows than the others: those whose hidden states are needed.
    """

    num_tokens: int = 0
    rows: list[LoraRows] = field(default_factory=list)
    needed: list[LoraRows] = field(default_factory=list)
    fixed_order: bool = False  # a row's result has the same bits in any step
    active: OrderedDict[str, Adapted] = field(default_factory=OrderedDict)  # adapters on the device, by key
    recorded: Any = None  # the `LoraSlots` where a step that is being recorded finds its rows and adapters

    @property
    def applies(self) -> bool:
        """Return whether any row of the step has an adapter."""
        return bool(self.rows) or self.recorded is not None

    def rows_for(self, num_rows: int) -> list[LoraRows]:
        """Return the rows by adapter of a layer that computes `num_rows`."""
        return self.rows if num_rows == self.num_tokens else self.needed


def add_lora(x: torch.Tensor, out: torch.Tensor, groups: Sequence[Group], fixed_order: bool = False) -> None:
    """Add the adapters' products to `out` `[T, out]`, a layer's product of x `[T, in]`, in x's dtype or float32. Sums
    are float32; with `fixed_order` a row's sums have one order, whatever the other rows.
    """
    multiply = _one_by_one if fixed_order else _matmul
    for rows, weights in groups:
        inner = multiply((x if rows.is_all else x[rows.index]).float(), weights.a.float())
        if rows.scales is not None:
            inner = inner * rows.scales[:, None]
        for ranks, columns, b in weights.parts:
            added, target = multiply(inner[:, ranks], b.float()), out[:, columns]
            if rows.is_all:
                target.copy_(target.float() + added)
            else:
                target[rows.index] = (target[rows.index].float() + added).to(out.dtype)


class LinearLora:
    """The adapters of one linear layer, by key. The layer combines `num_modules` modules of a checkpoint, in
    `num_parts` parts.
    """

    def __init__(self, step: StepLora, num_modules: int = 1, num_parts: int = 1):
        self.step, self.num_modules, self.num_parts = step, num_modules, num_parts
        self.weights: dict[str, LoraWeights] = {}
        self.slots: Any = None  # `LayerSlots`, if steps are recorded

    def applies(self) -> bool:
        """Return whether an adapter of the step has matrices for this layer."""
        return self.step.recorded is not None or any(rows.key in self.weights for rows in self.step.rows)

    def groups(self, num_rows: int) -> list[Group]:
        """Return the step's rows by adapter, and their matrices, of a layer that computes `num_rows`."""
        return [
            (rows, self.weights[rows.key]) for rows in self.step.rows_for(num_rows) if rows.key in self.weights
        ]

    def add(self, x: torch.Tensor, out: torch.Tensor, ops: LayerOps | None) -> torch.Tensor:
        """Return `out` `[T, out]`, the layer's product of x `[T, in]`, plus the adapters' products. Overwrites
        `out`.
        """
        if self.step.recorded is not None:
            ops.add_lora_slots(x, out, self.step.recorded, self.slots)
            return out
        if groups := self.groups(len(x)):
            (ops.add_lora if ops else add_lora)(x, out, groups, self.step.fixed_order)
        return out


def _matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight.t()


def _one_by_one(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute every row by itself, so that the order of its sums does not depend on the number of rows."""
    return torch.cat([torch.mv(weight, row)[None] for row in x.contiguous()])
