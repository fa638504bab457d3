"""Gated DeltaNet (https://arxiv.org/abs/2412.06464) of Qwen3-Next and Qwen3.5."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from quire.worker.layers.linear import (
    PLAIN_WEIGHTS,
    ColumnParallelLinear,
    Linear,
    RowParallelLinear,
    Shard,
    WeightFormat,
)
from quire.worker.layers.rowwise import sigmoid
from quire.worker.layers.states.delta_rule import DeltaHeads
from quire.worker.layers.views import RowOrder
from quire.worker.parallel import tp
from quire.worker.spec.model import ModelSpec
from quire.worker.spec.state import DeltaSpec
from quire.worker.transformer.calls import LayerCall
from quire.worker.transformer.mixers.base import Convolution, StateMixer, float_parameter, shards, split


@dataclass(frozen=True, slots=True)
class Ungrouped(RowOrder):
    """Rows that hold parts of `sizes` for each head, one head after another, to all heads' first parts, then all second
    ones, and so on.
    """

    sizes: tuple[int, ...]

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        heads = tensor.unflatten(0, (-1, sum(self.sizes)))
        return torch.cat([part.flatten(0, 1) for part in heads.split(self.sizes, 1)])


class GatedDeltaNet(StateMixer):
    """q, k and v pass a convolution and the gated delta rule; z gates the normalised result."""

    native_twin: ClassVar = "mixer"

    def __init__(self, spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        kind, group = spec.layers[layer].state, tp()
        super().__init__(spec.hidden_size, layer, kind.shapes(group.size))
        self.spec, self.eps = kind, spec.norm_eps
        self.num_k_heads, self.num_v_heads = kind.num_k_heads // group.size, kind.num_v_heads // group.size
        strength = 2.0 if kind.neg_eigval else 1.0
        self.heads = DeltaHeads(self.num_k_heads, kind.k_dim, self.num_v_heads, kind.tiled, strength)
        keys, values = kind.num_k_heads * kind.k_dim, kind.num_v_heads * kind.v_dim
        rows = split([keys, keys, values], group.rank, group.size)
        self.in_proj = ColumnParallelLinear(
            spec.hidden_size, _inputs(kind, prefix), False, weights.linear(f"{prefix}.{_in_name(kind)}")
        )
        self.gates_proj = ColumnParallelLinear(
            spec.hidden_size, _gates(kind, prefix), False, weights.linear(f"{prefix}.{_gates_name(kind)}")
        )
        self.conv1d = Convolution([(f"{prefix}.conv1d", 2 * keys + values, rows)], kind.width, False)
        heads = group.rank * self.num_v_heads, self.num_v_heads
        self.A_log = float_parameter(f"{prefix}.A_log", (kind.num_v_heads,), *heads)
        self.dt_bias = float_parameter(f"{prefix}.dt_bias", (kind.num_v_heads,), *heads)
        self.norm = float_parameter(f"{prefix}.norm.weight", (kind.v_dim,), 0, kind.v_dim, mean=1.0)
        self.out_proj = RowParallelLinear(
            values,
            spec.hidden_size,
            False,
            f"{prefix}.out_proj",
            "linear_num_value_heads * linear_value_head_dim",
            weights.linear(f"{prefix}.out_proj"),
        )

    def projections(self) -> tuple[Linear, ...]:
        return self.in_proj, self.gates_proj

    def forward(self, x: torch.Tensor, call: LayerCall) -> torch.Tensor:
        return self.out_proj(self.mix((self.in_proj(x), self.gates_proj(x)), call))

    def mix(self, projected: Sequence[torch.Tensor], call: LayerCall) -> torch.Tensor:
        (inputs, gates), step, kind = projected, self.state.step(call.attn), self.spec
        conv, states, *_ = self.state.pages
        keys, values = self.num_k_heads * kind.k_dim, self.num_v_heads * kind.v_dim
        qkv, z = inputs.split([2 * keys + values, values], -1)
        mixed = self.conv1d(qkv, conv, step)
        q, k, g, beta = self.ops.delta_inputs(mixed, gates.float(), self.A_log, self.dt_bias, self.heads)
        v = mixed[:, 2 * keys :].unflatten(-1, (self.num_v_heads, kind.v_dim))
        o = self.ops.gated_delta_rule(q, k, v, g, beta, states, step)
        o, z = call.needed(o), call.needed(z)
        if kind.gate == "silu":
            return self.ops.gated_norm(o, z, self.norm, self.eps)
        return (self.ops.state_norm(o, self.norm, self.eps) * sigmoid(z.float()).view_as(o)).flatten(1).to(z.dtype)


def _in_name(kind: DeltaSpec) -> str:
    return "in_proj_qkvz" if kind.grouped else "in_proj_qkv"


def _gates_name(kind: DeltaSpec) -> str:
    return "in_proj_ba" if kind.grouped_gates else "in_proj_b"


def _inputs(kind: DeltaSpec, prefix: str) -> list[Shard]:
    """Return this rank's rows of q, k, v and z."""
    group, ratio = tp(), kind.num_v_heads // kind.num_k_heads
    keys, values = kind.num_k_heads * kind.k_dim, kind.num_v_heads * kind.v_dim
    if kind.grouped:
        full, view = 2 * (keys + values), Ungrouped((kind.k_dim, kind.k_dim, ratio * kind.v_dim, ratio * kind.v_dim))
        mine = full // group.size
        return [Shard(f"{prefix}.in_proj_qkvz", full, group.rank * mine, mine, view=view)]
    made = shards(f"{prefix}.in_proj_qkv", 2 * keys + values, split([keys, keys, values], group.rank, group.size))
    ends = sum(shard.length for shard in made)
    return made + shards(f"{prefix}.in_proj_z", values, split([values], group.rank, group.size), ends)


def _gates(kind: DeltaSpec, prefix: str) -> list[Shard]:
    """Return this rank's rows of b and a."""
    group, heads, ratio = tp(), kind.num_v_heads, kind.num_v_heads // kind.num_k_heads
    mine = heads // group.size
    if kind.grouped_gates:
        view = Ungrouped((ratio, ratio))
        return [Shard(f"{prefix}.in_proj_ba", 2 * heads, group.rank * 2 * mine, 2 * mine, view=view)]
    return [Shard(f"{prefix}.in_proj_{name}", heads, group.rank * mine, mine, i * mine) for i, name in enumerate("ba")]
