"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): the cache holds one vector per token, from which every
head's keys and values follow by a matrix.

Sizes: H heads of this rank, R = rank of the latent, N and P = sizes of a head's keys without and with rotary embedding,
V = size of its values. The cache entry of a token is [c (R) | k_pe (P)]; a head's key is [W_k c (N) | k_pe], its value
W_v c. In 8 bits, c and k_pe of a token have a scale each (`attention/scaled.py`). Two ways to attend, which differ in
rounding only:

- absorbed: `(q_nope W_k) c + q_pe k_pe` are the scores, and W_v multiplies the weighted sum of c. Attention is over one
  KV head, R + P wide, whatever the number of heads: little to read, but 2 R + P products per pair of tokens and head.
- expanded: the keys and values of all heads are computed into a temporary cache: N + P + V products per pair, and
  (N + V) R more per token of the context.

So decoding tokens are absorbed and long chunks of a prompt expanded. Temporary memory is bounded: requests are expanded
in turns and, if one is too long, some of its heads at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch

from quire.worker.attention.base import AttentionMetadata
from quire.worker.attention.scaled import ScaledLatents, as_bytes, store
from quire.worker.layers.attention import Attention
from quire.worker.layers.linear import product
from quire.worker.layers.sparse.chosen import ChoosingStep, attend_to_chosen, tokens_at_once
from quire.worker.layers.views import to_device
from quire.worker.spec.cache import Latent, LatentSizes

EXPANDED_BYTES = 256 << 20  # for the temporary keys and values
_WIDENED_TOKENS = 16384  # latents in 8 bits that exist in float32 at a time


@dataclass(slots=True)
class _Part:
    """Some requests of a step: their tokens and metadata.

    `blocks` are those of their latents, in the order of the temporary cache that `meta` refers to; None if they are
    absorbed.
    """

    tokens: slice | torch.Tensor
    meta: AttentionMetadata
    blocks: torch.Tensor | None = None


