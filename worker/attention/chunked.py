"""Attention in chunks of positions (Llama 4): a token at position p attends to the positions from the last multiple of
the chunk's size up to p.

Every backend serves it, because only the metadata changes: the part of a request's tokens that lies in one chunk
becomes a request of its own, whose first position is the first of the chunk. The block size divides the chunk's size,
so that a chunk begins with a block.

E.g. chunks of 8, blocks of 4, and two requests of 18 and 10 tokens, of which the last 13 and 1 are computed:

    query_start_loc 0 13 14    becomes 0 3 11 13 14    (positions 5..7, 8..15, 16..17; 9)
    seq_lens 18 10             becomes 8 8 2 2
    block tables               from block 0, 2 and 4 of the first request, and from block 2 of the second
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch

from quire.worker.attention.base import AttentionMetadata, GroupedMetadata
from quire.worker.messages import CacheGroup


def split_at_chunks(
    attn: GroupedMetadata,
    groups: Sequence[CacheGroup],
    block_size: int,
    to_device: Callable[[np.ndarray], torch.Tensor],
) -> GroupedMetadata:
    """Return the metadata of a step in which the groups of kind "chunk" attend in chunks."""
    return tuple(
        _split(meta, group.window, block_size, to_device) if group.kind == "chunk" else meta
        for meta, group in zip(attn, groups)
    )


def _split(
    meta: AttentionMetadata, size: int, block_size: int, to_device: Callable[[np.ndarray], torch.Tensor]
) -> AttentionMetadata:
    assert size % block_size == 0
    if meta.max_query_len == 1:  # without the host's lists, so that a graph can be captured
        lengths = (meta.seq_lens - 1) % size + 1
        first = (meta.seq_lens - lengths) // block_size
        longest = min(meta.max_seq_len, size)
        table = _from_block(meta.block_table, first, -(-longest // block_size))
        host = meta.host and (meta.host[0], [(length - 1) % size + 1 for length in meta.host[1]])
        return replace(meta, seq_lens=lengths, block_table=table, max_seq_len=longest, host=host)
    requests, starts, lengths, first = _parts(*meta.host_lengths(), size)
    longest = max(lengths)
    packed = to_device(np.array([*requests, *(block // block_size for block in first), *lengths, *starts], np.int64))
    num = len(requests)
    table = _from_block(meta.block_table[packed[:num]], packed[num : 2 * num], -(-longest // block_size))
    return replace(
        meta,
        query_start_loc=packed[3 * num :].int(),
        seq_lens=packed[2 * num : 3 * num].int(),
        block_table=table,
        max_query_len=max(end - start for start, end in pairwise(starts)),
        max_seq_len=longest,
        host=(starts, lengths),
    )


def _parts(
    query_start_loc: list[int], seq_lens: list[int], size: int
) -> tuple[list[int], list[int], list[int], list[int]]:
    """Return (request, query_start_loc, seq_len, position of the chunk) of the parts of all requests."""
    requests, starts, lengths, chunks = [], [0], [], []
    for i, end in enumerate(seq_lens):
        position = end - (query_start_loc[i + 1] - query_start_loc[i])
        while position < end:
            chunk = position // size * size
            stop = min(chunk + size, end)
            requests.append(i)
            starts.append(starts[-1] + stop - position)
            lengths.append(stop - chunk)
            chunks.append(chunk)
            position = stop
    return requests, starts, lengths, chunks


def _from_block(block_table: torch.Tensor, first: torch.Tensor, width: int) -> torch.Tensor:
    """Return `width` entries of each row of the table, from index `first` on; entries after a row's last one are not
    read.
    """
    columns = first[:, None].long() + torch.arange(width, device=block_table.device)
    return block_table.gather(1, columns.clamp_(max=block_table.shape[1] - 1))
