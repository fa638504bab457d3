"""torch's built-in FlashAttention, `torch.nn.attention.varlen`, in versions that take a block table (2.13 does, 2.11
does not).
"""

from __future__ import annotations

import inspect

import torch

from quire.worker.attention.base import AttentionBackend, AttentionCall, AttentionMetadata, AttentionSpec, try_once
from quire.worker.cuda.flash_attn import cumulative
from quire.worker.cuda.requirements import no_half_on_gpu

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # before torch 2.10
    varlen_attn = None


class TorchVarlenAttention(AttentionBackend):
    """The backend that depends on torch only. The block size is a multiple of 256 tokens."""

    name = "torch_varlen"
    default_block_size = 256

    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        if varlen_attn is None or not {"block_table", "seqused_k"} <= inspect.signature(varlen_attn).parameters.keys():
            return f"varlen_attn of torch {torch.__version__} takes no block table"
        if reason := no_half_on_gpu(spec) or spec.no_multiple_of(cls.default_block_size) or spec.unusual():
            return reason
        return "has no soft-cap" if spec.uses_soft_cap else try_once(cls(), spec)

    def build(self, meta: AttentionMetadata) -> None:
        meta.extra = cumulative(meta.seq_lens)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        q, k_cache, v_cache, meta = call.q, call.k_cache, call.v_cache, call.meta
        assert call.soft_cap is None
        left = -1 if call.sliding_window is None else call.sliding_window - 1
        return varlen_attn(
            q,
            k_cache,
            v_cache,
            meta.query_start_loc,
            meta.extra,
            meta.max_query_len,
            meta.max_seq_len,
            scale=call.scale,
            window_size=(left, 0),
            enable_gqa=q.shape[1] != k_cache.shape[2],
            seqused_k=meta.seq_lens,
            block_table=meta.block_table,
        )
