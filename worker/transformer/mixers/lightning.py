"""Lightning attention (https://arxiv.org/abs/2401.04658) of MiniMax-Text-01 and, with rotated heads, of Ling 2.5."""

from __future__ import annotations

import torch

from quire.worker.layers.linear import PLAIN_WEIGHTS, ColumnParallelLinear, RowParallelLinear, Shard, WeightFormat
from quire.worker.layers.rotary import apply_rotary
from quire.worker.layers.rowwise import rsqrt, sigmoid, silu
from quire.worker.parallel import Exchange, tp
from quire.worker.spec.model import ModelSpec
from quire.worker.spec.state import LightningSpec
from quire.worker.transformer.attention import rope_view
from quire.worker.transformer.calls import LayerCall
from quire.worker.transformer.mixers.base import StateMixer, float_parameter, shards, split
from quire.worker.transformer.mixers.delta import Ungrouped

_EPS = 1e-6  # for its norm, whatever config.json says about the others


class Lightning(StateMixer):
    """Linear attention with a constant decay per head; its normed result is gated."""

    def __init__(self, spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        kind, group = spec.layers[layer].state, tp()
        super().__init__(spec.hidden_size, layer, kind.shapes(group.size))
        self.group, self.eps, self.dim = group, _EPS, kind.head_dim
        width = kind.num_heads * kind.head_dim
        self.width, self.full, self.heads = width // group.size, width, kind.num_heads // group.size
        mine = 3 * self.width
        shard = Shard(f"{prefix}.qkv_proj", 3 * width, group.rank * mine, mine, view=Ungrouped((kind.head_dim,) * 3))
        self.qkv_proj = ColumnParallelLinear(spec.hidden_size, [shard], False, weights.linear(f"{prefix}.qkv_proj"))
        rows = split([width], group.rank, group.size)
        self.output_gate = ColumnParallelLinear(
            spec.hidden_size,
            shards(f"{prefix}.output_gate", width, rows),
            False,
            weights.linear(f"{prefix}.output_gate"),
        )
        self.norm = float_parameter(f"{prefix}.norm.weight", (width,), *rows[0], mean=1.0)
        self.out_proj = RowParallelLinear(
            width,
            spec.hidden_size,
            False,
            f"{prefix}.out_proj",
            "num_attention_heads * head_dim",
            weights.linear(f"{prefix}.out_proj"),
        )
        self.register_buffer("decay", _decays(kind, self.heads), persistent=False)

    def forward(self, x: torch.Tensor, call: LayerCall) -> torch.Tensor:
        step = self.state.step(call.attn)
        q, k, v = silu(self.qkv_proj(x).float()).unflatten(-1, (3, self.heads, self.dim)).unbind(1)
        decay = self.decay.expand(len(x), -1)
        y = self.ops.linear_attention(q, k, v, decay, self.state.pages[0], step).flatten(1)
        x, y = call.needed(x), call.needed(y)
        squares = self.group.all_reduce(self.ops.square_sums(y))
        y = y * rsqrt(squares / self.full + self.eps) * self.norm
        return self.out_proj((sigmoid(self.output_gate(x).float()) * y).to(x.dtype))

    def exchanges(self, num_tokens: int, num_needed: int) -> list[Exchange]:
        return [((num_needed, 1), torch.float32), *super().exchanges(num_tokens, num_needed)]


class RotaryLightning(StateMixer):
    """Heads of q and k may be normalised, and are rotated; the result is normalised by groups, then gated."""

    def __init__(self, spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        kind, group, view = spec.layers[layer].state, tp(), rope_view(spec, spec.layers[layer])
        super().__init__(spec.hidden_size, layer, kind.shapes(group.size))
        self.group, self.eps, self.dim, self.silu = group, spec.norm_eps, kind.head_dim, kind.silu
        width = kind.num_heads * kind.head_dim
        self.width, self.heads = width // group.size, kind.num_heads // group.size
        self.norm_size = width // kind.norm_groups
        rows, prefixed = split([width] * 3, group.rank, group.size), f"{prefix}.query_key_value"
        fused = [
            Shard(prefixed, 3 * width, start, length, i * self.width, view if i < 2 else None)
            for i, (start, length) in enumerate(rows)
        ]
        self.qkv_proj = ColumnParallelLinear(spec.hidden_size, fused, kind.bias, weights.linear(f"{prefix}.qkv_proj"))
        self.q_norm = self.k_norm = None
        if kind.qk_norm:
            names = [f"{prefix}.{name}_layernorm.weight" for name in ("query", "key")]
            self.q_norm, self.k_norm = (
                float_parameter(name, (self.dim,), 0, self.dim, view, mean=1.0) for name in names
            )
        self.g_proj = ColumnParallelLinear(
            spec.hidden_size, shards(f"{prefix}.g_proj", width, rows[:1]), False, weights.linear(f"{prefix}.g_proj")
        )
        self.norm = float_parameter(f"{prefix}.g_norm.weight", (width,), *rows[0], mean=1.0)
        self.o_proj = RowParallelLinear(
            width,
            spec.hidden_size,
            kind.out_bias,
            f"{prefix}.o_proj",
            "num_attention_heads * head_dim",
            weights.linear(f"{prefix}.o_proj"),
        )
        self.register_buffer("decay", _decays(kind, self.heads), persistent=False)

    def forward(self, x: torch.Tensor, call: LayerCall) -> torch.Tensor:
        step, qkv = self.state.step(call.attn), self.qkv_proj(x).float()
        q, k, v = (silu(qkv) if self.silu else qkv).unflatten(-1, (3, self.heads, self.dim)).unbind(1)
        rows = call.rotation.cos_sin[call.rotation.positions]
        q, k = (
            apply_rotary(heads if weight is None else self._normed(heads) * weight, rows)
            for heads, weight in ((q, self.q_norm), (k, self.k_norm))
        )
        decay = self.decay.expand(len(x), -1)
        y = self.ops.linear_attention(q * self.dim**-0.5, k, v, decay, self.state.pages[0], step).flatten(1)
        x, y = call.needed(x), call.needed(y)
        parts = y.unflatten(-1, (-1, min(self.norm_size, self.width)))
        squares = self.ops.square_sums(parts)
        squares = self.group.all_reduce(squares) if self.norm_size > self.width else squares
        y = (parts * rsqrt(squares / self.norm_size + self.eps)).flatten(1) * self.norm
        return self.o_proj((sigmoid(self.g_proj(x).float()) * y).to(x.dtype))

    def _normed(self, heads: torch.Tensor) -> torch.Tensor:
        return self.ops.state_norm(heads, None, self.eps)

    def exchanges(self, num_tokens: int, num_needed: int) -> list[Exchange]:
        divided: list[Exchange] = [((num_needed, 1, 1), torch.float32)] if self.norm_size > self.width else []
        return divided + super().exchanges(num_tokens, num_needed)


def _decays(kind: LightningSpec, mine: int) -> torch.Tensor:
    """Return the logarithms of the decays of this rank's `mine` heads."""
    heads = torch.arange(tp().rank * mine, (tp().rank + 1) * mine, dtype=torch.float32)
    return -torch.exp2(-8.0 * (heads + 1) / kind.num_heads) * kind.decay_scale
