"""Products of many rows with quantized weights: one kernel dequantizes a piece of the weight, and the library's product
for 16-bit numbers multiplies it.

A piece stays in the L2 cache between the two. `docs/gpu.md` has the number of rows from which this is faster.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from quire.worker.cuda.kernels.triton_quantized import (
    StoredGroups,
    block_constants,
    block_table,
    decode_scales,
    load_blocks,
    load_groups,
)
from quire.worker.cuda.kernels.triton_tiles import StoredTiles, numbers, tile_rows

MANY_ROWS = 512  # above which a weight is dequantized once
_PIECE = 1 << 24  # weights dequantized at once: 32 MiB, which an L2 cache of 50 MB holds
_ROWS, _DEPTH = 32, 128  # for a program
_NO_BLOCKS = {"KIND": 0, "CODES_AT": 0, "VALUES": 1, "BYTES": 1}

Dequantize = Callable[[int, torch.Tensor], None]  # (first row, where to write rows of the weight)


def multiply_dequantized(
    x: torch.Tensor, num_columns: int, dequantize: Dequantize, out: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """Write x `[T, k]` times the transposed weight `[num_columns, k]`, plus bias, to `out` `[T, num_columns]`."""
    step = max(64, _PIECE // x.shape[1] // 64 * 64)
    weight = x.new_empty(min(step, num_columns), x.shape[1])
    for first in range(0, num_columns, step):
        last = min(first + step, num_columns)
        piece = weight[: last - first]
        dequantize(first, piece)
        torch.mm(x, piece.T, out=out[:, first:last])
    if bias is not None:
        out += bias


def dequantize_groups(weight: StoredGroups, first: int, out: torch.Tensor) -> None:
    """Write the rows from `first` on, as many as `out` `[rows, k]` has, of a weight in groups."""
    values, scales, zeros, table, row_scales = weight.tensors
    _launch(
        out, values, scales, zeros, table, row_scales, weight.values.stride(0), weight.scales.stride(0), 0, first,
        weight.constants | _NO_BLOCKS,
    )  # fmt: skip


def dequantize_tiles(weight: StoredTiles, first: int, out: torch.Tensor) -> None:
    """Do the same for a weight in tiles."""
    groups = weight.stored_groups()
    values, scales, zeros, _, row_scales = groups.tensors
    strides = weight.values.shape[1], *weight.scales.stride()
    constants = groups.constants | _NO_BLOCKS | {"FORM": f"{weight.form} tiles"}
    _launch(out, values, scales, zeros, None, row_scales, *strides, first, constants, weight.half)


def dequantize_blocks(blocks: torch.Tensor, kind: str, first: int, out: torch.Tensor) -> None:
    """Do the same for a weight in blocks of the type `kind` of a GGUF file."""
    constants = block_constants(kind) | {"FORM": "blocks", "SCALES": "", "GROUP": 1}
    _launch(out, blocks, None, None, block_table(kind, out.device), None, blocks.stride(0), 0, 0, first, constants)


def _launch(
    out, values, scales, zeros, table, row_scales, row_stride, scales_stride, group_stride, first, constants, half=64
):  # fmt: skip
    n, k = out.shape
    _dequantize_kernel[(triton.cdiv(k, _DEPTH), triton.cdiv(n, _ROWS))](
        values, scales, zeros, table, row_scales, out, first, n, k, triton.cdiv(k, 2), row_stride, scales_stride,
        group_stride, out.stride(0), **constants, HALF=half, ROWS=_ROWS, DEPTH=_DEPTH, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["first", "num_rows"])
def _dequantize_kernel(
    values, scales, zeros, table, row_scales, out, first, num_rows, size, size_pairs, row_stride, scales_stride,
    group_stride, out_stride, FORM: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr,
    CODES_AT: tl.constexpr, VALUES: tl.constexpr, BYTES: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    tile, row = tl.program_id(0), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside, source = row < num_rows, (first + row).to(tl.int64)
    to = out + row.to(tl.int64)[:, None] * out_stride
    factor = tl.full((ROWS,), 1.0, tl.float32)
    if row_scales is not None:
        factor = tl.load(row_scales + source, mask=inside, other=0.0)
    TILES: tl.constexpr = "e2m1" if FORM == "e2m1 tiles" else "int4"
    if FORM == "int4 tiles" or FORM == "e2m1 tiles":
        for part in tl.static_range(DEPTH // (2 * HALF)):
            index, entries = tile * (DEPTH // (2 * HALF)) + part, tl.arange(0, HALF)
            at = tile_rows(source, row_stride, HALF) + index * (16 * HALF)
            mask = inside[:, None] & (index < row_stride)
            stored = tl.load(values + at[:, None] + entries[None, :], mask=mask, other=0)
            for high in tl.static_range(2):
                column = (2 * index + high) * HALF
                group = source * scales_stride + column // GROUP * group_stride
                exists = inside & (index < row_stride)
                codes = stored >> 4 if high == 1 else stored & 15
                weight = numbers(codes, zeros, group, exists, TILES, tl.float32)
                weight *= (decode_scales(scales, group, exists, SCALES) * factor)[:, None]
                tl.store(to + (column + entries)[None, :], weight.to(out.dtype.element_ty), mask=mask)
    else:
        depth = tile * DEPTH + tl.arange(0, DEPTH)
        mask = (depth < size)[:, None] & inside[None, :]
        if FORM == "blocks":
            at = values + (source * row_stride)[None, :] + (depth // VALUES * BYTES)[:, None]
            weight = load_blocks(at, (depth % VALUES)[:, None], table, mask, KIND, CODES_AT)
        else:
            weight = load_groups(
                values, scales, zeros, table, source * row_stride, source * scales_stride, tile, size, size_pairs,
                inside, FORM, SCALES, GROUP, ROWS, DEPTH,
            )  # fmt: skip
        weight *= factor[None, :]
        tl.store(to + depth[None, :], tl.trans(weight).to(out.dtype.element_ty), mask=tl.trans(mask))
