"""Attention to chosen blocks of keys in a decoder layer (`layers/sparse/blocks.py`)."""

from __future__ import annotations

import torch
from torch import nn

from quire.worker.attention.base import AttentionMetadata
from quire.worker.layers.linear import PLAIN_WEIGHTS, ColumnParallelLinear, Shard, WeightFormat, split_kv_heads
from quire.worker.layers.norm import NORMS
from quire.worker.layers.rotary import apply_rotary
from quire.worker.layers.sparse.blocks import attend_to_blocks, choose_blocks, tokens_at_once
from quire.worker.layers.sparse.chosen import ChoosingStep, IndexKeys, choosing_step
from quire.worker.parallel import tp
from quire.worker.spec.model import ModelSpec
from quire.worker.transformer.attention import SelfAttention
from quire.worker.transformer.calls import LayerCall


class BlockIndex(nn.Module):
    """Chooses the blocks of each token for the KV heads of this rank. Every rank computes and stores all keys."""

    def __init__(self, spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__()
        kind = spec.layers[layer]
        sizes = self.sizes = kind.index
        self.rotary_dim = min(sizes.dim, spec.ropes[kind.rope].rotary_dim)
        number, first = split_kv_heads(kind.num_kv_heads, tp())
        q, k = f"{prefix}.q_proj", f"{prefix}.k_proj"
        shard = Shard(q, sizes.heads * sizes.dim, first * sizes.dim, number * sizes.dim)
        self.q_proj = ColumnParallelLinear(spec.hidden_size, [shard], False, weights.linear(q))
        shard = Shard(k, sizes.dim, 0, sizes.dim)
        self.k_proj = ColumnParallelLinear(spec.hidden_size, [shard], False, weights.linear(k))
        self.q_norm, self.k_norm = (NORMS[spec.norm](sizes.dim, spec.norm_eps) for _ in range(2))
        self.attn = IndexKeys(sizes.width, sizes.width // 2, len(spec.layers) + layer)

    def write(self, x: torch.Tensor, call: LayerCall) -> None:
        """Store the keys of the tokens, whose inputs are x `[T, H]`."""
        rows = call.rotation.cos_sin[call.rotation.positions]
        keys = self.rotate(self.k_norm(self.k_proj(x))[:, None], rows)[:, 0]
        self.attn.write(keys, call.attn[self.attn.cache_group])

    def choose(self, x: torch.Tensor, call: LayerCall, step: ChoosingStep) -> None:
        """Choose blocks for the tokens of `step`, from x `[T, H]`."""
        meta = call.attn[self.attn.cache_group]
        for piece in step.pieces:
            tokens = piece.tokens.flatten()
            rows = call.rotation.cos_sin[call.rotation.positions[tokens]]
            q = self.rotate(self.q_norm(self.q_proj(x[tokens]).unflatten(-1, (-1, self.sizes.dim))), rows)
            q = q.float().unflatten(0, piece.tokens.shape)
            piece.keys = choose_blocks(piece, q, self.attn.rows(meta, piece.requests, piece.longest), self.sizes)

    def rotate(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Rotate the first entries of x `[S, heads, I]` by the angles of rows `[S, D]`, the table's for whole heads."""
        angles = torch.cat([part[:, : self.rotary_dim // 2] for part in rows.chunk(2, -1)], -1)
        turned, kept = x.tensor_split([self.rotary_dim], -1)
        return torch.cat([apply_rotary(turned, angles), kept], -1)


class BlockAttention(SelfAttention):
    """Attention of which tokens with more keys than `LayerSpec.index` chooses see chosen blocks only."""

    def __init__(self, spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(spec, layer, prefix, weights)
        self.indexer = BlockIndex(spec, layer, f"{prefix}.indexer", weights)

    def forward(self, x: torch.Tensor, call: LayerCall) -> torch.Tensor:
        meta, sizes = call.attn[self.attn.cache_group], self.indexer.sizes
        q = self.write_cache(self.qkv_proj(x), call.rotation, meta)
        self.indexer.write(x, call)
        step = choosing_step(call.attn, sizes.top, 1)
        if step is None:
            return self.o_proj(call.needed(self.attn.attend(q, meta)))
        self.indexer.choose(x, call, step)
        return self.o_proj(call.needed(self.attend(q.view(len(x), -1, self.attn.head_dim), meta, step)))

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
