"""Products with quantized weights in Triton: each program dequantizes the part of the weight that it multiplies.

Weights are in groups (`layers.quantization.int_groups`: integers, 8-bit floats, 4-bit floats, codes of a table) or
blocks of GGUF files (`layers.quantization.gguf_blocks`, whose layouts the kernel's branches follow). The dequantized
numbers are those of the torch twins, rounded to the inputs' type; sums are float32. Scales of rows multiply the sums,
so that 4-bit floats times e4m3 or powers of two are not rounded in bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from quire.checkpoints.gguf.header import BLOCKS
from quire.worker.cuda.kernels.triton_split import Splits, Tiles, combined, part_of, splits_of
from quire.worker.layers.quantization.gguf_blocks import BLOCK_TYPES, IQ4_VALUES
from quire.worker.layers.quantization.packing import E2M1_TABLE

FEW_ROWS = 16  # up to which tiles are narrow, so that a decode step has enough programs
SOME_ROWS = 64  # up to which a weight is read once, by one row of programs, of which several may share a tile
_TABLES = {"MXFP4": E2M1_TABLE, "IQ4_NL": IQ4_VALUES, "IQ4_XS": IQ4_VALUES}
# first byte of the codes in blocks of 32 4-bit codes
_CODES_AT = {"Q4_0": 2, "Q4_1": 4, "Q5_0": 6, "Q5_1": 8, "IQ4_NL": 2, "MXFP4": 1}


@dataclass(frozen=True, slots=True)
class StoredGroups:
    """A weight `[n, k]` in groups, or a stack `[E, n, k]` of them, as the kernels read it."""

    # int8 or float8_e4m3fn (no NaN) [.., n, k]; or, with 4 bits, uint8 [.., n, ceil(k / 2)] as `int_groups.pack_int4`
    # has them: two values per byte, low half first, 8 added
    values: torch.Tensor
    scales: torch.Tensor  # [.., n, groups], floating, or with a table e4m3 or e8m0
    zeros: torch.Tensor | None  # like scales
    bits: int
    group: int  # columns; an even number with 4 bits
    table: tuple[float, ...] | None = None
    row_scales: torch.Tensor | None = None  # float32 [.., n]
    order: torch.Tensor | None = None  # int64 [.., k]: column i is the input order[i]

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """Return values, scales, zeros, table and row_scales for the kernels; 8-bit floats are bytes, which every GPU
        can read.
        """
        table = None if self.form != "table" else _table(self.table, self.values.device)
        return _bytes(self.values), _bytes(self.scales), self.zeros, table, self.row_scales

    @property
    def form(self) -> str:
        """Return int8, int4, e4m3, e2m1 or table."""
        if self.table:
            return "e2m1" if self.table == E2M1_TABLE else "table"
        return "e4m3" if self.values.dtype == torch.float8_e4m3fn else f"int{self.bits}"

    @property
    def constants(self) -> dict[str, int | str]:
        scales = {torch.float8_e4m3fn: "e4m3", torch.float8_e8m0fnu: "e8m0"}.get(self.scales.dtype, "")
        return {"FORM": self.form, "SCALES": scales, "GROUP": self.group}


def multiply_groups(
    x: torch.Tensor,
    weight: StoredGroups,
    bias: torch.Tensor | None = None,
    num_splits: int | None = None,
    fixed_order: bool = False,
) -> torch.Tensor:
    """Return x `[T, k]`, whose columns are in the weight's order, times the transposed weight `[n, k]`, plus bias
    `[n]`: `[T, n]` of x's type. With `fixed_order` any number of rows has the tiles of many, without splits.
    """
    n, k = len(weight.values), x.shape[1]
    out = x.new_empty(len(x), n)
    grid, tile = _grid(len(x), n, fixed_order, weight.bits)
    splits = _splits(x, grid, tile, weight.bits / 8, 1 if fixed_order else num_splits)
    _groups_kernel[(*grid, splits.num)](
        x, *weight.tensors, bias, out, splits.partial, splits.counters, len(x), n, k, -(-k // 2), x.stride(0),
        weight.values.stride(0), weight.scales.stride(0), out.stride(0), **weight.constants, SPLITS=splits.num, **tile,
    )  # fmt: skip
    return out


def _splits(x: torch.Tensor, grid: tuple[int, int], tile: dict[str, int], size: float, num: int | None) -> Splits:
    """Return the splits of a product of up to `SOME_ROWS` rows, whose weight has `size` bytes per number; a product of
    more rows has enough programs.
    """
    num = 1 if num is None and len(x) > SOME_ROWS else num
    rows, columns, depth = tile["ROWS"], tile["COLUMNS"], tile["DEPTH"]
    shape = grid[0] * grid[1], -(-x.shape[1] // depth), int(size * columns * depth), tile["num_stages"] - 1
    return splits_of(Tiles(*shape, rows * columns, min(rows, len(x)) * columns), x.device, num)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu) else tensor


def multiply_blocks(
    x: torch.Tensor,
    blocks: torch.Tensor,
    kind: str,
    out: torch.Tensor,
    first: int = 0,
    bias: torch.Tensor | None = None,
    num_splits: int | None = None,
    fixed_order: bool = False,
) -> None:
    """Write x `[T, k]` times the transposed weight `[n, k]`, plus bias `[n]`, to the columns of `out` from `first` on.

    blocks are uint8 `[n, bytes]` of the type `kind`, a key of BLOCKS. `fixed_order` is as in `multiply_groups`.
    """
    grid, tile = _grid(len(x), len(blocks), fixed_order)
    splits = _splits(x, grid, tile, blocks.shape[1] / x.shape[1], 1 if fixed_order else num_splits)
    _blocks_kernel[(*grid, splits.num)](
        x, blocks, block_table(kind, x.device), bias, out[:, first:], splits.partial, splits.counters, len(x),
        len(blocks), x.shape[1], x.stride(0), blocks.stride(0), out.stride(0), **block_constants(kind),
        SPLITS=splits.num, **tile,
    )  # fmt: skip


def _grid(num_rows: int, num_columns: int, many: bool, bits: int = 0) -> tuple[tuple[int, int], dict[str, int]]:
    """Return the grid and tiles for a number of rows; with `many`, the tiles of more than `SOME_ROWS`.

    Each program reads all inputs, from the L2 cache: with 16 outputs and 16 rows they are twice the bytes of 8-bit
    weights. So tiles of few rows are wider for groups of `bits`, which take fewer registers than blocks (0).
    """
    if num_rows <= FEW_ROWS and not many:  # memory-bound: more bytes in flight
        rows, columns, depth, stages, warps = 16, 32 if bits else 16, 128, 4, 4
    elif num_rows <= SOME_ROWS and not many:  # still memory-bound: narrow tiles, enough for all multiprocessors
        rows = 32 if num_rows <= 32 else 64
        columns, depth, stages, warps = 32, 128 if bits == 8 and rows == 32 else 64, 4, 4
    else:
        rows, columns, depth, stages, warps = 64, 64, 32, 3, 4
    grid = triton.cdiv(num_columns, columns), triton.cdiv(num_rows, rows)
    return grid, {"ROWS": rows, "COLUMNS": columns, "DEPTH": depth, "num_warps": warps, "num_stages": stages}


def block_constants(kind: str) -> dict[str, int]:
    """Return the kernels' constants for blocks of a type."""
    values, size = BLOCKS[kind]
    return {"KIND": BLOCK_TYPES.index(kind), "CODES_AT": _CODES_AT.get(kind, 0), "VALUES": values, "BYTES": size}


