"""Attention to the keys that an index chooses (DeepSeek Sparse Attention, arXiv:2512.02556).

The index has one key per token, in a cache of its own, and several heads of queries. The score of a key is the sum over
these heads of the rectified products, each with a weight of the token; a token attends to the `top` keys with the
highest scores. A token that has at most `top` keys attends to all of them, as without an index.

Sizes: H heads of this rank, I entries of the index's keys, W of the latents (`layers/mla.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F

from quire.worker.attention.base import AttentionMetadata, GroupedMetadata
from quire.worker.attention.scaled import KVCache, as_bytes, store
from quire.worker.layers.attention import Attention
from quire.worker.layers.views import to_device
from quire.worker.spec.cache import Compressed

# Maximum number of an index's scores that exist at a time, and maximum bytes of latents, or keys and values, of some
# tokens. On a CPU they stay in its caches, and the allocator keeps the memory: new pages cost more than the products.
_SCORES = {"cpu": 1 << 20, "cuda": 1 << 24}
GATHERED_BYTES = {"cpu": 1 << 23, "cuda": 1 << 26}
# Tokens of one request multiply with all its keys, up to so many times `top`, and hide those that they have not chosen:
# one large product takes less time than gathering the keys of each token.
_MOST_HIDDEN = 4


class IndexKeys(Attention):
    """The cache of an index's keys, `width` entries per token. In 8 bits its first `part` entries have one scale, the
    others another.
    """

    def __init__(self, width: int, part: int, layer: int):
        super().__init__(1, 1, width, layer, v_head_dim=part)

    def cache_spec(self, itemsize: int, scale_bytes: int = 0) -> Compressed:
        return Compressed(self.head_dim, 1, itemsize, scale_bytes)

    def write(self, keys: torch.Tensor, meta: AttentionMetadata) -> None:
        """Store keys `[T, I]` in their slots."""
        store(self.k_cache, meta.slot_mapping, keys[:, None])

    def rows(self, meta: AttentionMetadata, requests: torch.Tensor, longest: int) -> torch.Tensor:
        """Return the keys of the first `longest` tokens of each of `requests` `[B]`: float32 `[B, longest, I]`, with
        anything after the last token of a request.
        """
        size = self.k_cache.shape[1]
        blocks = meta.block_table[requests, : -(-longest // size)].long()
        offsets = torch.arange(size, device=blocks.device)
        return gather(self.k_cache, blocks[..., None], offsets).flatten(1, 2)[:, :longest].float()


@dataclass(slots=True)
class Piece:
    """Q tokens of each of B requests that choose their keys together, with at most `longest` keys each."""

    requests: torch.Tensor  # [B] int64
    tokens: torch.Tensor  # [B, Q] int64, their rows in the step
    positions: torch.Tensor  # [B, Q] int64
    longest: int
    keys: torch.Tensor | None = None  # [B, Q, K] int64: positions of the chosen keys, negative: none


class ChoosingStep:
    """The tokens of a step that have more than `top` keys, in pieces, and the metadata of the others.

    With `one_by_one` a piece has one token and no keys after it: its products have one shape, whatever the step.
    """

    def __init__(self, meta: AttentionMetadata, top: int, num_heads: int, one_by_one: bool = False):
        self.top, self.one_by_one = top, one_by_one
        self._starts, self._lengths = meta.host_lengths()
        self._others: dict[int, tuple[torch.Tensor, AttentionMetadata]] = {}
        counts = [end - start for start, end in pairwise(self._starts)]
        self._choosing = [min(count, max(0, length - top)) for count, length in zip(counts, self._lengths)]
        self.pieces = list(self._pieces(num_heads, meta.block_table.device))

    def _pieces(self, num_heads: int, device: torch.device) -> Iterator[Piece]:
        ones = sorted((i for i, count in enumerate(self._choosing) if count == 1), key=lambda i: -self._lengths[i])
        while ones:
            longest = self._lengths[ones[0]]
            number = 1 if self.one_by_one else max(1, _SCORES[device.type] // (num_heads * longest))
            some, ones = ones[:number], ones[number:]
            rows = [some, [self._starts[i + 1] - 1 for i in some], [self._lengths[i] - 1 for i in some]]
            requests, tokens, positions = to_device(rows, torch.int64, device)
            yield Piece(requests, tokens[:, None], positions[:, None], longest)
        for i, count in enumerate(self._choosing):
            end, length = self._starts[i + 1], self._lengths[i]
            number = 1 if self.one_by_one else max(1, _SCORES[device.type] // length)
            for left in range(count if count > 1 else 0, 0, -number):
                after = max(0, left - number)
                back = torch.arange(left, after, -1, device=device)[None]  # from the last token of the request
                yield Piece(to_device([i], torch.int64, device), end - back, length - back, length - after)

    def others(self, meta: AttentionMetadata, group: int) -> tuple[torch.Tensor, AttentionMetadata] | None:
        """Return the tokens that attend to all their keys, int64 `[O]`, and their metadata; None without such tokens.
        `group` is the cache group of `meta`.
        """
        starts, choosing = self._starts, self._choosing
        counts = [end - start - chosen for (start, end), chosen in zip(pairwise(starts), choosing)]
        mine = [i for i, count in enumerate(counts) if count]
        if mine and group not in self._others:
            device = meta.block_table.device
            tokens = [row for i in mine for row in range(starts[i], starts[i] + counts[i])]
            rows, own = (to_device(ids, torch.int64, device) for ids in (mine, tokens))
            accumulated = [0, *accumulate(counts[i] for i in mine)]
            lengths = [self._lengths[i] - choosing[i] for i in mine]
            part = replace(
                meta,
                slot_mapping=meta.slot_mapping[own],
                query_start_loc=to_device(accumulated, torch.int32, device),
                seq_lens=to_device(lengths, torch.int32, device),
                block_table=meta.block_table[rows],
                max_query_len=max(counts[i] for i in mine),
                max_seq_len=max(lengths),
                extra=None,
                host=(accumulated, lengths),
                latent_parts=None,
                choosing=None,
            )
            part.backend.build(part)
            self._others[group] = own, part
        return self._others[group] if mine else None


def choosing_step(attn: GroupedMetadata, top: int, num_heads: int, one_by_one: bool = False) -> ChoosingStep | None:
    """Return the tokens of a step that choose keys, the same for all layers; None if all attend to all their keys."""
    first = attn[0]
    if first.max_seq_len <= top:
        return None
    if first.choosing is None:
        first.choosing = ChoosingStep(first, top, num_heads, one_by_one)
    return first.choosing if first.choosing.pieces else None


def choose(
    piece: Piece, q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, top: int, pool: int = 1
) -> torch.Tensor:
    """Return the numbers of the chosen keys, int64 `[B, Q, top]`, for q `[B, Q, heads, I]` with `weights` `[B, Q,
    heads]`, all float32, and keys `[B, N, I]`, each of which is visible from the last of its `pool` tokens on.
    """
    if q.shape[1] == 1:
        scores = F.relu(torch.bmm(q[:, 0], keys.transpose(1, 2)))  # [B, heads, N]
        scores = torch.bmm(weights, scores)
    else:
        scores = keys.new_zeros(*q.shape[:2], keys.shape[1])
        for head in range(q.shape[2]):
            scores += weights[:, :, head, None] * F.relu(torch.bmm(q[:, :, head], keys.transpose(1, 2)))
    last = (torch.arange(keys.shape[1], device=keys.device) + 1) * pool - 1
    return scores.masked_fill_(last > piece.positions[..., None], -torch.inf).topk(top, -1).indices


def attend_to_chosen(
    q: torch.Tensor,
    cache: KVCache,
    tokens: torch.Tensor,
    piece: Piece,
    meta: AttentionMetadata,
    rank: int,
    scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return the attended latents `[S, H, rank]` of q `[S, H, W]`, queries number `tokens` `[S]` of a piece."""
    latents, hidden = _latents(cache, tokens, piece, meta)
    latents = latents.to(q.dtype)
    scores = (q @ latents.mT * scale).float().masked_fill_(hidden[:, None], -torch.inf)
    # also the entries behind the rank: rows that do not follow each other are multiplied five times slower
    return (_softmax(scores, sinks).to(q.dtype) @ latents)[..., :rank]


