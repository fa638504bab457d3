"""Attention of tokens to all positions of an encoder's output.

Every backend serves it, because only the metadata changes: each token becomes a request of its own, the last one of
`length` positions, so that causal attention is attention to all of them.

E.g. 1500 positions and two requests, of which 3 tokens and 1 token are computed:

    query_start_loc 0 3 4    becomes 0 1 2 3 4
    seq_lens 3 7             becomes 1500 1500 1500 1500
    block tables             the first one three times, then the second one
"""

from __future__ import annotations

from dataclasses import replace

import torch

from quire.worker.attention.base import AttentionMetadata


def attend_to_all(meta: AttentionMetadata, length: int) -> AttentionMetadata:
    """Return the metadata of a step in which every token attends to `length` positions."""
    starts, table, host = meta.query_start_loc, meta.block_table, meta.host
    num_tokens = len(meta.slot_mapping)
    if meta.max_query_len > 1:
        counts = starts.diff()
        table = torch.repeat_interleave(table, counts, 0, output_size=num_tokens)
        starts = torch.arange(num_tokens + 1, dtype=starts.dtype, device=starts.device)
    if host is not None:
        host = list(range(num_tokens + 1)), [length] * num_tokens
    lengths = meta.seq_lens.new_full((num_tokens,), length)
    return replace(
        meta,
        query_start_loc=starts,
        seq_lens=lengths,
        block_table=table,
        max_query_len=1,
        max_seq_len=length,
        host=host,
    )
