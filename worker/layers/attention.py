"""The attention layer: it owns its part of the paged KV cache and calls the step's backend."""

from __future__ import annotations

import torch
from torch import nn

from quire.worker.attention.base import AttentionCall, AttentionMetadata
from quire.worker.attention.distance_bias import DistanceBias
from quire.worker.attention.scaled import KVCache
from quire.worker.spec.cache import CacheSpec, Chunk, Cross, Full, Window


class Attention(nn.Module):
    """Causal attention of one layer over the paged cache.

    `worker/cache/allocation.py` binds `k_cache` and `v_cache` (layout in `attention/base.py`).
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        layer_index: int,
        sliding_window: int | None = None,
        scale: float | None = None,
        soft_cap: float | None = None,
        v_head_dim: int | None = None,
        sinks: nn.Parameter | None = None,
        kv_from: int | None = None,
        chunk: int | None = None,
        output_window: int = 0,
        cross_length: int = 0,
    ):
        super().__init__()
        # numbers of heads of this rank
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.v_head_dim = head_dim if v_head_dim is None else v_head_dim
        self.sinks = sinks  # [num_heads], see `AttentionCall`
        self.kv_from = kv_from  # the layer whose cache this one reads
        self.chunk = chunk  # size of the chunks to which attention is confined (`attention/chunked.py`)
        self.output_window = output_window  # see `LayerSpec`; applied by `attention/output_window.py`
        self.cross_length = cross_length  # positions of an encoder's output; 0: it attends to tokens
        self.scale = head_dim**-0.5 if scale is None else scale
        self.sliding_window, self.soft_cap, self.layer_index = sliding_window, soft_cap, layer_index
        self.cache_group = 0  # index of its block table and metadata in the step's groups
        self.k_cache: KVCache | None = None
        self.v_cache: KVCache | None = None

    def cache_spec(self, itemsize: int, scale_bytes: int = 0) -> CacheSpec:
        """Return the layer's cache per token, see `Full`."""
        sizes = self.num_kv_heads, self.head_dim, self.v_head_dim, itemsize
        if self.cross_length:
            return Cross(*sizes, self.cross_length, scale_bytes=scale_bytes)
        if self.chunk is not None:
            return Chunk(*sizes, self.chunk, scale_bytes=scale_bytes)
        if self.sliding_window is None:
            return Full(*sizes, scale_bytes=scale_bytes, output_window=self.output_window)
        return Window(*sizes, self.sliding_window, scale_bytes=scale_bytes)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn: AttentionMetadata) -> torch.Tensor:
        """Store k `[T, num_kv_heads, head_dim]` and v `[T, num_kv_heads, v_head_dim]`, then attend with q `[T,
        num_heads, head_dim]`. Inputs may also have flattened heads. Returns `[T, num_heads * v_head_dim]`.
        """
        attn.backend.write_kv(
            k.view(-1, self.num_kv_heads, self.head_dim),
            v.view(-1, self.num_kv_heads, self.v_head_dim),
            self.k_cache,
            self.v_cache,
            attn.slot_mapping,
        )
        return self.attend(q, attn)

    def attend(self, q: torch.Tensor, attn: AttentionMetadata, bias: DistanceBias | None = None) -> torch.Tensor:
        """Attend as `forward` does, to k and v that are already in the cache."""
        q = q.view(-1, self.num_heads, self.head_dim)
        if bias is not None:
            caches, window = (self.k_cache, self.v_cache), self.sliding_window
            out = attn.backend.attend(AttentionCall(q, *caches, attn, self.scale, window, bias=bias))
            return out.reshape(-1, self.num_heads * self.v_head_dim)
        out = attn.backend.forward(
            q, self.k_cache, self.v_cache, attn, self.scale, self.sliding_window, self.soft_cap, self.sinks
        )
        return out.reshape(-1, self.num_heads * self.v_head_dim)

    def extra_repr(self) -> str:
        return (
            f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}, "
            f"sliding_window={self.sliding_window}"
        )
