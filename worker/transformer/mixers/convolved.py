"""Compressed convolutional attention of ZAYA (`layers/states/head_conv.py`): q and k are convolved over the tokens and
over the entries of a head; half of all entries of v are those of the token before.
"""

from __future__ import annotations

import torch
from torch import nn

from quire.worker.layers.attention import Attention
from quire.worker.layers.linear import PLAIN_WEIGHTS, ColumnParallelLinear, Part, WeightFormat, empty_parameter
from quire.worker.layers.rotary import apply_rotary
from quire.worker.layers.states.head_conv import HeadConv, head_conv
from quire.worker.parallel import split_size, tp
from quire.worker.spec.model import ModelSpec
from quire.worker.transformer.attention import out_projection, rope_view
from quire.worker.transformer.calls import LayerCall
from quire.worker.transformer.mixers.base import Convolution, Rows, StateMixer, float_parameter, shards


class ConvolvedAttention(StateMixer):
    """Ranks split the heads; every rank computes all values, whose two halves are not split as heads are."""

    def __init__(self, spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        kind, group = spec.layers[layer], tp()
        super().__init__(spec.hidden_size, layer, kind.state.shapes(group.size))
        heads, kv_heads = (
            split_size(name, number, group)
            for name, number in (
                ("num_attention_heads", kind.num_heads),
                ("num_key_value_heads", kind.num_kv_heads),
            )
        )
        self.dim, self.group_size = kind.head_dim, heads // kv_heads
        self.q, self.k = heads * self.dim, kv_heads * self.dim
        all_q, all_k = kind.num_heads * self.dim, kind.num_kv_heads * self.dim
        mine_q, mine_k = (group.rank * self.q, self.q), (group.rank * self.k, self.k)
        place, half = f"{prefix}.qkv_proj", all_k // 2
        self.half, self.values = half, slice(mine_k[0], mine_k[0] + self.k)
        parts = [
            *shards(f"{place}.q_proj", all_q, [mine_q]),
            *shards(f"{place}.k_proj", all_k, [mine_k], self.q),
            *shards(f"{place}.v_proj_delayed", half, [(0, half)], self.q + self.k),
            *shards(f"{place}.v_proj_current", half, [(0, half)], self.q + self.k + half),
        ]
        self.in_proj = ColumnParallelLinear(spec.hidden_size, parts, False, weights.linear(f"{prefix}.in_proj"))
        rows = [mine_q, (all_q + mine_k[0], self.k)]
        narrow, wide = kind.state.widths
        self.narrow = Convolution([(f"{place}.conv_qk_depthwise", all_q + all_k, rows)], narrow, True, silu=False)
        name = f"{place}.conv_qk_grouped"
        self.wide = _rows(f"{name}.weight", (all_q + all_k, self.dim, wide), rows)
        self.wide_bias = _rows(f"{name}.bias", (all_q + all_k,), rows)
        start = group.rank * kv_heads
        self.key_scale = float_parameter(f"{prefix}.qk_norm.temp", (kind.num_kv_heads,), start, kv_heads, mean=1.0)
        self.o_proj = out_projection(spec, kind, prefix, weights)
        self.attn = Attention(heads, kv_heads, self.dim, layer, kind.window)
        view = rope_view(spec, kind)  # how the entries of a head are ordered to be rotated
        order = torch.arange(self.dim)
        self.register_buffer("order", order if view is None else view(order[:, None])[:, 0], persistent=False)

    def forward(self, x: torch.Tensor, call: LayerCall) -> torch.Tensor:
        meta = call.attn[self.attn.cache_group]
        projected, current = self.in_proj(x).tensor_split([self.q + self.k + self.half], -1)
        wide = self.wide.unflatten(0, (-1, self.dim))
        conv = HeadConv(self.narrow.weight, self.narrow.bias, wide, self.wide_bias)
        mixed = head_conv(projected, conv, self.state.pages[0], self.state.step(call.attn))
        q, k, delayed = mixed.tensor_split([self.q, self.q + self.k], -1)
        more_q, more_k = self.unconvolved(projected[:, : self.q + self.k].float())
        q, k = (one.unflatten(-1, (-1, self.dim)) + more for one, more in ((q, more_q), (k, more_k)))
        v = torch.cat([current, delayed.to(current.dtype)], -1)[:, self.values].unflatten(-1, (-1, self.dim))
        rows = call.rotation.cos_sin[call.rotation.positions]
        k = normalised(k) * self.key_scale[:, None]
        q, k = (apply_rotary(one[..., self.order].to(x.dtype), rows) for one in (normalised(q), k))
        meta.backend.write_kv(k, v.contiguous(), self.attn.k_cache, self.attn.v_cache, meta.slot_mapping)
        return self.o_proj(call.needed(self.attn.attend(q, meta)))

    def unconvolved(self, qk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what is added to the convolved q and k `[T, heads, D]`: the mean of each query and its key, and the
        mean of these over the queries of a key.
        """
        q, k = (one.unflatten(-1, (-1, self.dim)) for one in qk.split([self.q, self.k], -1))
        q = (q.unflatten(1, (-1, self.group_size)) + k[:, :, None]) * 0.5  # [T, KV heads, group, D]
        return q.flatten(1, 2), q.mean(2)


def normalised(x: torch.Tensor) -> torch.Tensor:
    """Return each head of x `[T, heads, D]` float32 with root mean square 1."""
    least = torch.finfo(torch.float32).eps
    return x * (x.shape[-1] ** 0.5 / x.norm(dim=-1, keepdim=True).clamp_min(least))


def _rows(name: str, shape: tuple[int, ...], rows: list[Rows]) -> nn.Parameter:
    """Return these rows of the tensor `name`, one after another, in float32."""
    parts, target = [], 0
    for start, length in rows:
        parts.append(Part(name, shape, ((0, start, length),), ((0, target, length),)))
        target += length
    return empty_parameter(target, *shape[1:], parts=parts, dtype=torch.float32)
