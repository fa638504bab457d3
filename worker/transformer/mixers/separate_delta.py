"""The gated delta rule with projections of their own for q, k, v and the gates: Kimi Delta Attention
(https://arxiv.org/abs/2510.26692), whose decay is one per channel, and the Gated DeltaNet of OLMo-hybrid.
"""

from __future__ import annotations

import torch
from torch import nn

from quire.worker.layers.linear import (
    PLAIN_WEIGHTS,
    ColumnParallelLinear,
    Part,
    RowParallelLinear,
    Shard,
    WeightFormat,
)
from quire.worker.layers.moe import give_other_parts
from quire.worker.layers.rowwise import sigmoid, silu, softplus
from quire.worker.parallel import tp
from quire.worker.spec.model import ModelSpec
from quire.worker.spec.state import DeltaSpec
from quire.worker.transformer.calls import LayerCall
from quire.worker.transformer.mixers.base import Convolution, StateMixer, float_parameter, shards, split

_GATES = {"silu": silu, "sigmoid": sigmoid}  # for the normalised result


class SeparateDelta(StateMixer):
    """q, k and v pass convolutions and the gated delta rule; g gates the normalised result."""

    def __init__(self, spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        kind, group = spec.layers[layer].state, tp()
        super().__init__(spec.hidden_size, layer, kind.shapes(group.size))
        self.spec, self.eps = kind, kind.norm_eps or spec.norm_eps
        self.num_k_heads, self.num_v_heads = kind.num_k_heads // group.size, kind.num_v_heads // group.size
        keys, values = kind.num_k_heads * kind.k_dim, kind.num_v_heads * kind.v_dim
        rows = {"q": keys, "k": keys, "v": values}
        mine = {name: split([size], group.rank, group.size) for name, size in rows.items()}
        self.sizes = [mine[name][0][1] for name in rows]
        self.qkv_proj = ColumnParallelLinear(
            spec.hidden_size, _fused(prefix, rows, mine), False, weights.linear(f"{prefix}.q_proj")
        )
        self.conv1d = Convolution(
            [(f"{prefix}.{name}_conv1d", size, mine[name]) for name, size in rows.items()], kind.width, False
        )
        heads = group.rank * self.num_v_heads, self.num_v_heads
        beta = Shard(f"{prefix}.b_proj", kind.num_v_heads, *heads)
        self.b_proj = ColumnParallelLinear(spec.hidden_size, [beta], False, weights.linear(beta.prefix))
        decays = kind.decay_dim * kind.num_v_heads
        self.decay_proj = _projection(spec, kind, prefix, "a" if kind.decay_dim == 1 else "f", decays, weights)
        self.gate_proj = _projection(spec, kind, prefix, "g", values, weights)
        self.A_log = float_parameter(f"{prefix}.A_log", (kind.num_v_heads,), *heads)
        give_other_parts(self.A_log, [[_wide_part(f"{prefix}.A_log", kind.num_v_heads, *heads)]])
        start, number = heads[0] * kind.decay_dim, heads[1] * kind.decay_dim
        self.dt_bias = float_parameter(f"{prefix}.dt_bias", (decays,), start, number)
        self.o_norm = float_parameter(f"{prefix}.o_norm.weight", (kind.v_dim,), 0, kind.v_dim, mean=1.0)
        self.o_proj = RowParallelLinear(
            values,
            spec.hidden_size,
            False,
            f"{prefix}.o_proj",
            "the number of heads times the size of their values",
            weights.linear(f"{prefix}.o_proj"),
        )

    def forward(self, x: torch.Tensor, call: LayerCall) -> torch.Tensor:
        step, kind = self.state.step(call.attn), self.spec
        conv, states = self.state.pages
        q, k, v = self.conv1d(self.qkv_proj(x), conv, step).split(self.sizes, -1)
        q, k = (self.ops.l2_norm(heads.unflatten(-1, (self.num_k_heads, kind.k_dim))) for heads in (q, k))
        v = v.unflatten(-1, (self.num_v_heads, kind.v_dim))
        g = self._decay(self.decay_proj(x).float() + self.dt_bias)
        beta = sigmoid(self.b_proj(x).float()) * (2.0 if kind.neg_eigval else 1.0)
        o = self.ops.gated_delta_rule(q * kind.k_dim**-0.5, k, v, g, beta, states, step)
        o, x = call.needed(o), call.needed(x)
        gate = _GATES[kind.gate](self.gate_proj(x).float())
        o = self.ops.state_norm(o, self.o_norm, self.eps) * gate.view_as(o)
        return self.o_proj(o.flatten(1).to(x.dtype))

    def _decay(self, raw: torch.Tensor) -> torch.Tensor:
        """Return the logarithm of the decays, `[T, H, Dk]` or `[T, H, 1]`."""
        raw, rate = raw.unflatten(-1, (self.num_v_heads, self.spec.decay_dim)), self.A_log.exp()[:, None]
        if self.spec.lower_bound is not None:
            return self.spec.lower_bound * sigmoid(rate * raw)
        return -rate * softplus(raw)


def _fused(prefix: str, rows: dict[str, int], mine: dict[str, list[tuple[int, int]]]) -> list[Shard]:
    made, target = [], 0
    for name, size in rows.items():
        made += shards(f"{prefix}.{name}_proj", size, mine[name], target)
        target += mine[name][0][1]
    return made


def _projection(
    spec: ModelSpec, kind: DeltaSpec, prefix: str, name: str, size: int, weights: WeightFormat
) -> nn.Module:
    """Return this rank's rows of the projection `name` to `size` values: one matrix or, of low rank, two."""
    ((start, length),) = split([size], tp().rank, tp().size)
    if not kind.low_rank:
        whole = f"{prefix}.{name}_proj"
        return ColumnParallelLinear(spec.hidden_size, [Shard(whole, size, start, length)], False, weights.linear(whole))
    first, second = f"{prefix}.{name}_a_proj", f"{prefix}.{name}_b_proj"
    return nn.Sequential(
        ColumnParallelLinear(
            spec.hidden_size, [Shard(first, kind.low_rank, 0, kind.low_rank)], False, weights.linear(first)
        ),
        ColumnParallelLinear(kind.low_rank, [Shard(second, size, start, length)], False, weights.linear(second)),
    )


def _wide_part(name: str, heads: int, start: int, length: int) -> Part:
    """Return the decays as Kimi-Linear has them, `[1, 1, H, 1]`."""
    return Part(name, (1, 1, heads, 1), ((2, start, length),), (), torch.Tensor.flatten)
