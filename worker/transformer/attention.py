"""The attention of a decoder layer: projections, norms of q and k, rotary embedding, cache. One class per way to
normalise q and k.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from quire.worker.attention.base import AttentionMetadata
from quire.worker.layers.attention import Attention
from quire.worker.layers.linear import (
    PLAIN_WEIGHTS,
    ColumnParallelLinear,
    Part,
    QKVParallelLinear,
    RowParallelLinear,
    Shard,
    WeightFormat,
    empty_parameter,
    split_kv_heads,
)
from quire.worker.layers.norm import NORMS, rms_norm
from quire.worker.layers.rotary import Rotation, apply_rotary
from quire.worker.layers.rowwise import rsqrt, sigmoid
from quire.worker.layers.views import HeadHalves, View, chain, columns, rotary_rows
from quire.worker.parallel import Exchange, split_size, tp
from quire.worker.platforms.ops import Ops
from quire.worker.spec.model import LayerSpec, ModelSpec
from quire.worker.transformer.calls import LayerCall

TORCH = Ops()


class SelfAttention(nn.Module):
    """Maps x `[T, H]` to `[T, H]`, or to its rows in `needed_rows`.

    The keys and values of all tokens are stored in the cache. With `qk_norm` "head" each head of q and k is normalised
    before it is rotated.
    """

    native_twin: ClassVar = "attention"

    def __init__(self, spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__()
        kind = spec.layers[layer]
        self.qkv_proj = qkv_projection(spec, kind, prefix, weights)
        self.o_proj = out_projection(spec, kind, prefix, weights)
        self.attn = Attention(
            self.qkv_proj.num_heads,
            self.qkv_proj.num_kv_heads,
            kind.head_dim,
            layer,
            kind.window,
            kind.scale,
            kind.soft_cap,
            kind.v_head_dim,
            attention_sinks(kind.num_heads, self.qkv_proj.num_heads, prefix) if kind.sinks else None,
            chunk=kind.chunk,
            output_window=kind.output_window,
        )
        self.g_proj = gate_projection(spec, kind, prefix, weights)
        self.gate_act, self.v_scale = kind.gate_act, kind.v_scale
        self.qk_norm_rope_write = TORCH.qk_norm_rope_write
        self.eps = spec.norm_eps
        self.make_norms(spec, kind, prefix)

    def make_norms(self, spec: ModelSpec, kind: LayerSpec, prefix: str) -> None:
        """Create the norms of q and k."""
        self.q_norm = self.k_norm = None
        if kind.qk_norm is not None:
            self.q_norm, self.k_norm = (NORMS[spec.norm](kind.head_dim, spec.norm_eps) for _ in range(2))
            for norm in (self.q_norm, self.k_norm):
                norm.weight.view_of_tensor = chain(norm.view, rope_view(spec, kind))

    def use(self, ops: Ops) -> None:
        """Switch to a platform's operations."""
        self.qk_norm_rope_write = ops.qk_norm_rope_write

    def head_norms(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return weights `[D]` of the norms over each head of q and k, or None without norms."""
        return (None, None) if self.q_norm is None else (self.q_norm.weight, self.k_norm.weight)

    def split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return views of q, k and v in qkv `[T, _]`: `[T, heads, D]` each."""
        heads, kv_heads, dim = self.attn.num_heads, self.attn.num_kv_heads, self.attn.head_dim
        q, k, v = qkv.split([heads * dim, kv_heads * dim, kv_heads * self.attn.v_head_dim], -1)
        return q.unflatten(-1, (heads, dim)), k.unflatten(-1, (kv_heads, dim)), v.unflatten(-1, (kv_heads, -1))

    def write_cache(self, qkv: torch.Tensor, rotation: Rotation, meta: AttentionMetadata) -> torch.Tensor:
        """Store the keys and values of qkv `[T, _]`, which may be overwritten, and return q `[T, heads, D]`."""
        if self.attn.v_head_dim != self.attn.head_dim:
            return self._write_uneven(qkv, rotation, meta)
        return self.qk_norm_rope_write(
            qkv,
            *self.head_norms(),
            self.eps,
            rotation.cos_sin,
            rotation.positions,
            self.attn.k_cache,
            self.attn.v_cache,
            meta.slot_mapping,
            self.attn.num_heads,
        )

    def _write_uneven(self, qkv: torch.Tensor, rotation: Rotation, meta: AttentionMetadata) -> torch.Tensor:
        """Do `write_cache` for heads whose values are not as wide as their keys."""
        q, k, v = self.split(qkv)
        rows = rotation.cos_sin[rotation.positions]
        q, k = (
            apply_rotary(heads if weight is None else rms_norm(heads, weight, self.eps), rows)
            for heads, weight in zip((q, k), self.head_norms())
        )
        meta.backend.write_kv(k, v, self.attn.k_cache, self.attn.v_cache, meta.slot_mapping)
        return q

    def forward(self, x: torch.Tensor, call: LayerCall) -> torch.Tensor:
        meta, scale = call.attn[self.attn.cache_group], call.rotation.query_scale
        q = self.write_cache(self.qkv_proj(x), call.rotation, meta)
        if scale is not None:
            q = q * scale[:, None, None].to(q.dtype)
        attended = self.attn.attend(q, meta)
        attended = call.needed(attended)
        if self.v_scale != 1.0:
            attended = attended * self.v_scale
        if self.g_proj is not None:
            attended = gated(attended, self.g_proj(call.needed(x)), self.gate_act)
        return self.o_proj(attended)

    def exchanges(self, num_tokens: int, num_needed: int) -> list[Exchange]:
        """Return the all-reduces of `forward`, in order."""
        return [((num_needed, self.o_proj.out_features), None)]


class PlainNormAttention(SelfAttention):
    """Normalises each head of q and k without weights, before it is rotated (Muse-Glimmer)."""

    def make_norms(self, spec: ModelSpec, kind: LayerSpec, prefix: str) -> None:
        self.q_norm = self.k_norm = None
        self.register_buffer("ones", torch.ones(kind.head_dim), persistent=False)

    def head_norms(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.ones, self.ones


class WholeNormAttention(SelfAttention):
    """Normalises q and k over all heads together, before they are split. May bound q, k and v."""

    def make_norms(self, spec: ModelSpec, kind: LayerSpec, prefix: str) -> None:
        self.clip = kind.clip_qkv
        heads, dim, view = self.qkv_proj.num_heads, kind.head_dim, rope_view(spec, kind)
        (q, k, _), group = self.qkv_proj.shards, tp()
        self.sizes = kind.num_heads * dim, kind.num_kv_heads * dim
        # ranks that hold the same KV head all add its squares
        self.copies = max(1, group.size // kind.num_kv_heads)
        self.group = group
        self.q_norm, self.k_norm = nn.Module(), nn.Module()
        for norm, name, start, length, size in (
            (self.q_norm, "q_norm", group.rank * heads * dim, q.length, self.sizes[0]),
            (self.k_norm, "k_norm", k.start - (q.full if k.prefix == q.prefix else 0), k.length, self.sizes[1]),
        ):
            part = Part(f"{prefix}.{name}.weight", (size,), ((0, start, length),), (), view)
            norm.weight = empty_parameter(length, parts=[part], dtype=torch.float32)

    def head_norms(self) -> tuple[None, None]:
        return None, None

    def write_cache(self, qkv: torch.Tensor, rotation: Rotation, meta: AttentionMetadata) -> torch.Tensor:
        q, k = self.qkv_proj.shards[0].length, self.qkv_proj.shards[1].length
        qk = qkv[:, : q + k].float()
        squares = torch.stack([half.square().sum(-1) for half in qk.split([q, k], -1)], -1)  # [T, 2]
        squares = self.group.all_reduce(squares) if self.group.size > 1 else squares
        # the sizes stay on the host: a tensor of them would be copied to the device in every layer
        q_scale = rsqrt(squares[:, :1] / self.sizes[0] + self.eps)
        k_scale = rsqrt(squares[:, 1:] / (self.sizes[1] * self.copies) + self.eps)
        qkv[:, :q] = qk[:, :q] * q_scale * self.q_norm.weight
        qkv[:, q : q + k] = qk[:, q:] * k_scale * self.k_norm.weight
        if self.clip is not None:
            qkv.clamp_(-self.clip, self.clip)
        return super().write_cache(qkv, rotation, meta)

    def exchanges(self, num_tokens: int, num_needed: int) -> list[Exchange]:
        return [((num_tokens, 2), torch.float32), *super().exchanges(num_tokens, num_needed)]


class LayerNormAttention(SelfAttention):
    """Normalises each head of q and k by a layer norm with weights of its own (Cohere)."""

    centred: ClassVar = True  # whether the mean is subtracted

    def make_norms(self, spec: ModelSpec, kind: LayerSpec, prefix: str) -> None:
        heads, view, group = self.qkv_proj, rope_view(spec, kind), tp()
        first_kv_head = group.rank * kind.num_kv_heads // group.size
        self.q_norm, self.k_norm = nn.Module(), nn.Module()
        for norm, name, first, number, total in (
            (self.q_norm, "q_norm", group.rank * heads.num_heads, heads.num_heads, kind.num_heads),
            (self.k_norm, "k_norm", first_kv_head, heads.num_kv_heads, kind.num_kv_heads),
        ):
            part = Part(f"{prefix}.{name}.weight", (total, kind.head_dim), ((0, first, number),), (), columns(view))
            norm.weight = empty_parameter(number, kind.head_dim, parts=[part], dtype=torch.float32)
            norm.weight.dummy_mean = 1.0

    def head_norms(self) -> tuple[None, None]:
        return None, None

    def write_cache(self, qkv: torch.Tensor, rotation: Rotation, meta: AttentionMetadata) -> torch.Tensor:
        q, k, _ = self.split(qkv)
        for heads, norm in ((q, self.q_norm), (k, self.k_norm)):
            wide = heads.float()
            if self.centred:
                wide = wide - wide.mean(-1, keepdim=True)
            heads.copy_(norm.weight * wide * rsqrt(wide.square().mean(-1, keepdim=True) + self.eps))
        return super().write_cache(qkv, rotation, meta)


class OwnNormAttention(LayerNormAttention):
    """Normalises each head of q and k by an RMS norm with weights of its own (PLaMo 2)."""

    centred: ClassVar = False


class LateNormAttention(SelfAttention):
    """Normalises each head of q and k after it is rotated."""

    def write_cache(self, qkv: torch.Tensor, rotation: Rotation, meta: AttentionMetadata) -> torch.Tensor:
        q, k, v = self.split(qkv)
        rows = rotation.cos_sin[rotation.positions]
        q, k = (
            rms_norm(apply_rotary(heads, rows), weight, self.eps) for heads, weight in zip((q, k), self.head_norms())
        )
        meta.backend.write_kv(k, v, self.attn.k_cache, self.attn.v_cache, meta.slot_mapping)
        return q


class LatePlainNormAttention(LateNormAttention):
    """Normalises each head of q and k after it is rotated, without weights (Llama 4)."""

    def make_norms(self, spec: ModelSpec, kind: LayerSpec, prefix: str) -> None:
        self.q_norm = self.k_norm = None


class ValueNormAttention(SelfAttention):
    """Attention that also normalises each head of v, without a weight (Gemma 3n and 4)."""

    def write_cache(self, qkv: torch.Tensor, rotation: Rotation, meta: AttentionMetadata) -> torch.Tensor:
        v = self.split(qkv)[2]
        v.copy_(rms_norm(v, None, self.eps))
        return super().write_cache(qkv, rotation, meta)


class SharedCacheAttention(nn.Module):
    """Reads the keys and values of another layer and has only queries of its own. The calls are those of
    `SelfAttention`.
    """

    def __init__(self, spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__()
        kind, group = spec.layers[layer], tp()
        width, heads = kind.num_heads * kind.head_dim, split_size("num_attention_heads", kind.num_heads, group)
        mine = heads * kind.head_dim
        shard = Shard(f"{prefix}.q_proj", width, group.rank * mine, mine, view=rope_view(spec, kind))
        method = weights.linear(f"{prefix}.q_proj")
        self.q_proj = ColumnParallelLinear(spec.hidden_size, [shard], spec.attention_bias, method)
        self.o_proj = out_projection(spec, kind, prefix, weights)
        self.q_norm = NORMS[spec.norm](kind.head_dim, spec.norm_eps)
        self.q_norm.weight.view_of_tensor = chain(self.q_norm.view, rope_view(spec, kind))
        kv_heads, _ = split_kv_heads(kind.num_kv_heads, group)
        self.attn = Attention(
            heads, kv_heads, kind.head_dim, layer, kind.window, kind.scale, kind.soft_cap, kv_from=kind.kv_from
        )

    def forward(self, x: torch.Tensor, call: LayerCall) -> torch.Tensor:
        q = self.q_proj(x).unflatten(-1, (self.attn.num_heads, self.attn.head_dim))
        q = rms_norm(q, self.q_norm.weight, self.q_norm.eps)
        q = apply_rotary(q, call.rotation.cos_sin[call.rotation.positions])
        attended = self.attn.attend(q, call.attn[self.attn.cache_group])
        return self.o_proj(call.needed(attended))

    def exchanges(self, num_tokens: int, num_needed: int) -> list[Exchange]:
        """Return the all-reduces of `forward`, in order."""
        return [((num_needed, self.o_proj.out_features), None)]


class GatedAttention(SelfAttention):
    """Multiplies the attended values by the sigmoid of a gate, which q_proj holds after the queries of each head
    (Qwen3-Next). Normalises each head of q and k.
    """

    native_twin: ClassVar = "gated_attention"

    def __init__(self, spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(spec, layer, prefix, weights)
        kind, qkv, group = spec.layers[layer], self.qkv_proj, tp()
        q, k, v = qkv.shards
        view = HeadHalves(kind.head_dim, rope_view(spec, kind))
        both = replace(q, full=2 * q.full, start=2 * group.rank * q.length, length=2 * q.length, view=view)
        shards = [both, replace(k, target=k.target + q.length), replace(v, target=v.target + q.length)]
        method = weights.linear(f"{prefix}.qkv_proj")
        self.qkv_proj = ColumnParallelLinear(spec.hidden_size, shards, spec.attention_bias, method)
        self.width = q.length  # for the queries of this rank
        self.sigmoid_gate = TORCH.sigmoid_gate

    def use(self, ops: Ops) -> None:
        super().use(ops)
        self.sigmoid_gate = ops.sigmoid_gate

    def forward(self, x: torch.Tensor, call: LayerCall) -> torch.Tensor:
        meta = call.attn[self.attn.cache_group]
        q, gate, kv = self.qkv_proj(x).tensor_split([self.width, 2 * self.width], -1)
        attended = self.attn.attend(self.write_cache(torch.cat([q, kv], -1), call.rotation, meta), meta)
        return self.o_proj(self.sigmoid_gate(call.needed(attended), call.needed(gate)))


# by `LayerSpec.qk_norm`
QK_NORMS: dict[str | None, type[SelfAttention]] = {
    None: SelfAttention,
    "head": SelfAttention,
    "head_plain": PlainNormAttention,
    "gated_head": GatedAttention,
    "whole": WholeNormAttention,
    "layer": LayerNormAttention,
    "own": OwnNormAttention,
    "late": LateNormAttention,
    "late_plain": LatePlainNormAttention,
}


def self_attention(spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat) -> nn.Module:
    """Return the attention of layer `layer`, whose tensors are at `prefix`."""
    kind = spec.layers[layer]
    if kind.kv_from is not None:
        return SharedCacheAttention(spec, layer, prefix, weights)
    return (ValueNormAttention if kind.v_norm else QK_NORMS[kind.qk_norm])(spec, layer, prefix, weights)


def qkv_projection(
    spec: ModelSpec, kind: LayerSpec, prefix: str, weights: WeightFormat, width: int | None = None
) -> QKVParallelLinear:
    """Return the projections of a layer to q, k and v, whose tensors are at `prefix`, of vectors of `width`."""
    return QKVParallelLinear(
        width or spec.hidden_size,
        kind.head_dim,
        kind.num_heads,
        kind.num_kv_heads,
        spec.attention_bias,
        prefix,
        weights.linear(f"{prefix}.qkv_proj"),
        "qkv_proj" in spec.fused,
        rope_view(spec, kind),
        kind.v_head_dim,
        "k_proj" if kind.key_is_value else "v_proj",
        kind.qkv_chunks,
    )


def out_projection(spec: ModelSpec, kind: LayerSpec, prefix: str, weights: WeightFormat) -> RowParallelLinear:
    """Return the projection of the attended values of all heads."""
    return RowParallelLinear(
        kind.num_heads * kind.v_head_dim,
        spec.hidden_size,
        spec.attention_out_bias,
        f"{prefix}.o_proj",
        "num_attention_heads * head_dim",
        weights.linear(f"{prefix}.o_proj"),
    )


def gate_projection(
    spec: ModelSpec, kind: LayerSpec, prefix: str, weights: WeightFormat
) -> ColumnParallelLinear | None:
    """Return the projection to the logits of the gates of this rank's heads, None without."""
    if not (kind.head_gate or kind.entry_gate):
        return None
    group, each = tp(), 1 if kind.head_gate else kind.v_head_dim
    mine = kind.num_heads // group.size * each
    shard = Shard(f"{prefix}.g_proj", kind.num_heads * each, group.rank * mine, mine)
    return ColumnParallelLinear(spec.hidden_size, [shard], False, weights.linear(shard.prefix))


# by `LayerSpec.gate_act`
GATE_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"sigmoid": sigmoid, "softplus": F.softplus}


def gated(attended: torch.Tensor, logits: torch.Tensor, activation: str = "sigmoid") -> torch.Tensor:
    """Return attended `[T, heads * D]` times the activation of logits `[T, heads]` or `[T, heads * D]`."""
    gate = GATE_ACTIVATIONS[activation](logits.float()).to(attended.dtype)
    if gate.shape == attended.shape:
        return attended * gate
    return (attended.unflatten(-1, (gate.shape[1], -1)) * gate[..., None]).flatten(1)


def rope_view(spec: ModelSpec, kind: LayerSpec) -> View | None:
    """Return how the rows of a head of q and k are rearranged at load."""
    if kind.rope is None:
        return None
    rope = spec.ropes[kind.rope]
    return rotary_rows(kind.head_dim, rope.rotary_dim, rope.interleaved)


def attention_sinks(num_heads: int, mine: int, prefix: str) -> nn.Parameter:
    """Return the sinks of this rank's heads, one score each."""
    sinks = empty_parameter(mine, parts=[Part(f"{prefix}.sinks", (num_heads,), ((0, tp().rank * mine, mine),))])
    sinks.dummy_mean = 0.0
    return sinks
