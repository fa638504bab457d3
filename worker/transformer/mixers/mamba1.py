"""The mixer of Mamba 1 (https://arxiv.org/abs/2312.00752), also of Falcon-Mamba and Jamba."""

from __future__ import annotations

import torch

from quire.worker.layers.linear import PLAIN_WEIGHTS, ColumnParallelLinear, RowParallelLinear, WeightFormat
from quire.worker.layers.rowwise import silu, softplus
from quire.worker.parallel import Exchange, tp
from quire.worker.spec.model import ModelSpec
from quire.worker.transformer.calls import LayerCall
from quire.worker.transformer.mixers.base import Convolution, StateMixer, float_parameter, shards, split


class Mamba1(StateMixer):
    """The mixer of Mamba 1: x, which passes a convolution, and z are projections of the input; dt, B and C are
    projections of x.
    """

    def __init__(self, spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        kind, group = spec.layers[layer].state, tp()
        super().__init__(spec.hidden_size, layer, kind.shapes(group.size))
        self.spec, inner = kind, kind.inner
        rows = split([inner, inner], group.rank, group.size)
        self.in_proj = ColumnParallelLinear(
            spec.hidden_size,
            shards(f"{prefix}.in_proj", 2 * inner, rows),
            kind.bias,
            weights.linear(f"{prefix}.in_proj"),
        )
        mine = rows[0]
        self.conv1d = Convolution([(f"{prefix}.conv1d", inner, [mine])], kind.width, kind.conv_bias)
        self.sizes = [kind.dt_rank, kind.state_size, kind.state_size]
        self.x_proj = RowParallelLinear(
            inner,
            sum(self.sizes),
            False,
            f"{prefix}.x_proj",
            "the inner size of Mamba",
            weights.linear(f"{prefix}.x_proj"),
        )
        self.dt_proj = float_parameter(f"{prefix}.dt_proj.weight", (inner, kind.dt_rank), *mine, view=torch.t)
        self.dt_bias = float_parameter(f"{prefix}.dt_proj.bias", (inner,), *mine)
        self.A_log = float_parameter(f"{prefix}.A_log", (inner, kind.state_size), *mine)
        self.D = float_parameter(f"{prefix}.D", (inner,), *mine, mean=1.0)
        names = [f"{prefix}.{name}_layernorm.weight" for name in ("dt", "b", "c")]
        for name, size, tensor in zip(("dt_norm", "b_norm", "c_norm"), self.sizes, names):
            weight = float_parameter(tensor, (size,), 0, size, mean=1.0) if kind.norms == "weight" else None
            self.register_parameter(name, weight)
        self.out_proj = RowParallelLinear(
            inner,
            spec.hidden_size,
            kind.bias,
            f"{prefix}.out_proj",
            "the inner size of Mamba",
            weights.linear(f"{prefix}.out_proj"),
        )

    def forward(self, x: torch.Tensor, call: LayerCall) -> torch.Tensor:
        step, kind = self.state.step(call.attn), self.spec
        conv, states = self.state.pages
        inner, z = self.in_proj(x).chunk(2, -1)
        inner = self.conv1d(inner, conv, step)
        dt, b, c = self.x_proj(inner.to(x.dtype)).float().split(self.sizes, -1)
        if kind.norms != "none":
            weights = self.dt_norm, self.b_norm, self.c_norm
            dt, b, c = (self.ops.state_norm(values, weight, kind.eps) for values, weight in zip((dt, b, c), weights))
        dt = softplus(self.ops.float_linear(dt, self.dt_proj, self.dt_bias))
        y = self.ops.selective_scan(inner, dt, -self.A_log.exp(), b, c, states, step) + inner * self.D
        y, z = call.needed(y), call.needed(z)
        return self.out_proj((y * silu(z.float())).to(x.dtype))

    def exchanges(self, num_tokens: int, num_needed: int) -> list[Exchange]:
        return [((num_tokens, sum(self.sizes)), None), *super().exchanges(num_tokens, num_needed)]
