"""Common parts of mixers with a state: parameters in float32, cut into this rank's share, and the convolution
in front.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from quire.worker.layers.linear import Part, Shard, empty_parameter
from quire.worker.layers.state import RecurrentState, StateStep
from quire.worker.layers.states.short_conv import causal_conv
from quire.worker.layers.views import View
from quire.worker.parallel import Exchange
from quire.worker.platforms.ops import Ops

TORCH = Ops()
Rows = tuple[int, int]  # start and length of this rank's rows of a tensor


class StateMixer(nn.Module):
    """Base of the mixers: maps x `[T, H]` to `[T, H]`, or to its rows in `needed_rows`, by a sum over the ranks. All
    tokens pass the state.

    A class with `native_twin` "mixer" is `out_proj(mix(projections of x, call))`: native code may compute the
    projections with the rest of the layer (`cpu/segments.py`).
    """

    def __init__(self, hidden_size: int, layer: int, shapes: tuple[tuple[int, ...], ...]):
        super().__init__()
        self.hidden_size = hidden_size
        self.state = RecurrentState(layer, shapes)
        self.ops = TORCH

    def use(self, ops: Ops) -> None:
        """Switch to a platform's operations."""
        self.ops = ops

    def exchanges(self, num_tokens: int, num_needed: int) -> list[Exchange]:
        """Return the all-reduces of `forward`, in order."""
        return [((num_needed, self.hidden_size), None)]


class Convolution(nn.Module):
    """The causal convolution of the channels of `x`, followed by silu if `silu`; see `layers/states/short_conv.py`."""

    def __init__(self, tensors: Sequence[tuple[str, int, Sequence[Rows]]], width: int, bias: bool, silu: bool = True):
        """Load `tensors` (name, C, rows): `rows` of the C rows of the tensor name + ".weight" `[C, 1, K]` are this
        rank's. The channels of the tensors follow one another.
        """
        super().__init__()
        self.silu = silu
        weights, biases, total = [], [], 0
        for name, channels, rows in tensors:
            shape = channels, 1, width
            weights += _parts(f"{name}.weight", shape, rows, lambda t: t.flatten(1).t(), target_dim=1, target=total)
            biases += _parts(f"{name}.bias", (channels,), rows, target=total)
            total += sum(length for _, length in rows)
        self.weight = empty_parameter(width, total, parts=weights, dtype=torch.float32)
        self.bias = empty_parameter(total, parts=biases, dtype=torch.float32) if bias else None
        self.causal_conv = causal_conv

    def use(self, ops: Ops) -> None:
        """Switch to a platform's operations."""
        self.causal_conv = ops.causal_conv

    def forward(self, x: torch.Tensor, pages: torch.Tensor, step: StateStep) -> torch.Tensor:
        return self.causal_conv(x, self.weight, self.bias, pages, step, self.silu)


def float_parameter(
    name: str, shape: tuple[int, ...], start: int, length: int, view: View | None = None, mean: float = 0.0
) -> nn.Parameter:
    """Return rows `start : start + length` of the tensor `name` of `shape`, in float32, as `view` makes of them."""
    part = Part(name, shape, ((0, start, length),), (), view)
    size = view(torch.empty(length, *shape[1:], device="meta")).shape if view else (length, *shape[1:])
    parameter = empty_parameter(*size, parts=[part], dtype=torch.float32)
    parameter.dummy_mean = mean
    return parameter


def shards(prefix: str, full: int, rows: Sequence[Rows], target: int = 0) -> list[Shard]:
    """Return this rank's `rows` of the matrix at `prefix`, one after another from row `target` of the fused one."""
    made: list[Shard] = []
    for start, length in rows:
        if made and made[-1].start + made[-1].length == start:  # as all do on a single rank
            made[-1] = replace(made[-1], length=made[-1].length + length)
        else:
            made.append(Shard(prefix, full, start, length, target))
        target += length
    return made


def split(sizes: Sequence[int], rank: int, size: int) -> list[Rows]:
    """Return this rank's rows of a tensor that holds parts of `sizes` one after another, each of which is divided."""
    rows, start = [], 0
    for length in sizes:
        rows.append((start + rank * length // size, length // size))
        start += length
    return rows


def _parts(
    name: str,
    shape: tuple[int, ...],
    rows: Sequence[Rows],
    view: View | None = None,
    target_dim: int = 0,
    target: int = 0,
) -> list[Part]:
    parts = []
    for start, length in rows:
        parts.append(Part(name, shape, ((0, start, length),), ((target_dim, target, length),), view))
        target += length
    return parts
