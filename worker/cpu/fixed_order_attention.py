"""The native CPU attention with one fixed order of summation, for `--deterministic`: a token's result depends only on
its own keys, bit for bit, whether the token is computed in a chunk of a prompt, by itself, or among others.

cpu_native splits the keys of a token that is computed by itself over several threads. Here one thread reads all of
them, 128 at a time.
"""

from __future__ import annotations

import torch

from quire.worker.attention.base import AttentionMetadata, NativeRequests
from quire.worker.cpu.attention import CpuNativeAttention

_ONE_ORDER = 2  # `path` of ops.paged_attention


class CpuFixedAttention(CpuNativeAttention):
    """The backend `cpu_fixed`."""

    name = "cpu_fixed"

    def native_requests(self, meta: AttentionMetadata, head_dim: int, dtype: torch.dtype) -> NativeRequests:
        return meta.block_table, meta.seq_lens, meta.query_start_loc, _ONE_ORDER
