"""Multi-head latent attention in a decoder layer (`layers/mla.py`), and the facts of config.json about it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import nn

from quire.worker.attention.base import AttentionMetadata
from quire.worker.layers.linear import (
    PLAIN_WEIGHTS,
    ColumnParallelLinear,
    RowParallelLinear,
    Shard,
    WeightFormat,
)
from quire.worker.layers.mla import LatentAttention
from quire.worker.layers.norm import RMSNorm
from quire.worker.layers.rotary import Rotation, apply_rotary
from quire.worker.layers.sparse.chosen import ChoosingStep, choosing_step
from quire.worker.layers.views import RowOrder
from quire.worker.parallel import Exchange, split_size, tp
from quire.worker.platforms.ops import Ops
from quire.worker.spec.cache import LatentSizes
from quire.worker.spec.model import LayerSpec, ModelSpec
from quire.worker.spec.rope import RopeSpec
from quire.worker.transformer.attention import attention_sinks, gate_projection, gated
from quire.worker.transformer.calls import LayerCall
from quire.worker.transformer.mixers.key_index import KeyIndex, PooledIndex

TORCH = Ops()
# keys of config.json, with defaults of DeepSeek
MLA_DEFAULTS = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


class MLAFamily:
    """Reads the keys of `MLA_DEFAULTS` in a family's config.json; a mixin of `ConfigReader`."""

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        _complete_sizes(values)
        values["attention_out_bias"] = values["attention_bias"]  # one key for all projections that may have one
        values["layer_types"] = None  # no layer has a window

    @classmethod
    def layer_specs(
        cls, values: dict[str, Any], raw: dict[str, Any], ropes: dict[str, RopeSpec]
    ) -> tuple[LayerSpec, ...]:
        layers = super().layer_specs(values, raw, ropes)
        return tuple(latent_layer(values, ropes, layer) if layer.attends else layer for layer in layers)


def _complete_sizes(values: dict[str, Any]) -> None:
    """Derive the sizes of a head from those of `MLA_DEFAULTS`. Changes `values`; raises ValueError naming the key."""
    for key in MLA_DEFAULTS:
        absent = (key, values[key]) in (("q_lora_rank", None), ("qk_rope_head_dim", 0))
        if (not isinstance(values[key], int) or values[key] < 1) and not absent:
            raise ValueError(f"{key} must be a positive integer, not {values[key]!r}")
    if values["attention_bias"] and values["q_lora_rank"] is None:
        raise ValueError("attention_bias true is not supported with q_lora_rank null")
    # the rotary embedding rotates a part of the head that is a head of its own
    values.update(head_dim=values["qk_rope_head_dim"] or None, partial_rotary_factor=1.0)
    values["num_key_value_heads"] = values["num_attention_heads"]


