"""The attention backend that depends on Triton only."""

from __future__ import annotations

import torch

from quire.worker.attention.base import (
    AttentionBackend,
    AttentionCall,
    AttentionMetadata,
    AttentionSpec,
    is_latent,
    try_once,
)
from quire.worker.attention.scaled import KVCache
from quire.worker.cuda.kernels import triton_paged
from quire.worker.cuda.kernels.triton_scaled import store_scaled

if triton_paged.triton is not None:
    from quire.worker.cuda.kernels.triton_mla import latent_attention


class TritonPagedBackend(AttentionBackend):
    """A backend that depends on Triton only; used where flash-attn does not apply."""

    name = "triton_paged"
    default_block_size = 16
    graph_safe = True
    fixed_order = False  # whether a token's sums have one order

    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        if triton_paged.triton is None:
            return f"triton cannot be imported ({triton_paged.import_error})"
        if spec.device.type != "cuda":
            return "needs a GPU"
        if spec.uses_sinks and spec.latent:
            return "latent attention has no attention sinks"
        if spec.head_dim > 256 and not spec.latent:
            return f"head_dim {spec.head_dim} is above 256"
        if spec.latent and (spec.uses_soft_cap or spec.uses_sliding_window):
            return "latent attention has no window and no soft cap"
        return try_once(cls(), spec)  # only Triton knows whether it has a C compiler and supports this GPU

    def build(self, meta: AttentionMetadata) -> None:
        pass

    def write_kv(
        self, k: torch.Tensor, v: torch.Tensor, k_cache: KVCache, v_cache: KVCache, slot_mapping: torch.Tensor
    ) -> None:
        store_scaled(k_cache, slot_mapping, k)
        store_scaled(v_cache, slot_mapping, v)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        k_cache, v_cache, meta = call.k_cache, call.v_cache, call.meta
        if is_latent(k_cache, v_cache):
            requests = meta.block_table, meta.query_start_loc, meta.seq_lens, meta.max_query_len
            sizes = {"fixed_order": self.fixed_order}
            return latent_attention(call.q, k_cache, v_cache.shape[3], *requests, call.scale, **sizes)
        return triton_paged.attend(call, self.fixed_order)


class TritonFixedBackend(TritonPagedBackend):
    """The same kernels with tiles of one size, without splits: a token's result has the same bits in any batch, whether
    it is computed in a chunk of a prompt or by itself.
    """

    name = "triton_fixed"
    fixed_order = True