HeadProduct = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def multiply_heads(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return x `[T, H, K]` times the matrix `[N, K]` of each head in `weights` `[H, N, K]`: `[T, H, N]`."""
    return torch.bmm(x.transpose(0, 1), weights.transpose(1, 2)).transpose(0, 1)


class LatentAttention(Attention):
    """Causal attention of one layer over its latent cache. `v_cache` is a view of `k_cache`."""

    def __init__(
        self,
        num_heads: int,
        sizes: LatentSizes,
        layer_index: int,
        scale: float,
        sinks: torch.nn.Parameter | None = None,
        kv_from: int | None = None,
        window: int | None = None,
    ):
        heads = {"v_head_dim": sizes.rank, "sinks": sinks, "kv_from": kv_from, "sliding_window": window}
        super().__init__(num_heads, 1, sizes.width, layer_index, scale=scale, **heads)
        self.sizes = sizes
        # W_k and W_v of absorbed tokens; with products of their own all tokens are absorbed
        self.to_latents: HeadProduct = multiply_heads
        self.to_values: HeadProduct = multiply_heads

    @property
    def fixed(self) -> bool:
        """Return whether sums have one order, whatever the step."""
        return self.to_latents is not multiply_heads

    def cache_spec(self, itemsize: int, scale_bytes: int = 0) -> Latent:
        return Latent(self.sizes.width, self.sizes.rope_dim, itemsize, scale_bytes, self.sliding_window or 0)

    def write(self, latents: torch.Tensor, attn: AttentionMetadata) -> None:
        """Store latents `[T, R + P]` in their slots."""
        latents = latents[:, None]
        if isinstance(self.k_cache, ScaledLatents):
            parts = latents.split([self.sizes.rank, self.sizes.rope_dim], -1)
            attn.backend.write_kv(*parts, self.k_cache.latent, self.k_cache.rope, attn.slot_mapping)
        else:
            store(self.k_cache, attn.slot_mapping, latents)

    def attend_latent(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        kv_b: torch.Tensor,
        attn: AttentionMetadata,
        choosing: ChoosingStep | None = None,
    ) -> torch.Tensor:
        """Attend with q_nope `[T, H, N]` and q_pe `[T, H, P]` to latents that are already in the cache. kv_b `[H * N +
        H * V, R]` is W_k of all heads, then W_v. The tokens of `choosing` attend to the keys that they have chosen.
        Returns `[T, H * V]`.
        """

        def attend(attn: AttentionMetadata, q_nope: torch.Tensor, q_pe: torch.Tensor) -> torch.Tensor:
            if choosing is not None:
                return self._attend_to_chosen(q_nope, q_pe, *self.matrices(kv_b), attn, choosing)
            return self._attend_in_parts(q_nope, q_pe, *self.matrices(kv_b), attn)

        return attn.backend.apart(attend, attn, (self.num_heads * self.sizes.v_dim,), q_nope, q_pe)

    def _attend_in_parts(
        self, q_nope: torch.Tensor, q_pe: torch.Tensor, w_k: torch.Tensor, w_v: torch.Tensor, attn: AttentionMetadata
    ) -> torch.Tensor:
        out = q_nope.new_empty(len(q_nope), self.num_heads, self.sizes.v_dim)
        for part in self._parts(attn, q_nope.element_size()):
            q = q_nope[part.tokens], q_pe[part.tokens]
            if part.blocks is None:
                out[part.tokens] = self._absorbed(*q, w_k, w_v, part.meta)
            else:
                out[part.tokens] = self._expanded(*q, w_k, w_v, part)
        return out.flatten(1)

    def _attend_to_chosen(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        w_k: torch.Tensor,
        w_v: torch.Tensor,
        attn: AttentionMetadata,
        choosing: ChoosingStep,
    ) -> torch.Tensor:
        """Return the result `[T, H * V]` of a step in which tokens choose keys; they are absorbed."""
        out = q_nope.new_empty(len(q_nope), self.num_heads * self.sizes.v_dim)
        if (others := choosing.others(attn, self.cache_group)) is not None:
            tokens, meta = others
            out[tokens] = self._attend_in_parts(q_nope[tokens], q_pe[tokens], w_k, w_v, meta)
        for piece in choosing.pieces:
            fitting = tokens_at_once(piece, self.k_cache, self.num_heads, q_nope.element_size())
            rows, some = piece.tokens.flatten(), 1 if choosing.one_by_one else fitting
            for mine in torch.arange(len(rows), device=rows.device).split(some):
                chosen = rows[mine]
                q = torch.cat((self.to_latents(q_nope[chosen], w_k.transpose(1, 2)), q_pe[chosen]), -1)
                keys = self.k_cache, mine, piece, attn
                attended = attend_to_chosen(q, *keys, self.sizes.rank, self.scale, self.sinks)
                out[chosen] = self.to_values(attended, w_v).flatten(1)
        return out

    def matrices(self, kv_b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return W_k `[H, N, R]` and W_v `[H, V, R]` in kv_b."""
        num_keys = self.num_heads * self.sizes.nope_dim
        w_k = kv_b[:num_keys].unflatten(0, (self.num_heads, self.sizes.nope_dim))
        return w_k, kv_b[num_keys:].unflatten(0, (self.num_heads, self.sizes.v_dim))

    def _parts(self, attn: AttentionMetadata, itemsize: int) -> list[_Part]:
        """Return the requests by the way they attend, for all layers. `itemsize` is that of the activations."""
        if attn.max_query_len == 1 or self.fixed:
            return [_Part(slice(None), attn)]
        if attn.latent_parts is None:
            attn.latent_parts = list(_split(attn, self.sizes, self.num_heads, self.k_cache.shape[1], itemsize))
        return attn.latent_parts

    def _absorbed(
        self, q_nope: torch.Tensor, q_pe: torch.Tensor, w_k: torch.Tensor, w_v: torch.Tensor, meta: AttentionMetadata
    ) -> torch.Tensor:
        q = torch.cat((self.to_latents(q_nope, w_k.transpose(1, 2)), q_pe), -1)
        caches = self.k_cache, self.v_cache
        attended = meta.backend.forward(q, *caches, meta, self.scale, self.sliding_window, sinks=self.sinks)
        return self.to_values(attended, w_v)

    def _expanded(
        self, q_nope: torch.Tensor, q_pe: torch.Tensor, w_k: torch.Tensor, w_v: torch.Tensor, part: _Part
    ) -> torch.Tensor:
        latents = self._latents(part.blocks, q_nope.dtype)
        c, k_pe = latents.split([self.sizes.rank, self.sizes.rope_dim], -1)
        num_blocks, block_size = len(part.blocks), self.k_cache.shape[1]
        out = q_nope.new_empty(len(q_nope), self.num_heads, self.sizes.v_dim)
        count = self._heads_at_once(c.element_size() * len(c))
        for first in range(0, self.num_heads, count):
            heads = slice(first, first + count)
            k = torch.cat(
                (
                    product(c, w_k[heads].flatten(0, 1)).unflatten(-1, (count, -1)),
                    k_pe[:, None].expand(-1, count, -1),
                ),
                -1,
            )
            v = product(c, w_v[heads].flatten(0, 1))
            q = torch.cat((q_nope[:, heads], q_pe[:, heads]), -1)
            caches = (t.view(num_blocks, block_size, count, -1) for t in (k, v))
            sinks = None if self.sinks is None else self.sinks[heads]
            window = self.sliding_window
            out[:, heads] = part.meta.backend.forward(q, *caches, part.meta, self.scale, window, sinks=sinks)
        return out

    def _latents(self, blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a copy of the latents of whole blocks, `[tokens, R + P]`."""
        cache = self.k_cache
        if isinstance(cache, torch.Tensor):
            return cache[blocks].view(-1, self.sizes.width)
        latents = torch.empty(len(blocks), *cache.shape[1:], dtype=dtype, device=blocks.device)
        count = -(-_WIDENED_TOKENS // cache.shape[1])
        for some, part in zip(blocks.split(count), latents.split(count)):
            values = as_bytes(cache.values)[some].view(cache.values.dtype)
            part.copy_(cache.widened(values, cache.scales[some]))
        return latents.view(-1, self.sizes.width)

    def _heads_at_once(self, entry_bytes: int) -> int:
        """Return the number of heads whose keys and values fit into EXPANDED_BYTES; `entry_bytes` are those of one
        entry of each token. The result divides the number of heads, because a backend's data for a step depends on it.
        """
        of_head = (self.sizes.nope_dim + self.sizes.rope_dim + self.sizes.v_dim) * entry_bytes
        divisors = (n for n in range(self.num_heads, 1, -1) if self.num_heads % n == 0)
        return next((n for n in divisors if n * of_head <= EXPANDED_BYTES), 1)


def _split(
    attn: AttentionMetadata, sizes: LatentSizes, num_heads: int, block_size: int, itemsize: int
) -> Iterator[_Part]:
    """Split a step into the requests that are absorbed, and groups of those that are expanded together."""
    starts, lengths = attn.host_lengths()
    counts = [end - start for start, end in pairwise(starts)]
    expanded = [i for i, (n, length) in enumerate(zip(counts, lengths)) if sizes.expands(n, length)]
    absorbed = sorted(set(range(len(counts))) - set(expanded))
    if not expanded:
        yield _Part(slice(None), attn)
        return
    if absorbed:
        chosen = _Chosen(attn, absorbed, starts, lengths)
        meta = chosen.metadata(attn.block_table[chosen.rows])
        yield _Part(chosen.tokens, meta)
    bytes_per_token = (sizes.nope_dim + sizes.rope_dim + sizes.v_dim) * itemsize
    for group in _groups(expanded, lengths, EXPANDED_BYTES // (bytes_per_token * num_heads)):
        chosen = _Chosen(attn, group, starts, lengths)
        num_blocks = [-(-lengths[i] // block_size) for i in group]
        blocks = torch.cat([attn.block_table[i, :number] for i, number in zip(group, num_blocks)]).long()
        rows, first, width = [], 0, max(num_blocks)
        for number in num_blocks:
            rows.append([*range(first, first + number), *[0] * (width - number)])
            first += number
        table = to_device(rows, torch.int32, attn.block_table.device)
        yield _Part(chosen.tokens, chosen.metadata(table), blocks)


def _groups(requests: Sequence[int], lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Yield `requests` in groups of at most `most` tokens, or of one request."""
    group: list[int] = []
    total = 0
    for i in requests:
        if group and total + lengths[i] > most:
            yield group
            group, total = [], 0
        group.append(i)
        total += lengths[i]
    yield group


class _Chosen:
    """Some requests of a step."""

    def __init__(self, attn: AttentionMetadata, requests: list[int], starts: list[int], lengths: list[int]):
        self.attn, device = attn, attn.block_table.device
        self.lengths = [lengths[i] for i in requests]
        self.counts = [starts[i + 1] - starts[i] for i in requests]
        first, last = requests[0], requests[-1]
        self.rows: slice | torch.Tensor
        self.tokens: slice | torch.Tensor
        if requests == list(range(first, last + 1)):
            self.rows, self.tokens = slice(first, last + 1), slice(starts[first], starts[last + 1])
        else:
            tokens = [token for i in requests for token in range(starts[i], starts[i + 1])]
            self.rows, self.tokens = (to_device(indices, torch.int64, device) for indices in (requests, tokens))

    def metadata(self, block_table: torch.Tensor) -> AttentionMetadata:
        """Return the metadata of these requests alone."""
        starts = to_device([0, *accumulate(self.counts)], torch.int32, block_table.device)
        meta = replace(
            self.attn,
            slot_mapping=self.attn.slot_mapping[self.tokens],
            query_start_loc=starts,
            seq_lens=self.attn.seq_lens[self.rows].contiguous(),
            block_table=block_table,
            max_query_len=max(self.counts),
            max_seq_len=max(self.lengths),
            extra=None,
            host=None,
            latent_parts=None,
        )
        meta.backend.build(meta)
        return meta
