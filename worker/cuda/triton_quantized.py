"""Products with quantized weights in Triton: each program dequantizes the part of the weight that it multiplies.

Weights are integers in groups (`layers.quantization.int_groups`) or blocks of GGUF files
(`layers.quantization.gguf_blocks`, whose layouts the kernel's branches follow). The dequantized numbers are those of
the torch twins, rounded to the inputs' type; sums are float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.configs.gguf import BLOCKS
from quire.worker.layers.quantization.gguf_blocks import BLOCK_TYPES, IQ4_VALUES
from quire.worker.layers.quantization.packing import E2M1

FEW_ROWS = 16  # up to which tiles are narrow, so that a decode step has enough programs
_DOUBLED = [round(2 * value) for value in E2M1]
_TABLES = {"MXFP4": [*_DOUBLED, *(-value for value in _DOUBLED)], "IQ4_NL": IQ4_VALUES, "IQ4_XS": IQ4_VALUES}
# first byte of the codes in blocks of 32 4-bit codes
_CODES_AT = {"Q4_0": 2, "Q4_1": 4, "Q5_0": 6, "Q5_1": 8, "IQ4_NL": 2, "MXFP4": 1}


def multiply_groups(
    x: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bits: int,
    group: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """x `[T, k]` times the transposed weight `[n, k]`, plus bias `[n]`: `[T, n]` of x's type.

    values are int8 or float8_e4m3fn (no NaN) `[n, k]`, or uint8 `[n, ceil(k / 2)]` with two 4-bit values per byte (low
    half first, 8 added); scales and zeros are `[n, groups]`, a group has `group` columns, or all with one group.
    """
    out = x.new_empty(len(x), len(values))
    group = group if scales.shape[1] > 1 else x.shape[1]
    grid, tile = _grid(len(x), len(values))
    stored, bits = stored_groups(values, bits)
    _groups_kernel[grid](
        x, stored, scales, zeros, bias, out, len(x), len(values), x.shape[1], x.stride(0), values.stride(0),
        scales.stride(0), out.stride(0), GROUP=group, BITS=bits, **tile,
    )  # fmt: skip
    return out


def stored_groups(values: torch.Tensor, bits: int) -> tuple[torch.Tensor, int]:
    """(values, BITS) for the kernels: 8-bit floats are bytes, which every GPU can read, and BITS is 1."""
    return (values.view(torch.uint8), 1) if values.dtype == torch.float8_e4m3fn else (values, bits)


def multiply_blocks(
    x: torch.Tensor,
    blocks: torch.Tensor,
    kind: str,
    out: torch.Tensor,
    first: int = 0,
    bias: torch.Tensor | None = None,
) -> None:
    """Write x `[T, k]` times the transposed weight `[n, k]`, plus bias `[n]`, to the columns of `out` from `first` on.

    blocks are uint8 `[n, bytes]` of the type `kind`, a key of BLOCKS.
    """
    size_of_block, num_bytes = BLOCKS[kind]
    grid, tile = _grid(len(x), len(blocks))
    _blocks_kernel[grid](
        x, blocks, _table(kind, x.device), bias, out[:, first:], len(x), len(blocks), x.shape[1], x.stride(0),
        blocks.stride(0), out.stride(0), KIND=BLOCK_TYPES.index(kind), CODES_AT=_CODES_AT.get(kind, 0),
        VALUES=size_of_block, BYTES=num_bytes, **tile,
    )  # fmt: skip


def _grid(num_rows: int, num_columns: int) -> tuple[tuple[int, int], dict[str, int]]:
    rows, columns, depth = (16, 16, 64) if num_rows <= FEW_ROWS else (64, 64, 32)
    grid = triton.cdiv(num_columns, columns), triton.cdiv(num_rows, rows)
    return grid, {"ROWS": rows, "COLUMNS": columns, "DEPTH": depth, "num_warps": 4, "num_stages": 2}


def _table(kind: str, device: torch.device) -> torch.Tensor | None:
    """The values of 4-bit codes for types that look them up."""
    return torch.tensor(_TABLES[kind], dtype=torch.int8, device=device) if kind in _TABLES else None


@triton.jit
def _groups_kernel(
    x, values, scales, zeros, bias, out, num_rows, num_columns, size, x_stride, values_stride, scales_stride,
    out_stride, GROUP: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    there, inside = rows < num_rows, columns < num_columns
    x_at = x + rows.to(tl.int64)[:, None] * x_stride
    own = columns.to(tl.int64)[None, :]
    stored_at, group_at = own * values_stride, own * scales_stride
    sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, size, DEPTH):
        depth = start + tl.arange(0, DEPTH)
        left = depth < size
        a = tl.load(x_at + depth[None, :], mask=there[:, None] & left[None, :], other=0.0)
        mask = left[:, None] & inside[None, :]
        weight = load_groups(values, scales, zeros, stored_at, group_at, depth[:, None], mask, BITS, GROUP)
        sums = tl.dot(a, weight.to(a.dtype), sums, input_precision="ieee")
    _store(out, bias, sums, rows, columns, out_stride, there, inside)


@triton.jit
def _blocks_kernel(
    x, blocks, table, bias, out, num_rows, num_columns, size, x_stride, blocks_stride, out_stride,
    KIND: tl.constexpr, CODES_AT: tl.constexpr, VALUES: tl.constexpr, BYTES: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    there, inside = rows < num_rows, columns < num_columns
    x_at = x + rows.to(tl.int64)[:, None] * x_stride
    row_at = blocks + columns.to(tl.int64)[None, :] * blocks_stride
    sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, size, DEPTH):
        depth = start + tl.arange(0, DEPTH)
        left = depth < size
        a = tl.load(x_at + depth[None, :], mask=there[:, None] & left[None, :], other=0.0)
        at = row_at + (depth // VALUES * BYTES)[:, None]
        weight = _values(at, (depth % VALUES)[:, None], table, left[:, None] & inside[None, :], KIND, CODES_AT)
        sums = tl.dot(a, weight.to(a.dtype), sums, input_precision="ieee")
    _store(out, bias, sums, rows, columns, out_stride, there, inside)


@triton.jit
def load_groups(
    values, scales, zeros, stored_at, group_at, depth, mask, BITS: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """Columns `depth` of rows of the weight, in float32. The rows begin at entries `stored_at` of the values and
    `group_at` of the scales. BITS is as in `stored_groups`.
    """
    if BITS == 8:
        integers = tl.load(values + stored_at + depth, mask=mask, other=0).to(tl.float32)
    elif BITS == 1:  # the bits of an e4m3 are those of a float16 that is 2 ** 8 times smaller
        byte = tl.load(values + stored_at + depth, mask=mask, other=0).to(tl.int32)
        half = ((byte & 128) << 8 | (byte & 127) << 7).to(tl.uint16).to(tl.float16, bitcast=True)
        integers = half.to(tl.float32) * 256.0
    else:
        pairs = tl.load(values + stored_at + depth // 2, mask=mask, other=0).to(tl.int32)
        integers = ((pairs >> (depth % 2 * 4) & 15) - 8).to(tl.float32)
    if zeros is not None:
        integers -= tl.load(zeros + group_at + depth // GROUP, mask=mask, other=0.0).to(tl.float32)
    return integers * tl.load(scales + group_at + depth // GROUP, mask=mask, other=0.0).to(tl.float32)


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
    """The float16 at byte `offset` of each block, in float32."""
    low, high = _byte(at, offset, mask), _byte(at, offset + 1, mask)
    return (low | high << 8).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _values(at, e, table, mask, KIND: tl.constexpr, CODES_AT: tl.constexpr):
    """Values `e` of the blocks that begin at the pointers `at`, in float32. KIND indexes `BLOCK_TYPES`; CODES_AT is as
    in `_CODES_AT`.
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
        value = _half(at, 0, mask) * ((low | high << 4) - 32) * tl.load(table + code).to(tl.float32)
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
            value = _half(at, 0, mask) * tl.load(table + code).to(tl.float32)
        else:  # MXFP4: half of 2 ** (exponent - 127), whose bits are those of a float32
            exponent = _byte(at, 0, mask)
            scale = tl.where(exponent > 0, exponent << 23, 1 << 22).to(tl.float32, bitcast=True)
            value = scale * 0.5 * tl.load(table + code).to(tl.float32)
    return value


@triton.jit
def _two_bits(at, offset, e, mask):
    """Two bits of each of 64 bytes: of each half of 32 bytes first all low bits."""
    return _byte(at, offset + e // 128 * 32 + e % 32, mask) >> (e % 128 // 32 * 2) & 3