def _latents(
    cache: KVCache, tokens: torch.Tensor, piece: Piece, meta: AttentionMetadata
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return latents of queries number `tokens` `[S]` of a piece, and which are hidden: K chosen ones of each, `[S, K,
    W]` and `[S, K]`, or the request's N for all, `[N, W]` and `[S, N]`.
    """
    size, keys = cache.shape[1], piece.keys.flatten(0, 1)[tokens]  # [S, K]
    if not _hides(piece):
        positions = keys.clamp(min=0)
        requests = piece.requests[tokens // piece.tokens.shape[1]]
        blocks = meta.block_table[requests[:, None], positions // size].long()
        return gather(cache, blocks, positions % size), keys < 0
    positions = torch.arange(piece.longest, device=keys.device)
    hidden = torch.ones(len(keys), piece.longest + 1, dtype=torch.bool, device=keys.device)
    hidden = hidden.scatter_(1, keys.where(keys >= 0, piece.longest), False)[:, :-1]
    return gather(cache, meta.block_table[piece.requests[0], positions // size].long(), positions % size), hidden


def _hides(piece: Piece) -> bool:
    """Return whether tokens multiply with keys that they have not chosen: a token alone never does, so that its bits
    do not depend on the number of its request's keys.
    """
    return piece.tokens.shape[1] > 1 and piece.longest <= _MOST_HIDDEN * piece.keys.shape[-1]


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Return the weights of scores `[S, H, K]` next to those of sinks `[H]`, all float32."""
    if sinks is None:
        return scores.softmax(-1)
    count = scores.shape[-1]
    scores = torch.cat([scores, sinks.float()[None, :, None].expand(len(scores), -1, 1)], -1)
    return scores.softmax(-1)[..., :count]


def tokens_at_once(piece: Piece, cache: KVCache, num_heads: int, itemsize: int) -> int:
    """Return the number of tokens of a piece whose latents, or scores, fit into the memory for them."""
    each = piece.longest * num_heads * 4 if _hides(piece) else piece.keys.shape[-1] * cache.shape[-1] * itemsize
    return max(1, GATHERED_BYTES[piece.tokens.device.type] // each)


def gather(cache: KVCache, blocks: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return the entries `[..., width]` at `blocks` and `offsets` of a cache with one head; float32 if in 8 bits."""
    if isinstance(cache, torch.Tensor):
        num_blocks, size, _, width = cache.shape
        if cache.stride(0) % width or cache.stride(1) != width:
            return cache[blocks, offsets, 0]
        step = cache.stride(0) // width  # whole rows are copied, not entry by entry
        rows = cache.as_strided(((num_blocks - 1) * step + size, width), (width, 1))
        numbers = blocks * step + offsets
        return rows.index_select(0, numbers.flatten()).view(*numbers.shape, width)
    values = as_bytes(cache.values)[blocks, offsets, 0].view(cache.values.dtype)
    return cache.widened(values, cache.scales[blocks, offsets, 0])
