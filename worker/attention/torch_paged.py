"""Paged attention in plain torch: gather keys and values by slot, then call torch's fused attention.

Decoding requests (one query token) are batched in a few groups of similar length, each one gather and one call, without
a loop over sequences. Requests with more query tokens run one by one, in pieces of queries that load only the keys they
attend to. Both bound the memory gathered at once, except for a single sequence longer than the bound. Runs on any
device; on CUDA the host waits for the device, so it is the last choice there.

Slots after the end of a sequence are never read: the gather reads the null block instead, which holds finite values.
Masking the score would not suffice, because 0 * NaN is NaN and a freed block may hold anything.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from quire.worker.attention.base import AttentionBackend, AttentionCall, AttentionMetadata, AttentionSpec, is_latent
from quire.worker.attention.scaled import KVCache, ScaledCache, ScaledLatents, as_bytes, widened

_DECODE_TOKENS = 8192  # maximum number of keys gathered at once for decoding requests
_PREFILL_SCORES = 1 << 23  # maximum number of scores per head in one piece of a prefill


Rows = list[torch.Tensor]  # [n * num_kv_heads * keys] int64 for each tensor of the caches, see `_Rows`


@dataclass(slots=True)
class _Piece:
    """One attention call: `num_seqs` sequences with `num_queries` tokens each over `num_keys` keys each."""

    tokens: torch.Tensor | slice  # [n * queries], tokens of the batch
    rows: Rows  # for each tensor of the caches
    num_seqs: int
    num_queries: int
    num_keys: int
    mask: torch.Tensor | None  # broadcastable to [n, heads, queries, keys], True for visible keys
    is_causal: bool = False
    reach: torch.Tensor | int = 0  # positions from the first key to the first query: of each sequence `[n, 1]`, or all

    def distances(self, device: torch.device) -> torch.Tensor:
        """Return how far each key is behind each query, `[n * queries, keys]`; below 0: ahead of it."""
        queries, keys = (torch.arange(size, device=device) for size in (self.num_queries, self.num_keys))
        first = self.reach[:, None] if isinstance(self.reach, torch.Tensor) else self.reach
        return (first + queries[:, None] - keys).flatten(0, -2)


@dataclass(slots=True)
class Plan:
    """The pieces of this step for each window and layout of the caches, and the gather buffers that layers share."""

    starts: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    pieces: dict[tuple[Any, ...], list[_Piece]] = field(default_factory=dict)
    workspace: list[torch.Tensor] | None = None


class CpuPagedAttention(AttentionBackend):
    """The backend described in the module docstring."""

    name = "cpu_paged"
    default_block_size = 16
    takes_bias = True

    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        return None

    def build(self, meta: AttentionMetadata) -> None:
        meta.extra = Plan(meta.query_start_loc.tolist(), meta.seq_lens.tolist())

    def attend(self, call: AttentionCall) -> torch.Tensor:
        q, k_cache, v_cache, meta = call.q, call.k_cache, call.v_cache, call.meta
        plan: Plan = meta.extra
        tensors = _tensors(k_cache, v_cache)
        kind = call.sliding_window, *(tensor.stride() for tensor in tensors)
        pieces = plan.pieces.get(kind)
        if pieces is None:
            pieces = plan.pieces[kind] = _pieces(plan, _Rows(meta.block_table, tensors), call.sliding_window)
        out = q.new_empty(*q.shape[:2], v_cache.shape[3])
        for piece in pieces:
            k, v = _keys_and_values(_gather(plan, piece, tensors), k_cache, v_cache, q.dtype)
            bias, sinks = None, call.sinks
            if call.bias is not None:
                own = call.bias.of(piece.tokens)
                bias, sinks = own.at(piece.distances(q.device)), own.sinks
            out[piece.tokens] = _attend(q[piece.tokens], k, v, piece, call.scale, call.soft_cap, sinks, bias)
        return out


def attend_span(
    plan: Plan,
    span: tuple[int, int, int],
    q: torch.Tensor,
    k_cache: KVCache,
    v_cache: KVCache,
    block_table: torch.Tensor,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return the attention of tokens that attend to each other in both directions, whose keys are in the cache: `span`
    is the request, the first token and the last + 1. A window limits how far they see back. The other arguments and the
    result are those of `AttentionCall`, for these tokens; `plan` is kept from layer to layer.
    """
    i, start, stop = span
    tensors = _tensors(k_cache, v_cache)
    kind = span, window, *(tensor.stride() for tensor in tensors)
    if kind not in plan.pieces:
        rows = _Rows(block_table, tensors)
        first_key = max(0, start - window + 1) if window else 0
        mask = None
        if window and stop - first_key > window:
            queries = torch.arange(start, stop, device=rows.device)[:, None]
            mask = torch.arange(first_key, stop, device=rows.device) > queries - window
        plan.pieces[kind] = [
            _Piece(
                slice(0, stop - start),
                rows.rows_of_sequence(i, first_key, stop),
                1,
                stop - start,
                stop - first_key,
                mask,
            )
        ]
    (piece,) = plan.pieces[kind]
    k, v = _keys_and_values(_gather(plan, piece, tensors), k_cache, v_cache, q.dtype)
    return _attend(q, k, v, piece, scale, soft_cap, sinks)