def block_table(kind: str, device: torch.device) -> torch.Tensor | None:
    """Return the values of 4-bit codes for types of blocks that look them up."""
    return _table(_TABLES[kind], device) if kind in _TABLES else None


@cache
def _table(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """Return the values on the device: copied once, because a copy makes the host wait and cannot be recorded."""
    return torch.tensor(values, dtype=torch.float32, device=device)


@triton.jit(do_not_specialize=["num_rows"])
def _groups_kernel(
    x, values, scales, zeros, table, row_scales, bias, out, partial, counters, num_rows, num_columns, size,
    size_pairs, x_stride, values_stride, scales_stride, out_stride, FORM: tl.constexpr, SCALES: tl.constexpr,
    GROUP: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    there, inside = rows < num_rows, columns < num_columns
    x_at = x + rows.to(tl.int64)[:, None] * x_stride
    stored_at, group_at = columns.to(tl.int64) * values_stride, columns.to(tl.int64) * scales_stride
    sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    first, last = part_of(tl.cdiv(size, DEPTH), SPLITS)
    for tile in range(first, last):
        depth = tile * DEPTH + tl.arange(0, DEPTH)
        left = depth < size
        a = tl.load(x_at + depth[None, :], mask=there[:, None] & left[None, :], other=0.0)
        weight = load_groups(
            values, scales, zeros, table, stored_at, group_at, tile, size, size_pairs, inside, FORM, SCALES, GROUP,
            COLUMNS, DEPTH,
        )  # fmt: skip
        sums = tl.dot(a, weight.to(a.dtype), sums, input_precision="ieee")
    sums, is_last = combined(sums, there[:, None], partial, counters, SPLITS, ROWS, COLUMNS)
    if row_scales is not None:
        sums *= tl.load(row_scales + columns, mask=inside, other=0.0)[None, :]
    _store(out, bias, sums, rows, columns, out_stride, there & is_last, inside)


@triton.jit(do_not_specialize=["num_rows"])
def _blocks_kernel(
    x, blocks, table, bias, out, partial, counters, num_rows, num_columns, size, x_stride, blocks_stride, out_stride,
    KIND: tl.constexpr, CODES_AT: tl.constexpr, VALUES: tl.constexpr, BYTES: tl.constexpr, SPLITS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    there, inside = rows < num_rows, columns < num_columns
    x_at = x + rows.to(tl.int64)[:, None] * x_stride
    row_at = blocks + columns.to(tl.int64)[None, :] * blocks_stride
    sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    first, last = part_of(tl.cdiv(size, DEPTH), SPLITS)
    for tile in range(first, last):
        depth = tile * DEPTH + tl.arange(0, DEPTH)
        left = depth < size
        a = tl.load(x_at + depth[None, :], mask=there[:, None] & left[None, :], other=0.0)
        at = row_at + (depth // VALUES * BYTES)[:, None]
        weight = load_blocks(at, (depth % VALUES)[:, None], table, left[:, None] & inside[None, :], KIND, CODES_AT)
        sums = tl.dot(a, weight.to(a.dtype), sums, input_precision="ieee")
    sums, is_last = combined(sums, there[:, None], partial, counters, SPLITS, ROWS, COLUMNS)
    _store(out, bias, sums, rows, columns, out_stride, there & is_last, inside)


@triton.jit
def load_groups(
    values, scales, zeros, table, stored_at, group_at, tile, size, size_pairs, inside, FORM: tl.constexpr,
    SCALES: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Return columns `tile` * DEPTH to (`tile` + 1) * DEPTH of COLUMNS rows of the weight, of which `inside` exist, in
    float32 `[DEPTH, COLUMNS]`. The rows begin at entries `stored_at` of the values and `group_at` of the scales, and
    have `size` columns, `size_pairs` pairs of them.

    Rows are read along their columns, so that a thread reads neighbouring bytes: several at once, because Triton sees
    what divides the offsets and sizes.
    """
    PAIRS: tl.constexpr = FORM == "int4" or FORM == "e2m1" or FORM == "table"
    WIDTH: tl.constexpr = DEPTH // 2 if PAIRS else DEPTH
    entry = tile * WIDTH + tl.arange(0, WIDTH)
    mask = inside[:, None] & (entry < (size_pairs if PAIRS else size))[None, :]
    numbers = tl.load(values + stored_at[:, None] + entry[None, :], mask=mask, other=0)
    if PAIRS:
        codes = tl.join(numbers & 15, numbers >> 4)
        if FORM == "int4":
            numbers = codes.to(tl.float32) - 8.0
        elif FORM == "e2m1":  # sign, exponent and mantissa are those of a float16 that is 2 ** 14 times smaller
            wide = codes.to(tl.uint16)
            numbers = ((wide & 7) << 9 | (wide & 8) << 12).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
        else:
            numbers = tl.load(table + codes)
    else:
        numbers = _e4m3(numbers) if FORM == "e4m3" else numbers.to(tl.float32)
    if GROUP % DEPTH == 0:  # one scale for each row
        at, there = group_at[:, None] + tile // (GROUP // DEPTH), inside[:, None]
    else:
        at, there = group_at[:, None] + (entry * (DEPTH // WIDTH) // GROUP)[None, :], mask
    scale = decode_scales(scales, at, there, SCALES)
    if PAIRS:
        scale = scale[:, :, None]
    if zeros is not None:
        zero = tl.load(zeros + at, mask=there, other=0.0).to(tl.float32)
        numbers -= zero[:, :, None] if PAIRS else zero
    weight = numbers * scale
    if PAIRS:
        weight = tl.reshape(weight, (COLUMNS, DEPTH))
    return tl.trans(weight)


@triton.jit
def _e4m3(byte):
    """Return the 8-bit floats, whose bits are those of float16 that are 2 ** 8 times smaller, in float32."""
    byte = byte.to(tl.uint16)
    return ((byte & 128) << 8 | (byte & 127) << 7).to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def _e8m0(exponent):
    """Return 2 ** (exponent - 127), with the exponent of a float32."""
    exponent = exponent.to(tl.int32)
    return tl.where(exponent > 0, exponent << 23, 1 << 22).to(tl.float32, bitcast=True)


@triton.jit
def decode_scales(scales, at, mask, SCALES: tl.constexpr):
    """Return the scales at entries `at`, in float32."""
    stored = tl.load(scales + at, mask=mask, other=0)
    if SCALES == "e4m3":
        scale = _e4m3(stored)
    elif SCALES == "e8m0":
        scale = _e8m0(stored)
    else:
        scale = stored.to(tl.float32)
    return scale


@triton.jit
def _store(out, bias, sums, rows, columns, out_stride, there, inside):
    if bias is not None:
        sums += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    at = out + rows.to(tl.int64)[:, None] * out_stride + columns[None, :]
    tl.store(at, sums.to(out.dtype.element_ty), mask=there[:, None] & inside[None, :])


@triton.jit
def _byte(at, offset, mask):
    return tl.load(at + offset, mask=mask, other=0).to(tl.int32)


@triton.jit
def _signed_byte(at, offset, mask):
    return (_byte(at, offset, mask) ^ 128) - 128


@triton.jit
def _half(at, offset, mask):
    """Return the float16 at byte `offset` of each block, in float32."""
    low, high = _byte(at, offset, mask), _byte(at, offset + 1, mask)
    return (low | high << 8).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def load_blocks(at, e, table, mask, KIND: tl.constexpr, CODES_AT: tl.constexpr):
    """Return values `e` of the blocks that begin at the pointers `at`, in float32. KIND indexes `BLOCK_TYPES`; CODES_AT
    is as in `_CODES_AT`.
    """
    if KIND == 4:  # Q8_0
        value = _half(at, 0, mask) * _signed_byte(at, 2 + e, mask)
    elif KIND == 5:  # Q2_K
        code = _two_bits(at, 16, e, mask)
        both = _byte(at, e // 16, mask)
        value = _half(at, 80, mask) * (both & 15) * code - _half(at, 82, mask) * (both >> 4)
    elif KIND == 6:  # Q3_K
        j = e // 16
        low = _byte(at, 96 + j % 8, mask) >> (j // 8 * 4) & 15
        top = _byte(at, 104 + j % 4, mask) >> (j // 4 * 2) & 3
        high = _byte(at, e % 32, mask) >> (e // 32) & 1
        code = (_two_bits(at, 32, e, mask) | high << 2) - 4
        value = _half(at, 108, mask) * ((low | top << 4) - 32) * code
    elif KIND == 7 or KIND == 8:  # Q4_K, Q5_K
        j = e // 32
        first, second = _byte(at, 4 + j % 4, mask), _byte(at, 8 + j % 4, mask)
        last = _byte(at, 12 + j % 4, mask)
        scale = tl.where(j < 4, first & 63, last & 15 | first >> 6 << 4)
        minimum = tl.where(j < 4, second & 63, last >> 4 | second >> 6 << 4)
        code = _byte(at, (16 if KIND == 7 else 48) + e // 64 * 32 + e % 32, mask) >> (j % 2 * 4) & 15
        if KIND == 8:
            code |= (_byte(at, 16 + e % 32, mask) >> j & 1) << 4
        value = _half(at, 0, mask) * scale * code - _half(at, 2, mask) * minimum
    elif KIND == 9:  # Q6_K
        low = _byte(at, e // 128 * 64 + e % 64, mask) >> (e % 128 // 64 * 4) & 15
        code = (low | _two_bits(at, 128, e, mask) << 4) - 32
        value = _half(at, 208, mask) * _signed_byte(at, 192 + e // 16, mask) * code
    elif KIND == 11:  # IQ4_XS
        j = e // 32
        low = _byte(at, 4 + j // 2, mask) >> (j % 2 * 4) & 15
        high = (_byte(at, 2, mask) | _byte(at, 3, mask) << 8) >> (2 * j) & 3
        code = _byte(at, 8 + j * 16 + e % 16, mask) >> (e % 32 // 16 * 4) & 15
        value = _half(at, 0, mask) * ((low | high << 4) - 32) * tl.load(table + code)
    else:  # blocks of 32 values in 16 bytes: the low halves, then the high ones
        code = _byte(at, CODES_AT + e % 16, mask) >> (e // 16 * 4) & 15
        if KIND == 2 or KIND == 3:
            code |= (_byte(at, CODES_AT - 4 + e // 8, mask) >> (e % 8) & 1) << 4
        if KIND == 0:  # Q4_0
            value = _half(at, 0, mask) * (code - 8)
        elif KIND == 2:  # Q5_0
            value = _half(at, 0, mask) * (code - 16)
        elif KIND == 1 or KIND == 3:  # Q4_1, Q5_1
            value = _half(at, 0, mask) * code + _half(at, 2, mask)
        elif KIND == 10:  # IQ4_NL
            value = _half(at, 0, mask) * tl.load(table + code)
        else:  # MXFP4
            value = _e8m0(_byte(at, 0, mask)) * tl.load(table + code)
    return value


@triton.jit
def _two_bits(at, offset, e, mask):
    """Return two bits of each of 64 bytes: of each half of 32 bytes first all low bits."""
    return _byte(at, offset + e // 128 * 32 + e % 32, mask) >> (e % 128 // 32 * 2) & 3
