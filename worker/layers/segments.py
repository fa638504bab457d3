"""A decoder's layers on the native CPU kernels: one call between the attention of one layer and that of the next.

The same kernels in the same order as when the layers are called one by one, which is the twin. Attention stays with the step's backend. A layer is anything with
the parts of `models/decoder.py`'s `DecoderLayer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref

import torch
from torch import nn

from worker import huge_pages
from worker.attention.base import AttentionMetadata
from worker.kernels.cpu_ops import qkv_args
from worker.kernels.native import KERNELS, LinearArgs, SegmentArgs
from worker.layers.linear import Linear
from worker.layers.norm import RMSNorm
from worker.layers.packed import PackedMethod
from worker.layers.quant import NativeQuantMethod


class Segments:
    """Made from layers whose weights are packed and whose caches are bound; see `of`. Holds addresses: to be made anew when either changes (`fits`)."""

    def __init__(self, layers: Sequence[nn.Module], linears: list[list[LinearArgs]], final_norm: RMSNorm, cos_sin: torch.Tensor):
        first = layers[0].self_attn
        self.attentions = [layer.self_attn.attn for layer in layers]
        self.k_cache = first.attn.k_cache
        self.num_heads, self.head_dim, self.qkv_size = first.attn.num_heads, first.attn.head_dim, linears[0][0].n
        self.calls = [byref(_segment(before, after, final_norm, cos_sin)) for before, after in
                      zip([None, *zip(layers, linears)], [*zip(layers, linears), None])]  # fmt: skip
        self.workspace = huge_pages.zeros(KERNELS.lib.quire_segment_workspace(final_norm.weight.shape[0], linears[0][3].k), dtype=torch.bfloat16)

    @classmethod
    def of(cls, layers: Sequence[nn.Module], final_norm: RMSNorm, cos_sin: torch.Tensor) -> Segments | None:
        """None where a layer is not what the native code computes: another kind of weight, or not on this rank alone."""
        linears = [[_args(linear) for linear in (layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj)] for layer in layers]
        if any(args is None for layer in linears for args in layer) or layers[0].self_attn.o_proj.group.size > 1 or layers[0].self_attn.attn.k_cache.dtype != torch.bfloat16:
            return None
        return cls(layers, linears, final_norm, cos_sin)

    def fits(self, layer: nn.Module) -> bool:
        """Whether `layer`, the first, still has the cache that it had."""
        return layer.self_attn.attn.k_cache is self.k_cache

    def run(self, x: torch.Tensor, positions: torch.Tensor, attn: AttentionMetadata) -> torch.Tensor:
        """Embedded tokens `[T, H]` bfloat16, which are overwritten, -> the normed result of the last layer."""
        assert positions.dtype == attn.slot_mapping.dtype == torch.int64
        qkv, run = x.new_empty(len(x), self.qkv_size), KERNELS.lib.quire_run_segment
        q = qkv[:, : self.num_heads * self.head_dim].view(-1, self.num_heads, self.head_dim)
        rest = positions.data_ptr(), attn.slot_mapping.data_ptr(), len(x), self.workspace.data_ptr()
        residual, out = x.data_ptr(), qkv.data_ptr()
        run(self.calls[0], None, residual, out, *rest)
        for attention, call in zip(self.attentions[:-1], self.calls[1:]):
            attended = attention.attend(q, attn).contiguous()
            run(call, attended.data_ptr(), residual, out, *rest)
        attended, result = self.attentions[-1].attend(q, attn).contiguous(), torch.empty_like(x)
        run(self.calls[-1], attended.data_ptr(), residual, result.data_ptr(), *rest)
        return result


def _args(linear: Linear) -> LinearArgs | None:
    return linear.method.linear.args() if isinstance(linear.method, (PackedMethod, NativeQuantMethod)) else None


def _segment(before: tuple[nn.Module, list[LinearArgs]] | None, after: tuple[nn.Module, list[LinearArgs]] | None, final_norm: RMSNorm, cos_sin: torch.Tensor) -> SegmentArgs:
    segment = SegmentArgs(hidden=final_norm.weight.shape[0], eps=final_norm.eps)
    if before:
        layer, (_, segment.o_proj, segment.gate_up, segment.down) = before
        segment.mlp_norm = layer.post_attention_layernorm.weight.data_ptr()
    segment.norm = (after[0].input_layernorm if after else final_norm).weight.data_ptr()
    if after:
        layer, (segment.qkv, *_) = after
        attention = layer.self_attn
        segment.cache = qkv_args(*attention.head_norms(), attention.eps, cos_sin, attention.attn.k_cache, attention.attn.v_cache, attention.attn.num_heads, segment.qkv.n)
    return segment
