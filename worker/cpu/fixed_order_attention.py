"""The native CPU attention with one order of summation: what a token gets depends on its own keys alone, bit for bit, whether it comes in a chunk of a
prompt, by itself, or among others. For `--deterministic`.

Both ways through the kernel cut the keys at absolute positions. cpu_native takes the one by tiles for a chunk and the one by vectors for a few tokens; here it
is always the same: by tiles where the CPU has them and they fit the head, else by vectors.
"""

from __future__ import annotations

import torch

from quire.worker.attention.base import AttentionMetadata, NativeRequests
from quire.worker.cpu import ops as cpu_ops
from quire.worker.cpu.attention import CpuNativeAttention

_VECTORS, _TILES = 1, 2  # `path` of cpu_ops.paged_attention


class CpuFixedAttention(CpuNativeAttention):
    """See the module."""

    name = "cpu_fixed"

    def native_requests(self, meta: AttentionMetadata, head_dim: int, dtype: torch.dtype) -> NativeRequests:
        return meta.block_table, meta.seq_lens, meta.query_start_loc, _TILES if cpu_ops.has_tiles(head_dim, dtype) else _VECTORS
