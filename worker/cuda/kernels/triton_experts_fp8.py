"""Grouped products of experts whose weights are e4m3 in blocks of 128 columns, on the tensor cores for 8-bit floats.

For steps that give each expert many rows; the inputs are rounded once per token, and the activation's results where
they are computed. The sums are those of `triton_fp8`: scaled and added in float32 after every 128 columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.worker.cuda.kernels.triton_experts import ACTIVATIONS, FEW_ROWS, Stack, activate, sum_by_token
from quire.worker.cuda.kernels.triton_fp8 import GROUP, round_rows
from quire.worker.cuda.kernels.triton_quantized import StoredGroups
from quire.worker.cuda.kernels.triton_routing import sort_by_expert
from quire.worker.cuda.kernels.triton_scaled import bytes_of, factors
from quire.worker.layers.rounding import Rounding, attached

ROUNDING = Rounding(GROUP)
_ROWS, _COLUMNS = 64, 128  # for a tile; its columns are one group of the activation's results


def fits(stack: Stack) -> bool:
    """Return whether these products can multiply such a stack."""
    return (
        isinstance(stack, StoredGroups)
        and stack.form == "e4m3"
        and stack.group == GROUP
        and stack.order is None
        and stack.zeros is None
        and stack.values.shape[2] % GROUP == 0
        and stack.scales.shape[2] == stack.values.shape[2] // GROUP
        and stack.scales.dtype.itemsize > 1
    )


def are_many(num_pairs: int, num_experts: int) -> bool:
    """Return whether experts have enough rows for the tensor cores, not the weights, to bound the products."""
    return num_pairs > FEW_ROWS * num_experts


def fused_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: StoredGroups,
    down: StoredGroups,
    activation: str,
    first: int = 0,
    weigh_inputs: bool = False,
) -> torch.Tensor:
    """Return `triton_experts.fused_experts` without biases, of stacks that fit."""
    (tokens, hidden), top_k = x.shape, ids.shape[1]
    num_experts, size = len(gate_up.values), gate_up.values.shape[1] // 2
    pairs, experts, num_tiles = sort_by_expert(ids, first, num_experts, _ROWS)
    weights, ids = weights.float().contiguous(), ids.contiguous()
    rounded = attached(x, ROUNDING) or round_rows(x, ROUNDING)
    between = torch.empty(tokens * top_k, size, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(tokens * top_k, size // GROUP, dtype=torch.float32, device=x.device)
    _rounded_gate_up_kernel[(num_tiles, triton.cdiv(size, _COLUMNS))](
        rounded.values, rounded.scales, gate_up.values, gate_up.scales, weights, pairs, experts,
        between.view(torch.int8), scales, tokens * top_k, num_tiles, *gate_up.values.stride()[:2],
        *gate_up.scales.stride()[:2], HIDDEN=hidden, SIZE=size, TOP_K=top_k, ACTIVATION=ACTIVATIONS[activation],
        WEIGH=weigh_inputs, ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=8, num_stages=3,
    )  # fmt: skip
    results = torch.empty(tokens * top_k, hidden, dtype=torch.float32, device=x.device)
    _rounded_down_kernel[(num_tiles, triton.cdiv(hidden, _COLUMNS))](
        between, scales, down.values, down.scales, pairs, experts, results, tokens * top_k, num_tiles,
        *down.values.stride()[:2], *down.scales.stride()[:2], HIDDEN=hidden, SIZE=size, ROWS=_ROWS, COLUMNS=_COLUMNS,
        num_warps=8, num_stages=3,
    )  # fmt: skip
    return sum_by_token(results, ids, weights, torch.empty_like(x), first, num_experts, not weigh_inputs)


@triton.jit
def _weight(values, scales, at, scale_at, k, inside):
    """Return (128 columns of rows of a weight `[128, columns]`, the rows' scales)."""
    entries = k * 128 + tl.arange(0, 128)
    tile = tl.load(values + at[None, :] + entries[:, None], mask=inside[None, :], other=0.0)
    return tile, tl.load(scales + scale_at + k, mask=inside, other=0.0).to(tl.float32)


# these arguments change from step to step; specializing on them would recompile the kernel
@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def _rounded_gate_up_kernel(
    x, x_scales, values, scales, weights, pairs, experts, out, out_scales, num_pairs, num_tiles, expert_stride,
    row_stride, scales_expert_stride, scales_row_stride, HIDDEN: tl.constexpr, SIZE: tl.constexpr,
    TOP_K: tl.constexpr, ACTIVATION: tl.constexpr, WEIGH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    if tile < tl.load(experts + num_tiles):
        pair = tl.load(pairs + tile * ROWS + tl.arange(0, ROWS))
        there = pair < num_pairs
        expert, token = tl.load(experts + tile).to(tl.int64), (pair // TOP_K).to(tl.int64)
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside, own = columns < SIZE, columns.to(tl.int64)
        at = expert * expert_stride + own * row_stride
        scale_at = expert * scales_expert_stride + own * scales_row_stride
        x_at = x + token[:, None] * HIDDEN + tl.arange(0, 128)[None, :]
        gate = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        up = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        factor = tl.full((ROWS,), 1.0, tl.float32)
        if WEIGH:
            factor = tl.load(weights + pair, mask=there, other=0.0)
        for k in range(0, HIDDEN // 128):
            a = tl.load(x_at + k * 128, mask=there[:, None], other=0.0)
            row_scale = tl.load(x_scales + token * (HIDDEN // 128) + k, mask=there, other=0.0) * factor
            b, scale = _weight(values, scales, at, scale_at, k, inside)
            gate += tl.dot(a, b) * row_scale[:, None] * scale[None, :]
            b, scale = _weight(
                values, scales, at + SIZE * row_stride, scale_at + SIZE * scales_row_stride, k, inside
            )  # fmt: skip
            up += tl.dot(a, b) * row_scale[:, None] * scale[None, :]
        result = tl.where(inside[None, :], activate(gate, up, ACTIVATION), 0.0)
        # the sum is 0, or NaN if an entry is not finite, which a maximum may drop
        scale, inverse = factors(tl.max(tl.abs(result), 1) + tl.sum(result * 0.0, 1), 2)
        wide = pair.to(tl.int64)
        to = out + wide[:, None] * SIZE + columns[None, :]
        tl.store(to, bytes_of(result, inverse[:, None], 2), mask=there[:, None] & inside[None, :])
        tl.store(out_scales + wide * (SIZE // 128) + tl.program_id(1), scale, mask=there)


# these arguments change from step to step; specializing on them would recompile the kernel
@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def _rounded_down_kernel(
    x, x_scales, values, scales, pairs, experts, out, num_pairs, num_tiles, expert_stride, row_stride,
    scales_expert_stride, scales_row_stride, HIDDEN: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    if tile < tl.load(experts + num_tiles):
        pair = tl.load(pairs + tile * ROWS + tl.arange(0, ROWS))
        there, wide = pair < num_pairs, pair.to(tl.int64)
        expert = tl.load(experts + tile).to(tl.int64)
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside, own = columns < HIDDEN, columns.to(tl.int64)
        at = expert * expert_stride + own * row_stride
        scale_at = expert * scales_expert_stride + own * scales_row_stride
        x_at = x + wide[:, None] * SIZE + tl.arange(0, 128)[None, :]
        sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for k in range(0, SIZE // 128):
            a = tl.load(x_at + k * 128, mask=there[:, None], other=0.0)
            row_scale = tl.load(x_scales + wide * (SIZE // 128) + k, mask=there, other=0.0)
            b, scale = _weight(values, scales, at, scale_at, k, inside)
            sums += tl.dot(a, b) * row_scale[:, None] * scale[None, :]
        to = out + wide[:, None] * HIDDEN + columns[None, :]
        tl.store(to, sums, mask=there[:, None] & inside[None, :])
