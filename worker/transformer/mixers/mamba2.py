"""The mixer of Mamba 2 (https://arxiv.org/abs/2405.21060)."""

from __future__ import annotations

import torch

from quire.worker.layers.linear import PLAIN_WEIGHTS, ColumnParallelLinear, RowParallelLinear, WeightFormat
from quire.worker.layers.rowwise import rsqrt, silu, softplus
from quire.worker.parallel import Exchange, tp
from quire.worker.spec.model import ModelSpec
from quire.worker.spec.state import Mamba2Spec
from quire.worker.transformer.calls import LayerCall
from quire.worker.transformer.mixers.base import Convolution, Rows, StateMixer, float_parameter, shards, split


class Mamba2(StateMixer):
    """z, and x, B and C, which pass a convolution, are projections of the input, as is the time step dt of each head;
    B and C are those of a group of heads.
    """

    def __init__(self, spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        kind, group = spec.layers[layer].state, tp()
        super().__init__(spec.hidden_size, layer, kind.shapes(group.size))
        self.spec, self.group = kind, group
        self.heads, self.groups = kind.num_heads // group.size, kind.groups(group.size)
        self.inner = kind.inner // group.size
        x, bc, heads = kind.inner, kind.num_groups * kind.state_size, kind.num_heads
        inputs = _rows(kind, [(0, x, False), (x, x, False), *_groups(2 * x, bc), (2 * x + 2 * bc, heads, False)])
        self.in_proj = ColumnParallelLinear(
            spec.hidden_size,
            shards(f"{prefix}.in_proj", 2 * x + 2 * bc + heads, inputs),
            kind.bias,
            weights.linear(f"{prefix}.in_proj"),
        )
        channels = _rows(kind, [(0, x, False), *_groups(x, bc)])
        self.conv1d = Convolution([(f"{prefix}.conv1d", x + 2 * bc, channels)], kind.width, kind.conv_bias)
        mine = group.rank * self.heads, self.heads
        self.A_log = float_parameter(f"{prefix}.A_log", (heads,), *mine)
        self.D = float_parameter(f"{prefix}.D", (heads,), *mine, mean=1.0)
        self.dt_bias = float_parameter(f"{prefix}.dt_bias", (heads,), *mine)
        self.norm = None
        if kind.norm != "none":
            start = group.rank * self.inner
            self.norm = float_parameter(f"{prefix}.norm.weight", (kind.inner,), start, self.inner, mean=1.0)
        scales = _scales(kind, self.inner, self.groups * kind.state_size, self.heads)
        self.register_buffer("scales", scales, persistent=False)
        self.out_proj = RowParallelLinear(
            kind.inner,
            spec.hidden_size,
            kind.bias if kind.out_bias is None else kind.out_bias,
            f"{prefix}.out_proj",
            "the inner size of Mamba",
            weights.linear(f"{prefix}.out_proj"),
        )

    def forward(self, x: torch.Tensor, call: LayerCall) -> torch.Tensor:
        step, kind = self.state.step(call.attn), self.spec
        conv, states = self.state.pages
        shared = self.groups * kind.state_size
        projected = self.in_proj(x)
        if self.scales is not None:
            projected = projected * self.scales
        z, xbc, dt = projected.split([self.inner, self.inner + 2 * shared, self.heads], -1)
        inner, b, c = self.conv1d(xbc, conv, step).split([self.inner, shared, shared], -1)
        inner = inner.unflatten(-1, (self.heads, kind.head_dim))
        b, c = (vectors.unflatten(-1, (self.groups, kind.state_size)) for vectors in (b, c))
        dt = softplus(dt.float() + self.dt_bias).clamp(kind.dt_min, kind.dt_max)
        g = -self.A_log.exp() * dt
        y = self.ops.linear_attention(c, b, inner * dt[..., None], g, states, step) + inner * self.D[:, None]
        y, z = call.needed(y), call.needed(z)
        return self.out_proj(self._gated(y.flatten(1), silu(z.float())).to(x.dtype))

    def _gated(self, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        kind = self.spec
        if kind.norm == "none":
            return y * gate
        if kind.norm == "gate_first":
            return self._normed(y * gate) * self.norm
        return self._normed(y) * self.norm * gate

    def _normed(self, y: torch.Tensor) -> torch.Tensor:
        """Return the RMS norm over each group of channels; a group of all channels may be divided over the ranks."""
        size = self.spec.inner // self.spec.norm_groups
        parts = y.unflatten(-1, (-1, min(size, self.inner)))
        squares = self.ops.square_sums(parts)
        if size > self.inner:
            squares = self.group.all_reduce(squares)
        return (parts * rsqrt(squares / size + self.spec.eps)).flatten(-2)

    def exchanges(self, num_tokens: int, num_needed: int) -> list[Exchange]:
        divided = self.norm is not None and self.spec.inner // self.spec.norm_groups > self.inner
        squares: list[Exchange] = [((num_needed, 1, 1), torch.float32)] if divided else []
        return squares + super().exchanges(num_tokens, num_needed)


def _groups(start: int, size: int) -> list[tuple[int, int, bool]]:
    return [(start, size, True), (start + size, size, True)]


def _rows(kind: Mamba2Spec, parts: list[tuple[int, int, bool]]) -> list[Rows]:
    """Return this rank's rows of parts (start, size, whether it is of the groups): with fewer groups than ranks several
    ranks have those of one group.
    """
    rank, size, rows = tp().rank, tp().size, []
    for start, length, of_groups in parts:
        if of_groups and kind.num_groups < size:
            rows.append((start + rank * kind.num_groups // size * kind.state_size, kind.state_size))
        else:
            ((first, mine),) = split([length], rank, size)
            rows.append((start + first, mine))
    return rows


def _scales(kind: Mamba2Spec, inner: int, shared: int, heads: int) -> torch.Tensor | None:
    """Return the factors of the projected input, None without."""
    if kind.scales is None:
        return None
    sizes = inner, inner, shared, shared, heads
    return torch.cat([torch.full((size,), float(scale)) for size, scale in zip(sizes, kind.scales)])
