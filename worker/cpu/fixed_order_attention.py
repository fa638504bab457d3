"""The native CPU attention with one order of summation: what a token gets depends on its own keys alone, bit for bit,
whether it comes in a chunk of a prompt, by itself, or among others. For `--deterministic`.

cpu_native cuts the keys of a token that comes by itself, so that several threads have some of them. Here one goes
through all of them, 128 at a time.
"""

from __future__ import annotations

import torch

from quire.worker.attention.base import AttentionMetadata, NativeRequests
from quire.worker.cpu.attention import CpuNativeAttention

_ONE_ORDER = 2  # `path` of ops.paged_attention


class CpuFixedAttention(CpuNativeAttention):
    """See the module."""

    name = "cpu_fixed"

    def native_requests(self, meta: AttentionMetadata, head_dim: int, dtype: torch.dtype) -> NativeRequests:
        return meta.block_table, meta.seq_lens, meta.query_start_loc, _ONE_ORDER
