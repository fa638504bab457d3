"""Triton kernels of a decoder layer, except attention and matrix products; one launch each.

All arithmetic is in float32 and rounded once at the end. The plain torch twins are the functions of `worker/layers`;
tests compare the two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.worker.attention.scaled import KVCache, ScaledCache, as_bytes
from quire.worker.cuda.kernels.triton_fp8 import empty_rounded, store_rounded
from quire.worker.cuda.kernels.triton_scaled import bytes_of, factors, kind_of
from quire.worker.layers.rounding import LEAST_ROWS, Rounded, Rounding, attach


@triton.jit
def _add_rms_norm_kernel(
    x, residual, weight, out, values, scales, eps, x_stride, residual_stride, out_stride, SIZE: tl.constexpr,
    BLOCK: tl.constexpr, ADD: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    value = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        at = residual + row * residual_stride + columns
        value += tl.load(at, mask=mask, other=0.0).to(tl.float32)
        tl.store(at, value.to(residual.dtype.element_ty), mask=mask)
        # normalise the rounded sum, which the next layer adds to
        value = value.to(residual.dtype.element_ty).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
    result = value * scale * tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    result = result.to(out.dtype.element_ty)
    tl.store(out + row * out_stride + columns, result, mask=mask)
    if GROUP > 0:
        store_rounded(result.to(tl.float32), values, scales, row, 0, SIZE, BLOCK, GROUP)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, rounding: Rounding | None = None) -> torch.Tensor:
    """Return RMSNorm (arXiv:1910.07467) over the last dimension of x `[T, H]`, with its rounding attached if given."""
    return _launch_norm(x, None, weight, eps, rounding)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, rounding: Rounding | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add x to residual in place. Returns (RMSNorm of the sum, residual). x and residual are `[T, H]`."""
    return _launch_norm(x, residual, weight, eps, rounding), residual


