"""Attention of DeepSeek V4 to a window and to compressed keys (`layers/sparse/compressed.py`)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from quire.worker.layers.linear import (
    PLAIN_WEIGHTS,
    ColumnParallelLinear,
    Part,
    RowParallelLinear,
    Shard,
    WeightFormat,
    empty_parameter,
)
from quire.worker.layers.moe import give_other_parts
from quire.worker.layers.norm import RMSNorm, rms_norm
from quire.worker.layers.sparse.compressed import CompressedKeys, Queries, WindowKeys, attend
from quire.worker.layers.state import RecurrentState
from quire.worker.layers.states.compression import compress
from quire.worker.parallel import Exchange, split_size, tp
from quire.worker.spec.model import ModelSpec
from quire.worker.transformer.attention import attention_sinks
from quire.worker.transformer.calls import LayerCall


class CompressedAttention(nn.Module):
    """Maps x `[T, H]` to `[T, H]`, or to its rows in `needed_rows`. Keys are whole on every rank; heads are split."""

    def __init__(self, spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__()
        kind, group, hidden = spec.layers[layer], tp(), spec.hidden_size
        self.sizes = sizes = kind.compressed
        self.eps, self.dim, rank = spec.norm_eps, kind.head_dim, sizes.rank
        heads = split_size("num_attention_heads", kind.num_heads, group)
        self.groups = split_size("o_groups", sizes.groups, group)
        latents = [Shard(f"{prefix}.q_a_proj", rank, 0, rank), Shard(f"{prefix}.kv_proj", self.dim, 0, self.dim, rank)]
        self.in_proj = ColumnParallelLinear(hidden, latents, False, weights.linear(f"{prefix}.in_proj"))
        self.q_norm, self.kv_norm = RMSNorm(rank, self.eps), RMSNorm(self.dim, self.eps)
        self.kv_norm.weight.parts = [Part(f"{prefix}.kv_norm.weight", (self.dim,))]
        give_other_parts(self.kv_norm.weight, [[Part(f"{prefix}.norm.weight", (self.dim,))]])
        mine = heads * self.dim
        shard = Shard(f"{prefix}.q_b_proj", kind.num_heads * self.dim, group.rank * mine, mine)
        self.q_b_proj = ColumnParallelLinear(rank, [shard], False, weights.linear(shard.prefix))
        width, rows = kind.num_heads * self.dim // sizes.groups, self.groups * sizes.group_rank
        shard = Shard(f"{prefix}.o_a_proj", sizes.groups * sizes.group_rank, group.rank * rows, rows)
        # its weight is one matrix per group of heads
        self.o_a_proj = ColumnParallelLinear(width, [shard], False, weights.matrix(shard.prefix))
        self.o_b_proj = RowParallelLinear(
            sizes.groups * sizes.group_rank,
            hidden,
            False,
            f"{prefix}.o_b_proj",
            "o_groups * o_lora_rank",
            weights.linear(f"{prefix}.o_b_proj"),
        )
        sinks = attention_sinks(kind.num_heads, heads, prefix)
        self.attn = WindowKeys(heads, self.dim, sizes.rope_dim, layer, kind.window, sinks)
        self.compressor = Compressor(spec, layer, prefix, weights) if sizes.rate else None

    def forward(self, x: torch.Tensor, call: LayerCall) -> torch.Tensor:
        meta, table = call.attn[self.attn.cache_group], call.rotation.cos_sin
        positions = call.rotation.positions
        rows = table[positions]
        latents, kv = self.in_proj(x).split([self.sizes.rank, self.dim], -1)
        latents = self.q_norm(latents.contiguous())
        q = rms_norm(self.q_b_proj(latents).unflatten(-1, (-1, self.dim)), None, self.eps)
        queries = Queries(rotate(q, rows))
        self.attn.write(rotate(self.kv_norm(kv.contiguous())[:, None], rows)[:, 0], meta)
        keys = keys_meta = None
        if self.compressor is not None:
            keys = self.compressor.attn
            keys_meta = call.attn[keys.cache_group]
            index_weights = self.compressor.write(x, call, self.attn.k_cache.shape[1])
            if self.sizes.top:
                index_q = rotate(self.compressor.index_queries(latents), rows)
                queries = replace(queries, index_q=index_q, index_weights=index_weights)
        attended = attend(queries, positions, self.attn, keys, self.sizes, meta, keys_meta)
        attended, rows = call.needed(attended), call.needed(rows)
        grouped = rotate(attended, rows, back=True).reshape(len(attended), self.groups, -1)
        matrices = self.o_a_proj.weight.unflatten(0, (self.groups, -1))
        return self.o_b_proj(torch.einsum("tgi,goi->tgo", grouped, matrices).flatten(1))

    def exchanges(self, num_tokens: int, num_needed: int) -> list[Exchange]:
        """Return the all-reduces of `forward`, in order."""
        return [((num_needed, self.o_b_proj.out_features), None)]


class Compressor(nn.Module):
    """Makes the compressed keys of a layer, and those of its index, which are next to them in the cache; whole on every
    rank.
    """

    def __init__(self, spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__()
        kind = spec.layers[layer]
        self.sizes = sizes = kind.compressed
        self.dim, self.series, self.width = kind.head_dim, 1 + sizes.overlap, kind.head_dim + sizes.index_dim
        both = [(f"{prefix}.compressor", 0, self.dim)]
        if sizes.index_dim:
            both.append((f"{prefix}.indexer.compressor", self.dim, sizes.index_dim))
        shards, biases, series = [], [], self.series
        for place, offset, dim in both:
            for i in range(series):
                for j, name in enumerate(("wkv", "wgate")):
                    target = (j * series + i) * self.width + offset
                    shards.append(Shard(f"{place}.{name}", series * dim, i * dim, dim, target))
                source, target = (1, i * dim, dim), (1, i * self.width + offset, dim)
                biases.append(Part(f"{place}.ape", (sizes.rate, series * dim), (source,), (target,)))
        if sizes.top:
            name = f"{prefix}.indexer.weights_proj"
            shards.append(Shard(name, sizes.index_heads, 0, sizes.index_heads, 2 * series * self.width))
        shards.sort(key=lambda shard: shard.target)
        method = weights.linear(f"{prefix}.compressor.in_proj")
        self.in_proj = ColumnParallelLinear(spec.hidden_size, shards, False, method)
        self.bias = empty_parameter(sizes.rate, series * self.width, parts=biases, dtype=torch.float32)
        self.norm = norm_at(f"{prefix}.compressor.norm.weight", self.dim, spec.norm_eps)
        self.index_norm = self.index_q = None
        if sizes.top:
            self.index_norm = norm_at(f"{prefix}.indexer.compressor.norm.weight", sizes.index_dim, spec.norm_eps)
            width = sizes.index_heads * sizes.index_dim
            shard = Shard(f"{prefix}.indexer.q_b_proj", width, 0, width)
            self.index_q = ColumnParallelLinear(sizes.rank, [shard], False, weights.linear(shard.prefix))
        self.state = RecurrentState(layer, kind.state.shapes(1))
        self.attn = CompressedKeys(self.width, sizes.rate, len(spec.layers) + layer)

    def write(self, x: torch.Tensor, call: LayerCall, block_size: int) -> torch.Tensor | None:
        """Store the compressed keys that end with tokens of the step. Returns the weights of the index's heads, scaled,
        `[T, heads]` float32.
        """
        rate, positions, channels = self.sizes.rate, call.rotation.positions, self.series * self.width
        kv, gate, weights = self.in_proj(x).float().tensor_split([channels, 2 * channels], -1)
        kv, gate = (part.unflatten(-1, (self.series, -1)) for part in (kv, gate + self.bias[positions % rate]))
        means = compress(kv, gate, positions, rate, self.state.pages[0], self.state.step(call.attn))
        ends = ((positions + 1) % rate == 0).nonzero()[:, 0]
        if len(ends):
            slots = call.attn[self.attn.cache_group].slot_mapping[ends]
            self.attn.write(self._keys(means[ends].to(x.dtype), positions[ends], call), slots, block_size)
        if not self.sizes.top:
            return None
        return weights * (self.sizes.index_heads * self.sizes.index_dim) ** -0.5

    def _keys(self, means: torch.Tensor, positions: torch.Tensor, call: LayerCall) -> torch.Tensor:
        """Return the keys `[N, D + I]` of windows that end at `positions`, rotated as their first tokens."""
        rows = call.rotation.cos_sin[positions - self.sizes.rate + 1]
        keys = [rotate(self.norm(means[:, : self.dim].contiguous())[:, None], rows)]
        if self.index_norm is not None:
            keys.append(rotate(self.index_norm(means[:, self.dim :].contiguous())[:, None], rows))
        return torch.cat(keys, -1)[:, 0]

    def index_queries(self, latents: torch.Tensor) -> torch.Tensor:
        """Return the queries of the index `[T, heads, I]`, not rotated, of the latents `[T, rank]`."""
        return self.index_q(latents).unflatten(-1, (self.sizes.index_heads, -1))


def norm_at(name: str, size: int, eps: float) -> RMSNorm:
    """Return a norm whose weight is the tensor `name`."""
    norm = RMSNorm(size, eps)
    norm.weight.parts = [Part(name, (size,))]
    return norm


def rotate(x: torch.Tensor, rows: torch.Tensor, back: bool = False) -> torch.Tensor:
    """Rotate neighbouring pairs of the last P entries of x `[T, heads, D]` by the angles of rows `[T, P]`, or back."""
    cos, sin = rows[:, None].chunk(2, -1)
    sin = -sin if back else sin
    still, turned = x.tensor_split([x.shape[-1] - rows.shape[-1]], -1)
    first, second = turned.float().unflatten(-1, (-1, 2)).unbind(-1)
    pairs = torch.stack([first * cos - second * sin, second * cos + first * sin], -1)
    return torch.cat([still, pairs.flatten(-2).to(x.dtype)], -1)