def attend_output(
    plan: Plan,
    tokens: tuple[int, int, int, int],
    q: torch.Tensor,
    k_cache: KVCache,
    v_cache: KVCache,
    block_table: torch.Tensor,
    scale: float,
    window: int,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return the attention of output tokens that see their prompt and the last `window` tokens, themselves included,
    whose keys are in the cache: `tokens` are the request, the first token, the last + 1, and the number of prompt
    tokens, of which the first token is more than `window` away. The other arguments and the result are as in
    `attend_span`.
    """
    i, start, stop, num_prompt = tokens
    tensors = _tensors(k_cache, v_cache)
    kind = tokens, window, *(tensor.stride() for tensor in tensors)
    if kind not in plan.pieces:
        rows = _Rows(block_table, tensors)
        prompt = torch.arange(num_prompt, device=rows.device)
        recent = torch.arange(start - window + 1, stop, device=rows.device)
        mask = None
        if stop - start > 1:
            queries = torch.arange(start, stop, device=rows.device)[:, None]
            seen = (recent <= queries) & (recent > queries - window)
            mask = torch.cat([seen.new_ones(stop - start, num_prompt), seen], 1)
        keys = torch.cat([prompt, recent])
        piece = _Piece(slice(0, stop - start), rows.rows_of_positions(i, keys), 1, stop - start, len(keys), mask)
        plan.pieces[kind] = [piece]
    (piece,) = plan.pieces[kind]
    k, v = _keys_and_values(_gather(plan, piece, tensors), k_cache, v_cache, q.dtype)
    return _attend(q, k, v, piece, scale, soft_cap, sinks)


def _tensors(k_cache: KVCache, v_cache: KVCache) -> list[torch.Tensor]:
    """Return the gathered tensors, `[num_blocks, block_size, num_kv_heads, _]` each: keys and values, whose scales
    follow if each token has its own; only the keys of a latent cache, and the scales of these.
    """
    if isinstance(k_cache, ScaledLatents):
        return [as_bytes(k_cache.values), *([] if k_cache.constant else [k_cache.scales])]
    if is_latent(k_cache, v_cache):
        return [k_cache]
    if not isinstance(k_cache, ScaledCache):
        return [k_cache, v_cache]
    values = [as_bytes(k_cache.values), as_bytes(v_cache.values)]
    return values if k_cache.constant else [*values, k_cache.scales[..., None], v_cache.scales[..., None]]


def _keys_and_values(
    gathered: list[torch.Tensor], k_cache: KVCache, v_cache: KVCache, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values `[n, num_kv_heads, keys, head_dim]` of type `dtype`, gathered from `_tensors`.
    The values of a latent cache are columns of the keys.
    """
    if is_latent(k_cache, v_cache):
        k = gathered[0]
        if isinstance(k_cache, ScaledLatents):
            scales = k_cache.scales[0, 0] if k_cache.constant else gathered[1]
            k = k_cache.widened(k.view(k_cache.values.dtype), scales).to(dtype)
        return k, k[..., : v_cache.shape[3]]
    if not isinstance(k_cache, ScaledCache):
        return gathered[0], gathered[1]
    scales = (
        (cache.scales[0, 0, :, None] for cache in (k_cache, v_cache))
        if k_cache.constant
        else (scales[..., 0] for scales in gathered[2:])
    )
    k, v = (
        widened(values.view(cache.values.dtype), scale).to(dtype)
        for values, cache, scale in zip(gathered, (k_cache, v_cache), scales)
    )
    return k, v


def _pieces(plan: Plan, rows: _Rows, window: int | None) -> list[_Piece]:
    decodes, pieces = [], []
    for i, length in enumerate(plan.lengths):
        num_queries = plan.starts[i + 1] - plan.starts[i]
        if num_queries == 1:
            decodes.append(i)
        else:
            pieces += _prefill_pieces(rows, i, plan.starts[i], num_queries, length, window)
    seen = [min(length, window or length) for length in plan.lengths]
    for group in _groups(decodes, seen):
        pieces.append(
            _decode_piece(
                rows, group, [plan.starts[i] for i in group], [plan.lengths[i] for i in group], [seen[i] for i in group]
            )
        )
    return pieces


def _groups(decodes: list[int], seen: list[int]) -> list[list[int]]:
    """Split decoding requests into groups that gather at most _DECODE_TOKENS keys each, including padding; padding at
    most doubles a group.
    """
    if not decodes or len(decodes) * max(seen[i] for i in decodes) <= min(
        _DECODE_TOKENS, 2 * sum(seen[i] for i in decodes)
    ):
        return [decodes] if decodes else []
    groups: list[list[int]] = []
    for i in sorted(decodes, key=lambda i: -seen[i]):
        longest = seen[groups[-1][0]] if groups else 0
        if groups and (len(groups[-1]) + 1) * longest <= _DECODE_TOKENS and 2 * seen[i] >= longest:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


class _Rows:
    """Maps positions to rows of the caches, through the block table: a cache of any block layout is a sequence of rows
    of head_dim.
    """

    def __init__(self, block_table: torch.Tensor, tensors: list[torch.Tensor]) -> None:
        self.block_size, self.num_heads = tensors[0].shape[1:3]
        self.block_table, self.device = block_table, block_table.device
        # (rows per block, per slot, per head)
        self.strides = [tuple(stride // tensor.shape[3] for stride in tensor.stride()[:3]) for tensor in tensors]

    def rows_of_sequence(self, i: int, start: int, stop: int) -> Rows:
        """Return rows of positions start .. stop - 1 of request i, for each head: `[num_kv_heads * keys]`."""
        return self.rows_of_positions(i, torch.arange(start, stop, device=self.device))

    def rows_of_positions(self, i: int, positions: torch.Tensor) -> Rows:
        """Return rows of `positions` `[keys]` int64 of request i, for each head: `[num_kv_heads * keys]`."""
        return self._rows(self.block_table[i][positions // self.block_size], positions % self.block_size)

    def rows_of_group(
        self, group: list[int], starts: torch.Tensor, counts: torch.Tensor, width: int
    ) -> tuple[Rows, torch.Tensor]:
        """Return, for each request of `group`, rows of its positions starts .. starts + counts - 1, padded with slot 0
        to `width`: (rows `[n * num_kv_heads * width]`, mask `[n, width]` of the real keys).
        """
        offsets = torch.arange(width, device=self.device)
        real = offsets < counts[:, None]
        positions = torch.where(real, starts[:, None] + offsets, 0)
        blocks = self.block_table[torch.tensor(group, device=self.device)].gather(1, positions // self.block_size)
        return self._rows(torch.where(real, blocks, 0), positions % self.block_size), real

    def _rows(self, blocks: torch.Tensor, offsets: torch.Tensor) -> Rows:
        rows = {}
        for strides in set(self.strides):
            block_rows, slot_rows, head_rows = strides
            heads = torch.arange(self.num_heads, device=self.device)[:, None] * head_rows
            rows[strides] = ((blocks.long() * block_rows + offsets * slot_rows)[..., None, :] + heads).flatten()
        return [rows[strides] for strides in self.strides]


def _num_rows(cache: torch.Tensor) -> int:
    """Return the number of rows of head_dim from the first entry of `cache` to its last, including gaps between
    them.
    """
    last = sum((size - 1) * stride for size, stride in zip(cache.shape[:3], cache.stride()))
    return last // cache.shape[3] + 1


def _decode_piece(rows: _Rows, group: list[int], tokens: list[int], lengths: list[int], seen: list[int]) -> _Piece:
    device, width = rows.device, max(seen)
    counts = torch.tensor(seen, device=device)
    indices, real = rows.rows_of_group(group, torch.tensor(lengths, device=device) - counts, counts, width)
    mask = None if min(seen) == width else real[:, None, None, :]
    in_order = tokens == list(range(tokens[0], tokens[0] + len(tokens)))
    where = slice(tokens[0], tokens[0] + len(tokens)) if in_order else torch.tensor(tokens, device=device)
    return _Piece(where, indices, len(group), 1, width, mask, reach=counts[:, None] - 1)


def _prefill_pieces(
    rows: _Rows, i: int, first_token: int, num_queries: int, length: int, window: int | None
) -> list[_Piece]:
    """Split the queries into pieces of at most _PREFILL_SCORES scores. Each piece covers the keys from the window of
    its first query up to its last query.
    """
    pieces = []
    step = max(1, min(num_queries, _PREFILL_SCORES // length))
    for first in range(0, num_queries, step):
        last = min(first + step, num_queries)
        start_position, stop_position = length - num_queries + first, length - num_queries + last
        first_key = max(0, start_position - window + 1) if window else 0
        num_keys = stop_position - first_key
        mask = None
        # then the mask is the square lower triangle that the kernel supports
        plain = first_key == start_position and (not window or num_keys <= window)
        if not plain:
            queries = torch.arange(start_position, stop_position, device=rows.device)[:, None]
            keys = torch.arange(first_key, stop_position, device=rows.device)
            mask = keys <= queries
            if window:
                mask &= keys > queries - window
        where = slice(first_token + first, first_token + last)
        found = rows.rows_of_sequence(i, first_key, stop_position)
        reach = start_position - first_key
        pieces.append(_Piece(where, found, 1, last - first, num_keys, mask, plain, reach))
    return pieces


def _gather(plan: Plan, piece: _Piece, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return `[n, num_kv_heads, keys, _]` of each tensor, gathered into the plan's buffers: new buffers would cost a
    page fault per page in every layer.
    """
    if plan.workspace is None:
        most = max(len(p.rows[0]) for pieces in plan.pieces.values() for p in pieces)
        plan.workspace = [tensor.new_empty(most * tensor.shape[3]) for tensor in tensors]
    gathered = []
    for buffer, tensor, rows in zip(plan.workspace, tensors, piece.rows):
        heads, dim = tensor.shape[2:]
        size = len(rows) * dim
        if len(buffer) < size:  # a layer with a wider window, or larger heads, than the previous ones
            buffer = tensor.new_empty(size)
        found = buffer[:size].view(-1, dim)
        torch.index_select(tensor.as_strided((_num_rows(tensor), dim), (dim, 1)), 0, rows, out=found)
        gathered.append(found.view(piece.num_seqs, heads, piece.num_keys, dim))
    return gathered


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    piece: _Piece,
    scale: float,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention of q `[n * queries, num_heads, head_dim]` over k and v `[n, num_kv_heads, keys, head_dim]`;
    `bias` `[n * queries, num_heads, keys]` is added to scores; with it, `sinks` are `[n * queries, num_heads]`, else
    `[num_heads]`. Returns `[n * queries, num_heads, head_dim of v]`.

    The query heads that share a KV head are arranged so that it is read once for all of them: as its queries in decode,
    as heads of a batch of KV heads (with a stride of 0) in a prefill.
    """
    num_heads, dim = q.shape[1:]
    kv_heads = k.shape[1]
    group = num_heads // kv_heads
    if piece.num_queries == 1:
        q = q.view(piece.num_seqs, kv_heads, group, dim)
        sinks = None if sinks is None else sinks.view(-1, kv_heads, group, 1)
        bias = None if bias is None else bias.unflatten(1, (kv_heads, group))
        return _fused(q, k, v, piece, scale, soft_cap, sinks, bias).reshape(piece.num_seqs, num_heads, -1)
    q = q.view(piece.num_queries, kv_heads, group, dim).permute(1, 2, 0, 3)
    k, v = (t.transpose(0, 1).expand(kv_heads, group, -1, -1) for t in (k, v))
    sinks = None if sinks is None else sinks.view(-1, kv_heads, group, 1).permute(1, 2, 0, 3)
    bias = None if bias is None else bias.unflatten(1, (kv_heads, group)).permute(1, 2, 0, 3)
    out = _fused(q, k, v, piece, scale, soft_cap, sinks, bias)
    return out.permute(2, 0, 1, 3).reshape(piece.num_queries, num_heads, -1)


def _fused(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    piece: _Piece,
    scale: float,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Compute attention of q `[..., queries, D]`; `sinks` and `bias` are broadcastable to the scores `[..., queries,
    keys]`.
    """
    if soft_cap is None and sinks is None and bias is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=piece.mask, is_causal=piece.is_causal, scale=scale)
    scores = torch.matmul(q.float() * scale, k.float().transpose(-1, -2))  # the fused call supports none of these
    scores = scores if bias is None else scores + bias
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    mask = piece.mask
    if piece.is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.float().expand(*scores.shape[:-1], 1)), -1)
    weights = scores.softmax(-1)[..., : k.shape[-2]]
    return torch.matmul(weights, v.float()).to(q.dtype)
