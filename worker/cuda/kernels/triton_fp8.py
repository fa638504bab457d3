"""Products on the tensor cores for 8-bit floats: rounding of inputs by row or group of columns, and weights of e4m3
with a scale per row and group of 128 columns (blocks of 128 x 128, as DeepSeek and Qwen3 have them).

The tensor cores sum 8-bit products with few bits; after every group the sums are scaled and added in float32. The torch
twin of the rounding is `layers.rounding.round_rows`, bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.worker.cuda.kernels.triton_scaled import bytes_of, factors
from quire.worker.cuda.kernels.triton_split import Tiles, combined, part_of, splits_of
from quire.worker.layers.rounding import Rounded, Rounding

GROUP = 128  # columns of a block
_SOME_ROWS = 64


def empty_rounded(x: torch.Tensor, rounding: Rounding) -> Rounded:
    """Allocate the result of rounding x `[T, k]`."""
    values = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    num = 1 if rounding.group is None else x.shape[1] // rounding.group
    return Rounded(values, torch.empty(len(x), num, dtype=torch.float32, device=x.device), rounding)


def round_rows(x: torch.Tensor, rounding: Rounding) -> Rounded:
    """Do `rounding.round_rows` in one launch."""
    rounded, size = empty_rounded(x, rounding), x.shape[1]
    group = rounding.group or triton.next_power_of_2(size)
    block = max(group, min(1024, triton.next_power_of_2(size)))
    _round_kernel[(len(x), triton.cdiv(size, block))](
        x, rounded.values.view(torch.int8), rounded.scales, x.stride(0), SIZE=size, BLOCK=block, GROUP=group,
        num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip
    return rounded


@triton.jit
def store_rounded(value, values, scales, row, block, SIZE: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """Round entries `block` * BLOCK to (`block` + 1) * BLOCK of a row, float32 and 0 from SIZE on, and store them in
    rows of SIZE entries.
    """
    groups = tl.reshape(value, (BLOCK // GROUP, GROUP))
    # the sum is 0, or NaN if an entry is not finite, which a maximum may drop
    scale, inverse = factors(tl.max(tl.abs(groups), 1) + tl.sum(groups * 0.0, 1), 2)
    first = block * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    columns = first[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    tl.store(values + row * SIZE + columns, bytes_of(groups, inverse[:, None], 2), mask=columns < SIZE)
    tl.store(scales + row * tl.cdiv(SIZE, GROUP) + first, scale, mask=first * GROUP < SIZE)


@triton.jit
def _round_kernel(x, values, scales, x_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + row * x_stride + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
    store_rounded(value, values, scales, row, block, SIZE, BLOCK, GROUP)


def multiply_rounded(
    x: Rounded, values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype,
    num_splits: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return x `[T, k]`, rounded by groups of 128, times the transposed weight of e4m3 values `[n, k]` and scales `[n,
    k / 128]`, plus bias: `[T, n]` of `dtype`. k is a multiple of 128.
    """
    num_rows, (n, k) = len(x.values), values.shape
    few = num_rows <= _SOME_ROWS
    rows, columns, warps, stages = (64, 64, 4, 4) if few else (128, 64, 8, 4)
    out = torch.empty(num_rows, n, dtype=dtype, device=values.device)
    grid = triton.cdiv(n, columns), triton.cdiv(num_rows, rows)
    num_splits = 1 if num_splits is None and not few else num_splits
    tiles = Tiles(grid[0] * grid[1], k // GROUP, columns * GROUP, stages - 1, rows * columns, num_rows * columns)
    splits = splits_of(tiles, values.device, num_splits)
    _rounded_kernel[(*grid, splits.num)](
        x.values, x.scales, values, scales, bias, out, splits.partial, splits.counters, num_rows, n, k,
        values.stride(0), *scales.stride(), SPLITS=splits.num, ROWS=rows, COLUMNS=columns, num_warps=warps,
        num_stages=stages,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _rounded_kernel(
    x, x_scales, values, scales, bias, out, partial, counters, num_rows, num_columns, size, stride, scales_stride,
    group_stride, SPLITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    rows, columns = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    there, inside = rows < num_rows, columns < num_columns
    num_groups, wide_rows, wide_columns = size // 128, rows.to(tl.int64), columns.to(tl.int64)
    entries = tl.arange(0, 128)
    x_at = x + wide_rows[:, None] * size + entries[None, :]
    at = values + wide_columns[None, :] * stride + entries[:, None]
    sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    first, last = part_of(num_groups, SPLITS)
    for group in range(first, last):
        a = tl.load(x_at + group * 128, mask=there[:, None], other=0.0)
        b = tl.load(at + group * 128, mask=inside[None, :], other=0.0)
        row_scale = tl.load(x_scales + wide_rows * num_groups + group, mask=there, other=0.0)
        # a vector also where a block shares its scale: Triton's pipeliner may race on scalars
        scale = tl.load(scales + wide_columns * scales_stride + group * group_stride, mask=inside, other=0.0)
        sums += tl.dot(a, b) * row_scale[:, None] * scale.to(tl.float32)[None, :]
    sums, is_last = combined(sums, there[:, None], partial, counters, SPLITS, ROWS, COLUMNS)
    if bias is not None:
        sums += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    to = out + wide_rows[:, None] * num_columns + columns[None, :]
    tl.store(to, sums.to(out.dtype.element_ty), mask=(there & is_last)[:, None] & inside[None, :])
