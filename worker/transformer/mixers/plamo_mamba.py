"""The mixer of PLaMo 2 (https://arxiv.org/abs/2509.04897): the state of Mamba 2, whose B, C and time step are
normalised projections of x, as in Mamba 1.
"""

from __future__ import annotations

import torch

from quire.worker.layers.linear import PLAIN_WEIGHTS, ColumnParallelLinear, RowParallelLinear, Shard, WeightFormat
from quire.worker.layers.rowwise import silu, softplus
from quire.worker.layers.views import HeadHalves
from quire.worker.parallel import Exchange, tp
from quire.worker.spec.model import ModelSpec
from quire.worker.transformer.calls import LayerCall
from quire.worker.transformer.mixers.base import Convolution, StateMixer, float_parameter


class PlamoMamba(StateMixer):
    """z and x, which passes a convolution, are projections of the input that alternate by head; all heads share B
    and C.
    """

    def __init__(self, spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        kind, group = spec.layers[layer].state, tp()
        super().__init__(spec.hidden_size, layer, kind.shapes(group.size))
        self.spec, inner = kind, kind.inner
        mine = inner // group.size
        rows = group.rank * mine, mine
        both = Shard(f"{prefix}.in_proj", 2 * inner, 2 * rows[0], 2 * mine, view=HeadHalves(kind.head_dim))
        self.in_proj = ColumnParallelLinear(spec.hidden_size, [both], False, weights.linear(both.prefix))
        self.conv1d = Convolution([(f"{prefix}.conv1d", inner, [rows])], kind.width, False)
        self.sizes = [kind.state_size, kind.state_size, kind.dt_rank]
        self.bcdt_proj = _inward(f"{prefix}.bcdt_proj", inner, sum(self.sizes), weights)
        heads = kind.num_heads // group.size
        own = group.rank * heads, heads
        self.dt_proj = float_parameter(f"{prefix}.dt_proj.weight", (kind.num_heads, kind.dt_rank), *own, view=torch.t)
        self.dt_bias = float_parameter(f"{prefix}.dt_bias", (kind.num_heads,), *own)
        self.A_log = float_parameter(f"{prefix}.A_log", (kind.num_heads,), *own)
        self.D = float_parameter(f"{prefix}.D", (kind.num_heads,), *own, mean=1.0)
        for name, size in zip(("B", "C", "dt"), self.sizes):
            weight = float_parameter(f"{prefix}.{name}_norm_weight", (size,), 0, size, mean=1.0)
            self.register_parameter(f"{name}_norm", weight)
        self.out_proj = _inward(f"{prefix}.out_proj", inner, spec.hidden_size, weights)

    def forward(self, x: torch.Tensor, call: LayerCall) -> torch.Tensor:
        step, kind = self.state.step(call.attn), self.spec
        conv, states = self.state.pages
        z, inner = self.in_proj(x).chunk(2, -1)
        inner = self.conv1d(inner, conv, step)
        weights = self.B_norm, self.C_norm, self.dt_norm
        b, c, dt = self.bcdt_proj(inner.to(x.dtype)).float().split(self.sizes, -1)
        b, c, dt = (self.ops.state_norm(values, weight, kind.eps) for values, weight in zip((b, c, dt), weights))
        dt = softplus(self.ops.float_linear(dt, self.dt_proj, self.dt_bias))
        inner = inner.unflatten(-1, (-1, kind.head_dim))
        g = -self.A_log.exp() * dt
        y = self.ops.linear_attention(c[:, None], b[:, None], inner * dt[..., None], g, states, step)
        y = (y + inner * self.D[:, None]).flatten(1)
        y, z = call.needed(y), call.needed(z)
        return self.out_proj((y * silu(z.float())).to(x.dtype))

    def exchanges(self, num_tokens: int, num_needed: int) -> list[Exchange]:
        return [((num_tokens, sum(self.sizes)), None), *super().exchanges(num_tokens, num_needed)]


def _inward(prefix: str, inner: int, size: int, weights: WeightFormat) -> RowParallelLinear:
    return RowParallelLinear(inner, size, False, prefix, "the inner size of Mamba", weights.linear(prefix))
