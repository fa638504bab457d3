"""Attention to chosen blocks of keys in a decoder layer (`layers/sparse/blocks.py`)."""

from __future__ import annotations

import torch
from torch import nn

from quire.worker.attention.base import AttentionMetadata
from quire.worker.layers.linear import PLAIN_WEIGHTS, ColumnParallelLinear, Shard, WeightFormat, split_kv_heads
from quire.worker.layers.norm import NORMS
from quire.worker.layers.rotary import apply_rotary
from quire.worker.layers.sparse.blocks import attend_to_blocks, choose_blocks, choose_whole_blocks, tokens_at_once
from quire.worker.layers.sparse.chosen import ChoosingStep, IndexKeys, Piece, choosing_step
from quire.worker.parallel import tp
from quire.worker.spec.model import ModelSpec
from quire.worker.transformer.attention import GatedAttention, SelfAttention, gated
from quire.worker.transformer.calls import LayerCall


class BlockIndex(nn.Module):
    """Chooses the blocks of each token for the KV heads of this rank. Every rank computes and stores all keys."""

    def __init__(self, spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__()
        kind = spec.layers[layer]
        sizes = self.sizes = kind.index
        self.rotary_dim = min(sizes.dim, spec.ropes[kind.rope].rotary_dim)
        self.num_kv_heads, first = split_kv_heads(kind.num_kv_heads, tp())
        self.q_proj, self.k_proj = (
            ColumnParallelLinear(spec.hidden_size, [shard], False, weights.linear(shard.prefix))
            for shard in self.shards(prefix, first)
        )
        self.q_norm, self.k_norm = (NORMS[spec.norm](sizes.dim, spec.norm_eps) for _ in range(2))
        self.attn = IndexKeys(sizes.width, sizes.dim if sizes.angles else sizes.dim // 2, len(spec.layers) + layer)

    def shards(self, prefix: str, first: int) -> tuple[Shard, Shard]:
        """Return the rows of the projections to queries, of KV heads from the `first` on, and to keys."""
        heads, size = self.sizes.heads, self.sizes.dim
        q = Shard(f"{prefix}.q_proj", heads * size, first * size, self.num_kv_heads * size)
        return q, Shard(f"{prefix}.k_proj", size, 0, size)

    def write(self, x: torch.Tensor, call: LayerCall) -> None:
        """Store the keys of the tokens, whose inputs are x `[T, H]`."""
        angles = self.angles(call.rotation.cos_sin[call.rotation.positions])
        self.attn.write(self.entries(self.k_proj(x), angles), call.attn[self.attn.cache_group])

    def entries(self, keys: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """Return what the cache holds of tokens with keys `[T, I]` and `angles`."""
        return self.rotate(self.k_norm(keys)[:, None], angles)[:, 0]

    def choose(self, x: torch.Tensor, call: LayerCall, step: ChoosingStep) -> None:
        """Choose blocks for the tokens of `step`, from x `[T, H]`."""
        meta = call.attn[self.attn.cache_group]
        for piece in step.pieces:
            tokens = piece.tokens.flatten()
            angles = self.angles(call.rotation.cos_sin[call.rotation.positions[tokens]])
            q = self.rotate(self.q_norm(self.q_proj(x[tokens]).unflatten(-1, (-1, self.sizes.dim))), angles)
            rows = self.attn.rows(meta, piece.requests, piece.longest)
            piece.keys = self.best(piece, q.unflatten(0, piece.tokens.shape), rows, call)

    def best(self, piece: Piece, q: torch.Tensor, rows: torch.Tensor, call: LayerCall) -> torch.Tensor:
        """Return the numbers of the blocks, see `choose_blocks`; rows `[B, longest, width]` are those of the cache."""
        return choose_blocks(piece, q.float(), rows, self.sizes)

    def angles(self, rows: torch.Tensor) -> torch.Tensor:
        """Return cos and sin of the entries that are rotated, of rows `[S, D]`, the table's for whole heads."""
        return torch.cat([part[:, : self.rotary_dim // 2] for part in rows.chunk(2, -1)], -1)

    def rotate(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """Rotate the first entries of x `[S, heads, I]` by angles `[S, _]`."""
        turned, kept = x.tensor_split([self.rotary_dim], -1)
        return torch.cat([apply_rotary(turned, angles), kept], -1)


class MeanIndex(BlockIndex):
    """Chooses whole blocks for all KV heads by the means of their keys, which are normalised and rotated like the first
    token of the block (Qwen4-Exp).
    """

    def shards(self, prefix: str, first: int) -> tuple[Shard, Shard]:
        name, rows = f"{prefix}.index_qk_proj", self.sizes.heads * self.sizes.dim
        full = rows + self.sizes.dim
        return Shard(name, full, 0, rows), Shard(name, full, rows, self.sizes.dim)

    def entries(self, keys: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        return torch.cat([keys, angles.to(keys.dtype)], -1) if self.sizes.angles else keys

    def best(self, piece: Piece, q: torch.Tensor, rows: torch.Tensor, call: LayerCall) -> torch.Tensor:
        size, number = self.sizes.block, rows.shape[1] // self.sizes.block
        blocks = rows[:, : number * size].unflatten(1, (number, size))  # [B, blocks, size, width]
        if self.sizes.angles:
            angles = blocks[:, :, 0, self.sizes.dim :].flatten(0, 1)
        else:
            first = torch.arange(number, device=rows.device) * size
            angles = self.angles(call.rotation.cos_sin[first]).repeat(len(rows), 1)
        means = blocks[..., : self.sizes.dim].mean(2).flatten(0, 1).to(q.dtype)
        means = self.rotate(self.k_norm(means)[:, None], angles)[:, 0].unflatten(0, (len(rows), number))
        return choose_whole_blocks(piece, q.float(), means.float(), self.sizes, self.num_kv_heads)


class _Chooser(nn.Module):
    """Attends with queries to chosen blocks; a mixin of `SelfAttention`."""

    def add_index(self, spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat) -> None:
        """Create the index."""
        make = MeanIndex if spec.layers[layer].index.means else BlockIndex
        self.indexer = make(spec, layer, f"{prefix}.indexer", weights)

    def attended(self, q: torch.Tensor, x: torch.Tensor, call: LayerCall) -> torch.Tensor:
        """Return what the tokens whose queries are q `[T, H, D]`, and inputs x, attend to: their needed rows."""
        meta = call.attn[self.attn.cache_group]
        self.indexer.write(x, call)
        step = choosing_step(call.attn, self.indexer.sizes.top, 1)
        if step is None:
            return call.needed(self.attn.attend(q, meta))
        self.indexer.choose(x, call, step)
        return call.needed(self.attend(q.view(len(x), -1, self.attn.head_dim), meta, step))

    def attend(self, q: torch.Tensor, meta: AttentionMetadata, step: ChoosingStep) -> torch.Tensor:
        """Return the result `[T, H * V]` of a step in which tokens choose blocks, for q `[T, H, D]`."""
        out = q.new_empty(len(q), self.attn.num_heads * self.attn.v_head_dim)
        if (others := step.others(meta, self.attn.cache_group)) is not None:
            tokens, part = others
            out[tokens] = self.attn.attend(q[tokens], part)
        some = tokens_at_once(self.attn, step.top, q.element_size())
        for piece in step.pieces:
            rows = piece.tokens.flatten()
            for mine in torch.arange(len(rows), device=rows.device).split(some):
                attended = attend_to_blocks(self.attn, q[rows[mine]], mine, piece, meta, self.indexer.sizes.block)
                out[rows[mine]] = attended.flatten(1)
        return out


class BlockAttention(_Chooser, SelfAttention):
    """Attention of which tokens with more keys than `LayerSpec.index` chooses see chosen blocks only."""

    def __init__(self, spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(spec, layer, prefix, weights)
        self.add_index(spec, layer, prefix, weights)

    def forward(self, x: torch.Tensor, call: LayerCall) -> torch.Tensor:
        q = self.write_cache(self.qkv_proj(x), call.rotation, call.attn[self.attn.cache_group])
        return self.o_proj(self.attended(q, x, call))


class GatedBlockAttention(_Chooser, GatedAttention):
    """`BlockAttention` whose attended values a gate multiplies."""

    def __init__(self, spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(spec, layer, prefix, weights)
        self.add_index(spec, layer, prefix, weights)

    def forward(self, x: torch.Tensor, call: LayerCall) -> torch.Tensor:
        q, gate, kv = self.qkv_proj(x).tensor_split([self.width, 2 * self.width], -1)
        q = self.write_cache(torch.cat([q, kv], -1), call.rotation, call.attn[self.attn.cache_group])
        return self.o_proj(gated(self.attended(q, x, call), call.needed(gate)))


def block_attention(spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat) -> SelfAttention:
    """Return the attention of layer `layer`, whose tensors are at `prefix`."""
    make = GatedBlockAttention if spec.layers[layer].qk_norm == "gated_head" else BlockAttention
    return make(spec, layer, prefix, weights)
