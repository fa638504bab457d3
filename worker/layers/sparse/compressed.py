"""Attention to a window of tokens and to compressed keys, which are made of `rate` tokens each (DeepSeek V4).

One vector per token, shared by all heads, is its key and its value; it is kept for the window only. A compressed key is
visible to the last of its tokens and those after it. An index may choose the compressed keys to which a token attends.

Sizes: H heads of this rank, D entries of keys and values, I of the index's keys, w tokens of the window.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F

from quire.worker.attention.base import AttentionMetadata
from quire.worker.attention.scaled import store
from quire.worker.layers.attention import Attention
from quire.worker.layers.views import to_device
from quire.worker.spec.cache import Compressed, CompressedSizes, Latent

_SCORES = 1 << 24  # maximum number of scores of a piece of queries


class WindowKeys(Attention):
    """The cache of the vectors of single tokens."""

    def __init__(
        self, num_heads: int, head_dim: int, rope_dim: int, layer: int, window: int, sinks: torch.nn.Parameter
    ):
        super().__init__(num_heads, 1, head_dim, layer, window, sinks=sinks)
        self.rope_dim = rope_dim

    def cache_spec(self, itemsize: int, scale_bytes: int = 0) -> Latent:
        return Latent(self.head_dim, self.rope_dim, itemsize, window=self.sliding_window)

    def write(self, vectors: torch.Tensor, meta: AttentionMetadata) -> None:
        """Store vectors `[T, D]` in their slots."""
        store(self.k_cache, meta.slot_mapping, vectors[:, None])

    def rows(self, meta: AttentionMetadata, request: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the vectors at `positions` `[B, K]` of each `request` `[B]`: `[B, K, D]`; negative positions read the
        null block.
        """
        size, known = self.k_cache.shape[1], positions.clamp(min=0)
        blocks = meta.block_table[request[:, None], known // size].long()
        return self.k_cache[blocks.masked_fill(positions < 0, 0), known % size, 0]


class CompressedKeys(Attention):
    """The cache of the compressed keys, each followed by that of the index."""

    def __init__(self, width: int, rate: int, layer: int):
        super().__init__(1, 1, width, layer)
        self.rate = rate

    def cache_spec(self, itemsize: int, scale_bytes: int = 0) -> Compressed:
        return Compressed(self.head_dim, self.rate, itemsize)

    def write(self, keys: torch.Tensor, slots: torch.Tensor, block_size: int) -> None:
        """Store keys `[N, D + I]` in the blocks of their last tokens, which are in `slots` `[N]`."""
        blocks, offsets = slots // block_size, slots % block_size
        self.k_cache[blocks, offsets // self.rate, 0] = keys.to(self.k_cache.dtype)

    def rows(
        self, meta: AttentionMetadata, request: torch.Tensor, keys: torch.Tensor, known: torch.Tensor, block_size: int
    ) -> torch.Tensor:
        """Return the compressed keys number `keys` `[B, N]` of each `request` `[B]`: `[B, N, D + I]`; those that are
        not `known` `[B, N]` are read in the null block.
        """
        last = (keys + 1) * self.rate - 1
        places = (last // block_size).clamp(max=meta.block_table.shape[1] - 1)
        blocks = meta.block_table[request[:, None], places].long()
        return self.k_cache[blocks.masked_fill(~known, 0), last % block_size // self.rate, 0]


@dataclass(slots=True)
class Queries:
    """Queries of a step, and the inputs that the index needs to choose their compressed keys."""

    q: torch.Tensor  # [T, H, D]
    index_q: torch.Tensor | None = None  # [T, index heads, I]
    index_weights: torch.Tensor | None = None  # [T, index heads] float32

    def select(self, tokens: torch.Tensor) -> Queries:
        """Return the queries of `tokens` `[B, Q]`, each tensor `[B, Q, ..]`."""
        return Queries(*(x if x is None else x[tokens] for x in (self.q, self.index_q, self.index_weights)))


def attend(
    queries: Queries,
    positions: torch.Tensor,
    window: WindowKeys,
    compressed: CompressedKeys | None,
    sizes: CompressedSizes,
    meta: AttentionMetadata,
    compressed_meta: AttentionMetadata | None,
) -> torch.Tensor:
    """Return `[T, H, D]` for queries at `positions` `[T]`, whose keys are in the caches."""
    out = torch.empty_like(queries.q)
    for request, tokens, longest in _pieces(meta, sizes.rate, len(queries.q[0]), window.sliding_window):
        at = positions[tokens]
        first = at[:, :1] - window.sliding_window + 1
        seen = first + torch.arange(window.sliding_window + tokens.shape[1] - 1, device=at.device)  # [B, K]
        visible = (seen[:, None] <= at[..., None]) & (seen[:, None] > at[..., None] - window.sliding_window)
        seen = torch.where(seen <= at[:, -1:], seen, -1)
        own, keys = queries.select(tokens), window.rows(meta, request, seen)
        parts = [(keys[:, None], visible & (seen[:, None] >= 0))]
        if compressed is not None and longest >= sizes.rate:
            size = window.k_cache.shape[1]
            parts.append(_chosen(own, at, request, compressed, sizes, compressed_meta, longest, size))
        out[tokens] = _softmax(own.q, parts, window)
    return out


def _pieces(
    meta: AttentionMetadata, rate: int, num_heads: int, window: int
) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
    """Return (requests `[B]`, tokens `[B, Q]`, length of the longest) of parts of a step whose scores are bounded."""
    device, (starts, lengths) = meta.block_table.device, meta.host_lengths()
    counts = [stop - start for start, stop in pairwise(starts)]
    ones = [i for i, count in enumerate(counts) if count == 1]
    pieces = []
    for group in _groups(ones, [lengths[i] for i in ones], rate, num_heads, window):
        both = to_device([group, [starts[i] for i in group]], torch.int64, device)
        pieces.append((both[0], both[1][:, None], max(lengths[i] for i in group)))
    for i, count in enumerate(counts):
        step = max(1, _SCORES // (num_heads * (2 * window + lengths[i] // rate if rate else 2 * window)))
        step = min(step, window) if count > 1 else step
        for first in range(0, count if count > 1 else 0, step):
            last = min(first + step, count)
            tokens = torch.arange(starts[i] + first, starts[i] + last, device=device)[None]
            pieces.append((to_device([i], torch.int64, device), tokens, lengths[i] - count + last))
    return pieces


def _groups(ones: list[int], lengths: list[int], rate: int, num_heads: int, window: int) -> list[list[int]]:
    """Return the requests of one token in groups, the longest first."""
    groups: list[list[int]] = []
    most = 0
    for length, i in sorted(zip(lengths, ones), reverse=True):
        if not groups or len(groups[-1]) >= most:
            most = max(1, _SCORES // (num_heads * (window + (length // rate if rate else 0))))
            groups.append([])
        groups[-1].append(i)
    return groups


def _chosen(
    own: Queries,
    at: torch.Tensor,
    request: torch.Tensor,
    compressed: CompressedKeys,
    sizes: CompressedSizes,
    meta: AttentionMetadata,
    longest: int,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the compressed keys of queries at `at` `[B, Q]`, `[B, Q or 1, N, D]`, and which of them each sees,
    `[B, Q, N]`.
    """
    ready, dim = (at + 1) // sizes.rate, own.q.shape[-1]  # number of compressed keys that a query sees
    number = torch.arange(longest // sizes.rate, device=at.device).expand(len(request), -1)  # [B, N]
    known = number < ready[:, -1:]
    keys = compressed.rows(meta, request, number, known, block_size)
    visible = number[:, None] < ready[..., None]
    if not sizes.top or longest // sizes.rate <= sizes.top:
        return keys[:, None, :, :dim], visible
    scores = torch.einsum("bqhi,bni->bqhn", own.index_q.float(), keys[..., dim:].float())
    scores = (F.relu(scores) * own.index_weights[..., None]).sum(2).masked_fill(~visible, -torch.inf)
    best = scores.topk(sizes.top, -1).indices  # [B, Q, top]
    if at.shape[1] == 1:
        batch = torch.arange(len(request), device=at.device)[:, None, None]
        return keys[batch, best, :dim], visible.gather(-1, best)
    chosen = torch.zeros_like(visible).scatter_(-1, best, True)
    return keys[:, None, :, :dim], visible & chosen


def _softmax(q: torch.Tensor, parts: list[tuple[torch.Tensor, torch.Tensor]], window: WindowKeys) -> torch.Tensor:
    """Attend with q `[B, Q, H, D]` to keys of several parts: `[B, Q or 1, K, D]`, and which are visible `[B, Q, K]`."""
    scores = [
        (torch.einsum("bqhd,bqkd->bqhk", q, keys.to(q.dtype).expand(-1, q.shape[1], -1, -1)) * window.scale)
        .float()
        .masked_fill(~visible[:, :, None], -torch.inf)
        for keys, visible in parts
    ]
    sinks = window.sinks.float().view(1, 1, -1, 1).expand(*q.shape[:3], 1)
    weights = torch.cat([*scores, sinks], -1).softmax(-1)[..., :-1].to(q.dtype)
    sizes = [part.shape[-1] for part in scores]
    return sum(
        torch.einsum("bqhk,bqkd->bqhd", weight, keys.to(q.dtype).expand(-1, q.shape[1], -1, -1))
        for weight, (keys, _) in zip(weights.split(sizes, -1), parts)
    )
