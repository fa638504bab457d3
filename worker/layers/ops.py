"""The operations between the matrix products, as a namespace of functions. This module is the one in plain torch, which runs anywhere; `kernels/cpu_ops.py`
and `kernels/triton_ops.py` have the same functions. Layers start with the plain ones and change over when told to: `module.use(ops)`.
"""

from __future__ import annotations

import sys
from types import ModuleType

import torch

from quire.worker.cpu.native import KERNELS
from quire.worker.cuda.triton_ready import triton_works
from quire.worker.layers.activation import silu_and_mul
from quire.worker.layers.norm import add_rms_norm, rms_norm
from quire.worker.layers.rotary import apply_rotary

__all__ = ["add_rms_norm", "fastest_ops", "qk_norm_rope_write", "rms_norm", "silu_and_mul"]


def qk_norm_rope_write(qkv: torch.Tensor, q_weight: torch.Tensor | None, k_weight: torch.Tensor | None, eps: float, cos_sin: torch.Tensor, positions: torch.Tensor,
                       k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Normalise every head of q and k (if weights are given), turn them by their positions, and store k and v into their slots.

    qkv is `[T, (num_heads + 2 * num_kv_heads) * head_dim]` and may be overwritten; cos_sin is `RotaryEmbedding.cos_sin_cache`; caches are
    `[num_blocks, block_size, num_kv_heads, head_dim]`. Returns q `[T, num_heads, head_dim]`.
    """
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    q, k, v = qkv.view(-1, num_heads + 2 * num_kv_heads, head_dim).split([num_heads, num_kv_heads, num_kv_heads], 1)
    if q_weight is not None:
        q, k = rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)
    rows = cos_sin[positions]
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    k_cache[block, offset], v_cache[block, offset] = apply_rotary(k, rows), v
    return apply_rotary(q, rows)


def fastest_ops(device: torch.device) -> ModuleType:
    """The best namespace that works on `device` now. On CPU that may change once the native kernels are built (`kernels/native.py`)."""
    if device.type == "cuda" and triton_works(device):
        from quire.worker.cuda import triton_ops

        return triton_ops
    if KERNELS.serve(device):
        from quire.worker.cpu import ops as cpu_ops

        return cpu_ops
    return sys.modules[__name__]
