"""The native CPU attention with one order of summation: what a token gets depends on its own keys alone, bit for bit, whether it comes in a chunk of a
prompt, by itself, or among others. For `--deterministic`.

Both ways through the kernel cut the keys at absolute positions. cpu_native takes the one by tiles for a chunk and the one by vectors for a few tokens; here it
is always the same: by tiles where the CPU has them and they fit the head, else by vectors one token at a time, since only single tokens split their keys.
"""

from __future__ import annotations

import torch

from worker.attention.base import AttentionMetadata, NativeRequests
from worker.attention.cpu_native import CpuNativeAttention
from worker.kernels import cpu_ops

_VECTORS, _TILES = 1, 2  # `path` of cpu_ops.paged_attention


class CpuFixedAttention(CpuNativeAttention):
    """See the module."""

    name = "cpu_fixed"

    def build(self, meta: AttentionMetadata) -> None:
        """For the way by vectors: the block table, lengths and starts as if every token were a request."""
        starts = meta.query_start_loc
        if meta.max_query_len == 1:
            meta.extra = meta.block_table, meta.seq_lens, starts
            return
        counts = starts.diff()
        request = torch.repeat_interleave(torch.arange(len(counts)), counts)
        tokens = torch.arange(len(request), dtype=torch.int32)
        lengths = meta.seq_lens[request] - (starts[1:][request] - tokens) + 1  # E.g. 2 of 5 tokens are new: 4, 5
        meta.extra = meta.block_table[request], lengths, torch.arange(len(request) + 1, dtype=torch.int32)

    def native_requests(self, meta: AttentionMetadata, head_dim: int, dtype: torch.dtype) -> NativeRequests:
        if cpu_ops.has_tiles(head_dim, dtype):
            return meta.block_table, meta.seq_lens, meta.query_start_loc, _TILES
        return *meta.extra, _VECTORS
