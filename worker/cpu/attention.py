"""Paged attention with the native CPU kernel (`csrc/attention.cpp`): computes any mixture of decode and prefill in one
call and reads K and V in place.
"""

from __future__ import annotations

import torch

from quire.worker.attention.base import (
    AttentionBackend,
    AttentionCall,
    AttentionMetadata,
    AttentionSpec,
    NativeRequests,
)
from quire.worker.attention.scaled import KVCache
from quire.worker.cpu import ops as cpu_ops
from quire.worker.cpu.native import KERNELS


class CpuNativeAttention(AttentionBackend):
    """The backend `cpu_native`.

    Its block size is that of cpu_paged, so that a worker can switch from cpu_paged to it between two steps.
    """

    name = "cpu_native"
    default_block_size = 16

    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        if spec.device.type != "cpu":
            return "runs on CPU only"
        if KERNELS.lib is None:
            return KERNELS.status
        return cpu_ops.attention_reason(spec.head_dim, spec.v_dim, spec.dtype)

    def build(self, meta: AttentionMetadata) -> None:
        pass

    def write_kv(
        self, k: torch.Tensor, v: torch.Tensor, k_cache: KVCache, v_cache: KVCache, slot_mapping: torch.Tensor
    ) -> None:
        cpu_ops.write_kv(k, v, k_cache, v_cache, slot_mapping)

    def native_requests(self, meta: AttentionMetadata, head_dim: int, dtype: torch.dtype) -> NativeRequests:
        return meta.block_table, meta.seq_lens, meta.query_start_loc, 0

    def attend(self, call: AttentionCall) -> torch.Tensor:
        q, k_cache, v_cache, meta = call.q, call.k_cache, call.v_cache, call.meta
        *requests, path = self.native_requests(meta, q.shape[2], q.dtype)
        return cpu_ops.paged_attention(
            q, k_cache, v_cache, *requests, call.scale, call.sliding_window, call.soft_cap, call.sinks, path=path
        )
