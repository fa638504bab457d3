"""The gated short convolution of LFM2: out(C * conv(B * x)), where [B, C, x] are projections of the input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from quire.worker.layers.linear import PLAIN_WEIGHTS, ColumnParallelLinear, Linear, RowParallelLinear, WeightFormat
from quire.worker.parallel import tp
from quire.worker.spec.model import ModelSpec
from quire.worker.transformer.calls import LayerCall
from quire.worker.transformer.mixers.base import Convolution, StateMixer, shards, split


class ShortConv(StateMixer):
    native_twin: ClassVar = "mixer"

    def __init__(self, spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        kind, group = spec.layers[layer].state, tp()
        super().__init__(spec.hidden_size, layer, kind.shapes(group.size))
        channels = kind.channels
        rows = split([channels] * 3, group.rank, group.size)
        self.in_proj = ColumnParallelLinear(
            spec.hidden_size,
            shards(f"{prefix}.in_proj", 3 * channels, rows),
            kind.bias,
            weights.linear(f"{prefix}.in_proj"),
        )
        self.conv = Convolution([(f"{prefix}.conv", channels, rows[:1])], kind.width, kind.bias, silu=False)
        self.out_proj = RowParallelLinear(
            channels,
            spec.hidden_size,
            kind.bias,
            f"{prefix}.out_proj",
            "hidden_size",
            weights.linear(f"{prefix}.out_proj"),
        )

    def projections(self) -> tuple[Linear, ...]:
        return (self.in_proj,)

    def forward(self, x: torch.Tensor, call: LayerCall) -> torch.Tensor:
        return self.out_proj(self.mix((self.in_proj(x),), call))

    def mix(self, projected: Sequence[torch.Tensor], call: LayerCall) -> torch.Tensor:
        b, c, x = projected[0].chunk(3, -1)
        y = self.conv(b * x, self.state.pages[0], self.state.step(call.attn)).to(c.dtype)
        c, y = call.needed(c), call.needed(y)
        return c * y
