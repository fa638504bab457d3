"""Attention of a decoder to the output of an encoder (Whisper).

The keys and values of the encoder's output are written once, in the step in which a request begins; its tokens only
have queries. `attention/crossed.py` turns the step's metadata into that of this attention.
"""

from __future__ import annotations

import torch
from torch import nn

from quire.worker.layers.attention import Attention
from quire.worker.layers.linear import PLAIN_WEIGHTS, ColumnParallelLinear, Shard, WeightFormat, split_kv_heads
from quire.worker.parallel import Exchange, split_size, tp
from quire.worker.spec.model import ModelSpec
from quire.worker.transformer.attention import out_projection
from quire.worker.transformer.calls import LayerCall


class CrossAttention(nn.Module):
    """Maps x `[T, H]` to `[T, H]`, or to its rows in `needed_rows`: each token attends to all positions."""

    def __init__(self, spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__()
        kind, group, bias = spec.layers[layer], tp(), spec.attention_bias
        heads, dim = split_size("num_attention_heads", kind.num_heads, group), kind.head_dim
        kv_heads, first = split_kv_heads(kind.num_kv_heads, group)
        q, kv, full = heads * dim, kv_heads * dim, kind.num_kv_heads * dim
        shard = Shard(f"{prefix}.q_proj", kind.num_heads * dim, group.rank * q, q)
        self.q_proj = ColumnParallelLinear(spec.hidden_size, [shard], bias, weights.linear(shard.prefix))
        names = f"{prefix}.k_proj", f"{prefix}.v_proj"
        shards = [Shard(name, full, first * dim, kv, i * kv) for i, name in enumerate(names)]
        self.kv_proj = ColumnParallelLinear(spec.hidden_size, shards, bias, weights.linear(shards[0].prefix))
        self.o_proj = out_projection(spec, kind, prefix, weights)
        self.attn = Attention(heads, kv_heads, dim, layer, scale=kind.scale, cross_length=kind.cross_length)

    def forward(self, x: torch.Tensor, call: LayerCall) -> torch.Tensor:
        meta = call.attn[self.attn.cache_group]
        if call.encoded is not None:
            k, v = self.kv_proj(call.encoded.hidden).unflatten(-1, (-1, self.attn.head_dim)).chunk(2, 1)
            meta.backend.write_kv(k, v, self.attn.k_cache, self.attn.v_cache, call.encoded.slots)
        q = self.q_proj(x)
        if call.cross_weights is not None:
            call.cross_weights.note(self.attn, q)
        return self.o_proj(call.needed(self.attn.attend(q, meta)))

    def exchanges(self, num_tokens: int, num_needed: int) -> list[Exchange]:
        """Return the all-reduces of `forward`, in order."""
        return [((num_needed, self.o_proj.out_features), None)]