def _launch_norm(x, residual, weight, eps, rounding) -> torch.Tensor:
    out, size = torch.empty_like(x), x.shape[-1]
    block, other = triton.next_power_of_2(size), x if residual is None else residual
    rounded = _room_for(out, rounding)
    _add_rms_norm_kernel[(x.shape[0],)](
        x, other, weight, out, *_tensors(rounded), eps, x.stride(0), other.stride(0), out.stride(0),
        SIZE=size, BLOCK=block, ADD=residual is not None, GROUP=_group(rounding, rounded, block),
        num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip
    return out if rounded is None else attach(out, rounded)


def _room_for(out: torch.Tensor, rounding: Rounding | None) -> Rounded | None:
    return None if rounding is None or len(out) < LEAST_ROWS else empty_rounded(out, rounding)


def _tensors(rounded: Rounded | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return (None, None) if rounded is None else (rounded.values.view(torch.int8), rounded.scales)


def _group(rounding: Rounding | None, rounded: Rounded | None, block: int) -> int:
    """Return columns that share a scale, in kernels; 0: nothing is rounded."""
    return 0 if rounded is None else rounding.group or block


@triton.jit
def _silu_and_mul_kernel(
    gate_up, out, values, scales, in_stride, out_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr
):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    gate = tl.load(gate_up + row * in_stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * in_stride + SIZE + columns, mask=mask, other=0.0).to(tl.float32)
    result = (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty)
    tl.store(out + row * out_stride + columns, result, mask=mask)
    if GROUP > 0:
        store_rounded(result.to(tl.float32), values, scales, row, block, SIZE, BLOCK, GROUP)


def silu_and_mul(gate_up: torch.Tensor, rounding: Rounding | None = None) -> torch.Tensor:
    """Return silu(gate) * up `[T, I]` for gate_up `[T, 2 * I]`, with its rounding attached if one is given."""
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_tokens, size)
    whole = triton.next_power_of_2(size)
    rounded = _room_for(out, rounding)
    block = whole if rounded is not None and rounding.group is None else min(1024, whole)
    _silu_and_mul_kernel[(num_tokens, triton.cdiv(size, block))](
        gate_up, out, *_tensors(rounded), gate_up.stride(0), out.stride(0), SIZE=size, BLOCK=block,
        GROUP=_group(rounding, rounded, block), num_warps=max(4, min(16, block // 512)),
    )  # fmt: skip
    return out if rounded is None else attach(out, rounded)


@triton.jit
def _store_in_8_bits(
    to, first, second, lanes, mask, scale_at, HEAD_DIM: tl.constexpr, KIND: tl.constexpr, CONSTANT: tl.constexpr
):
    """Store both halves of a head, whose masked lanes are 0, and their scale, or read a constant one."""
    a, b = first.to(tl.float32), second.to(tl.float32)
    if CONSTANT:
        inverse = tl.div_rn(1.0, tl.load(scale_at))
    else:
        largest = tl.maximum(tl.max(tl.abs(a), 0), tl.max(tl.abs(b), 0))
        # the sum is 0, or NaN if an entry is not finite, which a maximum may drop
        scale, inverse = factors(largest + tl.sum(a * 0.0 + b * 0.0, 0), KIND)
        tl.store(scale_at, scale)
    tl.store(to + lanes, bytes_of(a, inverse, KIND), mask=mask)
    tl.store(to + HEAD_DIM // 2 + lanes, bytes_of(b, inverse, KIND), mask=mask)


@triton.jit
def _qk_norm_rope_write_kernel(
    qkv, q_weight, k_weight, cos_sin, positions, k_cache, v_cache, slot_mapping, eps, token_stride, cos_sin_stride,
    k_page_stride, k_slot_stride, k_head_stride, v_page_stride, v_slot_stride, v_head_stride,
    k_scales, v_scales, ks_page_stride, ks_slot_stride, ks_head_stride, vs_page_stride, vs_slot_stride, vs_head_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    PAGE_SIZE: tl.constexpr, NORM: tl.constexpr, KIND: tl.constexpr, CONSTANT: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source = qkv + token * token_stride + head * HEAD_DIM
    lanes = tl.arange(0, HALF)
    mask = lanes < HEAD_DIM // 2
    first = tl.load(source + lanes, mask=mask, other=0.0)
    second = tl.load(source + HEAD_DIM // 2 + lanes, mask=mask, other=0.0)
    slot = tl.load(slot_mapping + token)
    page, offset = slot // PAGE_SIZE, slot % PAGE_SIZE
    if head >= NUM_HEADS + NUM_KV_HEADS:  # v: copied unchanged
        kv_head = head - NUM_HEADS - NUM_KV_HEADS
        at = v_cache + page * v_page_stride + offset * v_slot_stride + kv_head * v_head_stride
        if KIND > 0:
            scale_at = v_scales + page * vs_page_stride + offset * vs_slot_stride + kv_head * vs_head_stride
            _store_in_8_bits(at, first, second, lanes, mask, scale_at, HEAD_DIM, KIND, CONSTANT)
        else:
            tl.store(at + lanes, first, mask=mask)
            tl.store(at + HEAD_DIM // 2 + lanes, second, mask=mask)
    else:
        a, b = first.to(tl.float32), second.to(tl.float32)
        if NORM:
            weight = q_weight
            if head >= NUM_HEADS:
                weight = k_weight
            scale = tl.rsqrt((tl.sum(a * a, 0) + tl.sum(b * b, 0)) / HEAD_DIM + eps)
            a *= scale * tl.load(weight + lanes, mask=mask, other=0.0).to(tl.float32)
            b *= scale * tl.load(weight + HEAD_DIM // 2 + lanes, mask=mask, other=0.0).to(tl.float32)
        angle = cos_sin + tl.load(positions + token) * cos_sin_stride + lanes
        cos, sin = (
            tl.load(angle, mask=mask, other=0.0).to(tl.float32),
            tl.load(angle + HEAD_DIM // 2, mask=mask, other=0.0).to(tl.float32),
        )
        rotated_a, rotated_b = (a * cos - b * sin).to(first.dtype), (b * cos + a * sin).to(first.dtype)
        if head < NUM_HEADS:
            tl.store(source + lanes, rotated_a, mask=mask)
            tl.store(source + HEAD_DIM // 2 + lanes, rotated_b, mask=mask)
        else:
            kv_head = head - NUM_HEADS
            at = k_cache + page * k_page_stride + offset * k_slot_stride + kv_head * k_head_stride
            if KIND > 0:
                scale_at = k_scales + page * ks_page_stride + offset * ks_slot_stride + kv_head * ks_head_stride
                _store_in_8_bits(at, rotated_a, rotated_b, lanes, mask, scale_at, HEAD_DIM, KIND, CONSTANT)
            else:
                tl.store(at + lanes, rotated_a, mask=mask)
                tl.store(at + HEAD_DIM // 2 + lanes, rotated_b, mask=mask)


def qk_norm_rope_write(
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    k_cache: KVCache,
    v_cache: KVCache,
    slot_mapping: torch.Tensor,
    num_heads: int,
) -> torch.Tensor:
    """Apply per-head RMSNorm to q and k (if weights are given) and rotary embedding (rotate-half form,
    arXiv:2104.09864), and store k and v in their slots.

    qkv is `[T, (num_heads + 2 * num_kv_heads) * head_dim]`, its q part is overwritten; cos_sin `[max_positions,
    head_dim]` holds the cosines of the head_dim / 2 angles, then the sines; caches are `[num_blocks, block_size,
    num_kv_heads, head_dim]`, of qkv's type or in 8 bits. Returns q as a view `[T, num_heads, head_dim]`.
    """
    num_kv_heads, head_dim = k_cache.shape[2], k_cache.shape[3]
    k, v, scales, constant = k_cache, v_cache, [None, None, *[0] * 6], False
    if isinstance(k_cache, ScaledCache):
        k, v, constant = as_bytes(k_cache.values), as_bytes(v_cache.values), k_cache.constant
        scales = [k_cache.scales, v_cache.scales, *k_cache.scales.stride(), *v_cache.scales.stride()]
    _qk_norm_rope_write_kernel[(qkv.shape[0], num_heads + 2 * num_kv_heads)](
        qkv, q_weight, k_weight, cos_sin, positions, k, v, slot_mapping, eps,
        qkv.stride(0), cos_sin.stride(0), *k.stride()[:3], *v.stride()[:3], *scales,
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim,
        HALF=triton.next_power_of_2(head_dim // 2), PAGE_SIZE=k_cache.shape[1], NORM=q_weight is not None,
        KIND=kind_of(k_cache), CONSTANT=constant, num_warps=1,
    )  # fmt: skip
    return qkv[:, : num_heads * head_dim].view(-1, num_heads, head_dim)
