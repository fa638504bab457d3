"""Attention to blocks of keys that an index chooses for each KV head (MiniMax M3), or for all of them (Qwen4-Exp).

The index has one key per token. In the first case it has one query per KV head, and the score of a block is the largest
product with its keys. The blocks with the highest scores are attended to, and always the last `local` ones. In the
second the score is that of `choose`, of a mean of the keys; whole blocks are chosen, and the tokens after the last of
them are attended to. A token that has no more blocks than are chosen attends to all its keys, as without an index.

Sizes: H heads of G KV heads of this rank, D entries of keys, V of values; I entries of the index's keys.
"""

from __future__ import annotations

import torch

from quire.worker.attention.base import AttentionMetadata
from quire.worker.attention.scaled import KVCache, as_bytes, widened
from quire.worker.layers.attention import Attention
from quire.worker.layers.sparse.chosen import GATHERED_BYTES, Piece, choose
from quire.worker.spec.cache import IndexSizes


def choose_blocks(piece: Piece, q: torch.Tensor, keys: torch.Tensor, sizes: IndexSizes) -> torch.Tensor:
    """Return the numbers of the chosen blocks, int64 `[B, Q, G, top]`, for q `[B, Q, G, I]` and keys `[B, longest, I]`,
    both float32.
    """
    size, blocks = sizes.block, -(-keys.shape[1] // sizes.block)
    number = torch.arange(blocks * size, device=keys.device)
    hidden = number > piece.positions[..., None]  # [B, Q, blocks * size]
    best = []
    for head in range(q.shape[2]):
        scores = torch.bmm(q[:, :, head], keys.transpose(1, 2))
        scores = torch.nn.functional.pad(scores, (0, blocks * size - keys.shape[1]))
        best.append(scores.masked_fill_(hidden, -torch.inf).unflatten(-1, (blocks, size)).amax(-1))
    scores = torch.stack(best, 2)  # [B, Q, G, blocks]
    last = piece.positions[..., None, None] // size
    near = torch.arange(blocks, device=keys.device)
    scores.masked_fill_((near <= last) & (near > last - sizes.local), torch.inf)
    return scores.topk(sizes.top // size, -1).indices


def choose_whole_blocks(
    piece: Piece, q: torch.Tensor, means: torch.Tensor, sizes: IndexSizes, heads: int
) -> torch.Tensor:
    """Return the numbers of the chosen blocks and that of the block after the last whole one, int64 `[B, Q, G, top +
    1]`, for q `[B, Q, index heads, I]` and means `[B, blocks, I]`, both float32, and G KV heads.
    """
    best = choose(piece, q, q.new_ones(q.shape[:-1]), means, sizes.top // sizes.block, sizes.block)
    rest = (piece.positions[..., None] + 1) // sizes.block
    return torch.cat([best, rest], -1)[:, :, None].expand(-1, -1, heads, -1)


def attend_to_blocks(
    attn: Attention, q: torch.Tensor, tokens: torch.Tensor, piece: Piece, meta: AttentionMetadata, size: int
) -> torch.Tensor:
    """Return the attended values `[S, H, V]` of q `[S, H, D]`, queries number `tokens` `[S]` of a piece, whose `keys`
    are numbers of blocks of `size` tokens `[B, Q, G, top]`.
    """
    number, heads = piece.tokens.shape[1], attn.num_kv_heads
    at = piece.positions.flatten()[tokens][:, None, None]
    within = torch.arange(size, device=q.device)
    keys = (piece.keys.flatten(0, 1)[tokens][..., None] * size + within).flatten(2)  # [S, G, top * size]
    hidden, keys = keys > at, keys.minimum(at)
    slots = attn.k_cache.shape[1]
    rows = meta.block_table[piece.requests[tokens // number]].long()  # [S, entries of the block table]
    blocks = rows.gather(1, (keys // slots).flatten(1)).view_as(keys)
    place = blocks, keys % slots, torch.arange(heads, device=q.device)[:, None]
    k, v = (_gather(cache, *place).to(q.dtype) for cache in (attn.k_cache, attn.v_cache))
    grouped = q.unflatten(1, (heads, -1))  # [S, G, H / G, D]
    scores = (grouped @ k.transpose(-1, -2) * attn.scale).float().masked_fill_(hidden[:, :, None], -torch.inf)
    return (scores.softmax(-1).to(q.dtype) @ v).flatten(1, 2)


def tokens_at_once(attn: Attention, top: int, itemsize: int) -> int:
    """Return the number of tokens whose chosen keys and values fit into the memory for them."""
    each = top * attn.num_kv_heads * (attn.head_dim + attn.v_head_dim) * itemsize
    return max(1, GATHERED_BYTES[attn.k_cache.device.type] // each)


def _gather(cache: KVCache, blocks: torch.Tensor, offsets: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
    """Return the entries `[.., D]` of one head each; float32 if they are in 8 bits."""
    if isinstance(cache, torch.Tensor):
        return cache[blocks, offsets, heads]
    values = as_bytes(cache.values)[blocks, offsets, heads].view(cache.values.dtype)
    return widened(values, cache.scales[blocks, offsets, heads])
