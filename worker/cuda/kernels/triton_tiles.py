"""Products with weights of 4 bits that are stored in the order in which the kernel reads them.

A tile is 16 rows of 2 * `half` columns: contiguous, of which a thread loads 16 bytes at once. A byte holds column i of
its row in the low half and column i + `half` in the high one, so that the codes of both halves are matrices without a
shuffle of neighbours, and stay in the registers from which the tensor cores read them. Weights are the left factor for
that reason: a warp group multiplies them from registers, and the inputs from shared memory. Scales multiply the sums of
a group, not every weight; codes and zero points are exact in 16 bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.worker.cuda.kernels.triton_quantized import SOME_ROWS, StoredGroups, decode_scales
from quire.worker.cuda.kernels.triton_split import Tiles, combined, part_of, splits_of

HEIGHT = 16  # rows of a tile
_COLUMNS = 64  # outputs of a program: a warp group's product
_STAGES = 4


@dataclass(frozen=True, slots=True)
class StoredTiles:
    """A weight `[n, k]` in groups, as in `StoredGroups` with 4 bits, in tiles."""

    values: torch.Tensor  # uint8 [n / 16, k / (2 * half), 16, half]
    scales: torch.Tensor  # [n, groups], stored group by group
    zeros: torch.Tensor | None  # like scales
    group: int
    form: str  # int4 or e2m1
    row_scales: torch.Tensor | None = None

    @property
    def half(self) -> int:
        return self.values.shape[3]

    @property
    def shape(self) -> tuple[int, int]:
        tall, wide, height, half = self.values.shape
        return tall * height, wide * 2 * half

    def stored_groups(self) -> StoredGroups:
        """Return the scales and zero points with the constants of their type."""
        return StoredGroups(self.values, self.scales, self.zeros, 4, self.group, None, self.row_scales)


def half_of(weight: StoredGroups) -> int | None:
    """Return columns of half a tile for this weight, or None if it cannot be stored in tiles."""
    n, k = len(weight.values), 2 * weight.values.shape[-1]
    half = 32 if weight.group == 32 else 64
    whole = weight.group in (32, 64, k) or weight.group % 128 == 0
    fits = n % HEIGHT == 0 and k % (2 * half) == 0 and whole
    return half if weight.form in ("int4", "e2m1") and weight.values.dim() == 2 and fits else None


def in_tiles(values: torch.Tensor, half: int) -> torch.Tensor:
    """Return pairs of neighbouring columns per byte, uint8 `[n, k / 2]`, in tiles."""
    codes = torch.stack([values & 15, values >> 4], -1).view(len(values) // HEIGHT, HEIGHT, -1, 2, half)
    return (codes[:, :, :, 0] | codes[:, :, :, 1] << 4).transpose(1, 2).contiguous()


def rows_of(tiles: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return rows `ids` `[T]` of a weight in tiles, as pairs of neighbouring columns per byte `[T, k / 2]`."""
    stored = tiles[ids // HEIGHT, :, ids % HEIGHT]
    codes = torch.stack([stored & 15, stored >> 4], 2).flatten(1)
    return codes[:, ::2] | codes[:, 1::2] << 4


def multiply_tiles(
    x: torch.Tensor,
    weight: StoredTiles,
    bias: torch.Tensor | None = None,
    num_splits: int | None = None,
    fixed_order: bool = False,
) -> torch.Tensor:
    """Return `multiply_groups` with a weight in tiles."""
    (n, _), scales, groups = weight.shape, weight.scales, weight.stored_groups()
    out = x.new_empty(len(x), n)
    rows = 64 if fixed_order or len(x) > 32 else 16 if len(x) <= 16 else 32
    grid = triton.cdiv(n, _COLUMNS), triton.cdiv(len(x), rows)
    num_splits = 1 if fixed_order or (num_splits is None and len(x) > SOME_ROWS) else num_splits
    shape = grid[0] * grid[1], weight.values.shape[1], _COLUMNS * weight.half, _STAGES - 1
    splits = splits_of(Tiles(*shape, _COLUMNS * rows, _COLUMNS * min(rows, len(x))), x.device, num_splits)
    _, stored_scales, zeros, _, row_scales = groups.tensors
    _multiply_tiles_kernel[(*grid, splits.num)](
        x, weight.values, stored_scales, zeros, row_scales, bias, out, splits.partial, splits.counters, len(x), n,
        weight.values.shape[1], x.stride(0), *scales.stride(), out.stride(0), FORM=weight.form,
        SCALES=groups.constants["SCALES"], GROUP=weight.group, HALF=weight.half, SPLITS=splits.num, ROWS=rows,
        COLUMNS=_COLUMNS, num_warps=4, num_stages=_STAGES,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _multiply_tiles_kernel(
    x, values, scales, zeros, row_scales, bias, out, partial, counters, num_rows, num_columns, num_tiles, x_stride,
    scales_stride, group_stride, out_stride, FORM: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr,
    HALF: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    columns, rows = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside, there = columns < num_columns, rows < num_rows
    entries = tl.arange(0, HALF)
    at = tile_rows(columns, num_tiles, HALF)
    x_at = x + rows.to(tl.int64)[None, :] * x_stride + entries[:, None]
    scale_at = columns.to(tl.int64) * scales_stride
    sums = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
    first, last = part_of(num_tiles, SPLITS)
    for tile in range(first, last):
        stored = tl.load(values + (at + tile * (16 * HALF))[:, None] + entries[None, :], mask=inside[:, None], other=0)
        low = tl.load(x_at + tile * (2 * HALF), mask=there[None, :], other=0.0)
        high = tl.load(x_at + tile * (2 * HALF) + HALF, mask=there[None, :], other=0.0)
        group = scale_at + tile * (2 * HALF) // GROUP * group_stride
        weight = numbers(stored & 15, zeros, group, inside, FORM, low.dtype)
        part = tl.dot(weight, low, input_precision="ieee")
        if GROUP == HALF:
            sums += part * decode_scales(scales, group, inside, SCALES)[:, None]
            group += group_stride
            part = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
        weight = numbers(stored >> 4, zeros, group, inside, FORM, low.dtype)
        part = tl.dot(weight, high, part, input_precision="ieee")
        sums += part * decode_scales(scales, group, inside, SCALES)[:, None]
    sums, is_last = combined(sums, there[None, :], partial, counters, SPLITS, COLUMNS, ROWS)
    if row_scales is not None:
        sums *= tl.load(row_scales + columns, mask=inside, other=0.0)[:, None]
    if bias is not None:
        sums += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)[:, None]
    to = out + rows.to(tl.int64)[None, :] * out_stride + columns[:, None]
    tl.store(to, sums.to(out.dtype.element_ty), mask=(there & is_last)[None, :] & inside[:, None])


@triton.jit
def tile_rows(rows, num_tiles, HALF: tl.constexpr):
    """Return the first entries of rows of a weight in tiles."""
    return (rows // 16).to(tl.int64) * num_tiles * (16 * HALF) + rows % 16 * HALF


@triton.jit
def numbers(codes, zeros, zero_at, inside, FORM: tl.constexpr, dtype: tl.constexpr):
    """Return the numbers of 4-bit codes `[rows, columns]`, less the zero point of each row, if there are any, in
    `dtype`, exactly.
    """
    if FORM == "e2m1":  # sign, exponent and mantissa are those of a float16 that is 2 ** 14 times smaller
        wide = codes.to(tl.uint16)
        half = ((wide & 7) << 9 | (wide & 8) << 12).to(tl.float16, bitcast=True)
        result = (half.to(tl.float32) * 16384.0).to(dtype)
    elif dtype == tl.bfloat16:  # the last bits of 128
        result = (codes.to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True) - 136.0
    elif dtype == tl.float16:  # the last bits of 1024
        result = (codes.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - 1032.0
    else:
        result = codes.to(tl.float32) - 8.0
    if zeros is not None:
        result -= tl.load(zeros + zero_at, mask=inside, other=0.0).to(dtype)[:, None]
    return result.to(dtype)