def latent_layer(values: dict[str, Any], ropes: dict[str, RopeSpec], layer: LayerSpec) -> LayerSpec:
    """Return `layer` with the latent attention that `values` describe."""
    sizes = LatentSizes(
        *(values[key] for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    )
    head_dim = sizes.nope_dim + sizes.rope_dim
    scale = head_dim**-0.5 * (_magnitude(ropes[layer.rope]) ** 2 if layer.rope else 1.0)
    return replace(
        layer,
        window=None,
        mixer="mla",
        head_dim=head_dim,
        v_head_dim=sizes.v_dim,
        scale=scale,
        latent=sizes,
        q_lora_rank=values["q_lora_rank"],
    )


def _magnitude(rope: RopeSpec) -> float:
    """Return the factor of keys and of queries in the scores, which scaled embeddings with `mscale_all_dim` set."""
    scaling = rope.scaling or {}
    mscale, factor = scaling.get("mscale_all_dim") or 0, scaling.get("factor") or 1.0
    return 1.0 + 0.1 * mscale * math.log(factor) if mscale and factor > 1 else 1.0


@dataclass(frozen=True, slots=True)
class InterleavedTail(RowOrder):
    """Reorders the last `rope_dim` rows of each head of `head_dim` rows: evens, then odds, so that a rotary embedding
    of pairs (2i, 2i + 1) becomes the one of `layers/rotary.py`.
    """

    head_dim: int
    rope_dim: int

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        kept, pairs = tensor.unflatten(0, (-1, self.head_dim)).split([self.head_dim - self.rope_dim, self.rope_dim], 1)
        return torch.cat((kept, pairs[:, ::2], pairs[:, 1::2]), 1).flatten(0, 1)


@dataclass(frozen=True, slots=True)
class KeysThenValues(RowOrder):
    """Reorders the rows of `kv_b_proj`: those of all heads' keys, then those of their values."""

    nope_dim: int
    v_dim: int

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        k, v = tensor.unflatten(0, (-1, self.nope_dim + self.v_dim)).split([self.nope_dim, self.v_dim], 1)
        return torch.cat((k.flatten(0, 1), v.flatten(0, 1)))


class Angles:
    """The angles of a step's tokens: `table` is (cosines and sines by position, positions), `rows` those of each token.
    """

    def __init__(self, rotation: Rotation) -> None:
        self.table = rotation.cos_sin, rotation.positions

    @cached_property
    def rows(self) -> torch.Tensor:
        cos_sin, positions = self.table
        return cos_sin[positions]


class MLAttention(nn.Module):
    """Maps x `[T, H]` to `[T, H]`, or to its rows in `needed_rows`. The latents of all tokens are stored in the cache,
    unless the layer reads those of another one (`LayerSpec.kv_from`).

    Ranks split the heads; every rank computes and stores all latents, and the keys of the layer's index.
    """

    index_cls: ClassVar = KeyIndex

    def __init__(self, spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__()
        kind, group = spec.layers[layer], tp()
        sizes = self.sizes = kind.latent
        heads = split_size("num_attention_heads", kind.num_heads, group)
        self.rotates = kind.rope is not None
        interleaved = self.rotates and spec.ropes[kind.rope].interleaved
        q_view, kv_view = (
            InterleavedTail(dim, sizes.rope_dim) if interleaved else None for dim in (kind.head_dim, sizes.width)
        )
        q_rows, q_start, q_length = kind.num_heads * kind.head_dim, group.rank * heads, heads * kind.head_dim
        mine = Shard(f"{prefix}.q_proj", q_rows, q_start * kind.head_dim, q_length, view=q_view)
        rank = kind.q_lora_rank
        first = mine if rank is None else Shard(f"{prefix}.q_a_proj", rank, 0, rank)
        latent = Shard(f"{prefix}.kv_a_proj_with_mqa", sizes.width, 0, sizes.width, first.length, kv_view)
        self.writes = kind.kv_from is None
        self.in_proj = ColumnParallelLinear(
            spec.hidden_size,
            [first, latent] if self.writes else [first],
            spec.attention_bias,
            weights.linear(f"{prefix}.in_proj"),
        )
        self.q_a_layernorm = self.q_b_proj = None
        if rank is not None:
            self.q_a_layernorm = RMSNorm(rank, kind.latent_eps)
            self.q_b_proj = ColumnParallelLinear(
                rank, [replace(mine, prefix=f"{prefix}.q_b_proj")], False, weights.linear(f"{prefix}.q_b_proj")
            )
        self.kv_a_layernorm = RMSNorm(sizes.rank, kind.latent_eps) if self.writes else None
        up = sizes.nope_dim + sizes.v_dim
        shard = Shard(
            f"{prefix}.kv_b_proj",
            kind.num_heads * up,
            q_start * up,
            heads * up,
            view=KeysThenValues(sizes.nope_dim, sizes.v_dim),
        )
        # its weight is multiplied from both sides
        self.kv_b_proj = ColumnParallelLinear(sizes.rank, [shard], False, weights.matrix(f"{prefix}.kv_b_proj"))
        self.o_proj = RowParallelLinear(
            kind.num_heads * sizes.v_dim,
            spec.hidden_size,
            spec.attention_out_bias,
            f"{prefix}.o_proj",
            "num_attention_heads * v_head_dim",
            weights.linear(f"{prefix}.o_proj"),
        )
        self.g_proj = gate_projection(spec, kind, prefix, weights)
        sinks = attention_sinks(kind.num_heads, heads, prefix) if kind.sinks else None
        self.attn = LatentAttention(heads, sizes, layer, kind.scale, sinks, kind.kv_from, kind.window)
        self.index = kind.index
        chooses = self.index is not None and self.index.source is None
        make = PooledIndex if chooses and self.index.pool > 1 else self.index_cls
        self.indexer = make(spec, layer, f"{prefix}.indexer", weights) if chooses else None
        self.ops = TORCH

    def use(self, ops: Ops) -> None:
        """Switch to a platform's operations."""
        self.ops = ops

    def forward(self, x: torch.Tensor, call: LayerCall) -> torch.Tensor:
        meta, sizes = call.attn[self.attn.cache_group], self.sizes
        width = sizes.width if self.writes else 0
        q, latent = self.in_proj(x).split([self.in_proj.out_features - width, width], -1)
        angles = Angles(call.rotation) if self.rotates else None
        if self.writes:
            self.write(latent, angles, meta)
        latents = q if self.q_b_proj is None else self.q_a_layernorm(q.contiguous())
        q = q if self.q_b_proj is None else self.q_b_proj(latents)
        choosing = self.choose(x, latents, call)
        q = self.scale_queries(q, call).unflatten(-1, (self.attn.num_heads, -1))
        q_nope, q_pe = q.split([sizes.nope_dim, sizes.rope_dim], -1)
        if angles is not None and self.ops.rotate_tails is not None:
            self.ops.rotate_tails(q, *angles.table)
        elif angles is not None:
            q_pe = apply_rotary(q_pe, angles.rows)
        attended = self.attn.attend_latent(q_nope, q_pe, self.kv_b_proj.weight, meta, choosing)
        if self.g_proj is not None:
            attended = gated(attended, self.g_proj(x))
        return self.o_proj(call.needed(attended))

    def choose(self, x: torch.Tensor, latents: torch.Tensor, call: LayerCall) -> ChoosingStep | None:
        """Store the keys of the layer's index and choose keys for the tokens that have more than it chooses. Returns
        these tokens, None without any.
        """
        if self.index is None:
            return None
        step = choosing_step(call.attn, self.index.top, self.index.heads, self.attn.fixed)
        if self.indexer is not None:
            self.indexer.write(x, call)
            if step is not None:
                self.indexer.choose(x, latents, call, step)
        return step

    def write(self, latent: torch.Tensor, angles: Angles | None, meta: AttentionMetadata) -> None:
        """Store the latents `[T, R + P]`, normalised and rotated."""
        norm, cache, write = self.kv_a_layernorm, self.attn.k_cache, self.ops.write_latents
        if write is not None and angles is not None and isinstance(cache, torch.Tensor) and cache.dtype == latent.dtype:
            write(latent, norm.weight, norm.eps, *angles.table, cache, meta.slot_mapping)
        else:
            self.write_in_parts(latent, angles, meta)

    def write_in_parts(self, latent: torch.Tensor, angles: Angles | None, meta: AttentionMetadata) -> None:
        """Do `write` without a kernel for all of it."""
        c, k_pe = latent.split([self.sizes.rank, self.sizes.rope_dim], -1)
        k_pe = self.rotary_keys(k_pe)
        k_pe = k_pe if angles is None else apply_rotary(k_pe.unsqueeze(1), angles.rows).squeeze(1)
        self.attn.write(torch.cat((self.kv_a_layernorm(c.contiguous()), k_pe), -1), meta)

    def rotary_keys(self, k_pe: torch.Tensor) -> torch.Tensor:
        """Return the keys `[T, P]` that are rotated."""
        return k_pe

    def scale_queries(self, q: torch.Tensor, call: LayerCall) -> torch.Tensor:
        """Return the queries `[T, heads * D]` with the factors of their positions."""
        scale = call.rotation.query_scale
        return q if scale is None else q * scale[:, None].to(q.dtype)

    def round_for_products(self) -> None:
        """See `DecoderLayer.round_for_products`."""
        if self.q_b_proj is not None and self.q_b_proj.method.rounding is not None:
            self.q_a_layernorm.round_for(self.q_b_proj.method.rounding)

    def exchanges(self, num_tokens: int, num_needed: int) -> list[Exchange]:
        """Return the all-reduces of `forward`, in order."""
        return [((num_needed, self.o_proj.out_features), None)]
