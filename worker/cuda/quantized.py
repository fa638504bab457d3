"""Linear methods whose quantized weights are multiplied by the Triton kernels."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from quire.worker.cuda.kernels.triton_dequantize import (
    MANY_ROWS,
    dequantize_blocks,
    dequantize_groups,
    dequantize_tiles,
    multiply_dequantized,
)
from quire.worker.cuda.kernels.triton_fp8 import GROUP as BLOCK
from quire.worker.cuda.kernels.triton_fp8 import multiply_rounded, round_rows
from quire.worker.cuda.kernels.triton_quantized import StoredGroups, multiply_blocks, multiply_groups
from quire.worker.cuda.kernels.triton_tiles import StoredTiles, half_of, in_tiles, multiply_tiles, rows_of
from quire.worker.layers.linear import Linear, LinearMethod
from quire.worker.layers.quantization.blocks import PlainBlocks, Rows
from quire.worker.layers.quantization.int_groups import Groups, bytes_held, pack_int4, unpack_int4
from quire.worker.layers.rounding import LEAST_ROWS, Rounded, Rounding, attached


class TritonGroups(LinearMethod):
    """A weight in groups, as buffers of the layer: `quantized`, `scales`, `zeros` and `row_scales`.

    The first product brings a weight of 4 bits into tiles, because experts are stacked after they are loaded.
    """

    def __init__(self, layer: Linear, groups: Groups, dtype: torch.dtype):
        self.layer, self.bits, self.table, self.dtype = layer, groups.bits, groups.table, dtype
        self.group = groups.group if groups.scales.shape[1] > 1 else layer.in_features
        integers = groups.table is None and groups.values.dtype == torch.int8
        tensors = {
            "quantized": groups.values if groups.bits == 8 else pack_int4(groups.values),
            "scales": _narrowed(groups.scales) if integers else groups.scales.contiguous(),
            "zeros": None if groups.zeros is None else groups.zeros.half().contiguous(),  # whole numbers
            "row_scales": None if groups.row_scales is None else groups.row_scales.float(),
        }
        for name, tensor in tensors.items():
            layer.register_buffer(name, tensor, persistent=False)
        self.half: int | None = None  # for the tiles
        self.fits_tiles = groups.bits == 4

    def fix_order(self) -> None:
        """Multiply each row in one order from now on, whatever the number of rows."""
        self.fixed_order, self.rounding = True, None

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        if self.fits_tiles and self.half is None:
            self._bring_into_tiles(layer)
        x, weight = x if x.stride(1) == 1 else x.contiguous(), self._stored(layer)
        multiply, dequantize = multiply_groups, dequantize_groups
        if self.half is not None:
            multiply, dequantize = multiply_tiles, dequantize_tiles
        if self.fixed_order:
            return multiply(x, weight, layer.bias, fixed_order=True)
        if len(x) <= MANY_ROWS or x.element_size() > 2:
            return multiply(x, weight, layer.bias)
        out = x.new_empty(len(x), layer.out_features)
        multiply_dequantized(x, layer.out_features, partial(dequantize, weight), out, layer.bias)
        return out

    def _stored(self, layer: Linear) -> StoredGroups | StoredTiles:
        if self.half is not None:
            form = "e2m1" if self.table else "int4"
            return StoredTiles(layer.quantized, layer.scales, layer.zeros, self.group, form, layer.row_scales)
        tables = layer.scales, layer.zeros, self.bits, self.group, self.table, layer.row_scales
        return StoredGroups(layer.quantized, *tables)

    def _bring_into_tiles(self, layer: Linear) -> None:
        self.half = half_of(self._stored(layer))
        self.fits_tiles = self.half is not None
        if self.half is None:
            return
        layer.quantized = in_tiles(layer.quantized, self.half)
        layer.scales = _by_group(layer.scales)
        layer.zeros = None if layer.zeros is None else _by_group(layer.zeros)

    def leave_tiles(self, layer: Linear) -> None:
        """Store the weight in groups from now on, as stacks of experts have it."""
        self.fits_tiles = False
        if self.half is not None:
            layer.quantized = rows_of(layer.quantized, torch.arange(layer.out_features, device=layer.quantized.device))
            layer.scales = _contiguous(layer.scales)
            layer.zeros = None if layer.zeros is None else layer.zeros.contiguous()
            self.half = None

    def num_bytes(self, layer: Linear) -> int:
        return bytes_held(layer)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows `ids` `[T]` of the weight, for a tied embedding."""
        layer = self.layer
        tables = layer.scales, layer.zeros, self.bits, self.group, None, self.table, layer.row_scales
        if self.half is not None:
            rows = replace(Groups(layer.scales, *tables).select_rows(ids), values=rows_of(layer.quantized, ids))
        else:
            rows = Groups(layer.quantized, *tables).select_rows(ids)
        if self.bits == 4:
            rows = replace(rows, values=unpack_int4(rows.values)[:, : layer.in_features])
        return rows.dequantized().to(self.dtype)


def _by_group(table: torch.Tensor) -> torch.Tensor:
    """Return the same `[n, groups]`, with the entries of a group contiguous in memory."""
    return _contiguous(table.T).T


def _contiguous(table: torch.Tensor) -> torch.Tensor:
    """Return the same, row by row in memory; not every device copies 8-bit floats."""
    stored = table.view(torch.uint8) if table.element_size() == 1 else table
    return stored.contiguous().view(table.dtype)


def _narrowed(scales: torch.Tensor) -> torch.Tensor:
    """Return the same scales in 16 bits, if one of the two types holds them exactly."""
    for dtype in (torch.float16, torch.bfloat16):
        if scales.element_size() > 2 and torch.equal((narrow := scales.to(dtype)).to(scales.dtype), scales):
            return narrow.contiguous()
    return scales.contiguous()


class Float8Channels(TritonGroups):
    """8-bit floats with one scale per output, on a GPU that multiplies 8-bit floats: products of many rows round each
    row of the inputs to 8-bit floats, too, as other servers do for all rows.
    """

    rounding = Rounding()

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        if len(x) < LEAST_ROWS or self.fixed_order:
            return super().apply(layer, x)
        rounded = attached(x, self.rounding) or round_rows(x if x.stride(1) == 1 else x.contiguous(), self.rounding)
        return self.multiply(layer, rounded, x.dtype)

    def multiply(self, layer: Linear, x: Rounded, dtype: torch.dtype) -> torch.Tensor:
        # torch takes scales per row and column with a result in bfloat16 only
        weight_scales = layer.scales.float().T
        out = torch._scaled_mm(x.values, layer.quantized.T, x.scales, weight_scales, out_dtype=torch.bfloat16)
        out = out.to(dtype)
        return out if layer.bias is None else out + layer.bias

    @staticmethod
    def fits(groups: Groups) -> bool:
        """Return whether torch multiplies such a weight."""
        n, k = groups.values.shape
        return _are_floats8(groups) and groups.scales.shape[1] == 1 and n % 16 == 0 and k % 16 == 0


class Float8Blocks(Float8Channels):
    """8-bit floats with a scale per output, or block of outputs, and 128 columns (DeepSeek, Qwen3)."""

    rounding = Rounding(BLOCK)

    def multiply(self, layer: Linear, x: Rounded, dtype: torch.dtype) -> torch.Tensor:
        return multiply_rounded(x, layer.quantized, layer.scales, layer.bias, dtype)

    @staticmethod
    def fits(groups: Groups) -> bool:
        """Return whether the kernel multiplies such a weight."""
        whole = groups.values.shape[1] % BLOCK == 0 and groups.scales.dtype.itemsize > 1
        return _are_floats8(groups) and groups.scales.shape[1] > 1 and groups.group == BLOCK and whole


def _are_floats8(groups: Groups) -> bool:
    return groups.values.dtype == torch.float8_e4m3fn


class TritonBlocks(PlainBlocks):
    """Blocks of a GGUF file, which the layer holds already."""

    def __init__(self, parts: list[Rows], dtype: torch.dtype):
        self.parts, self.dtype = parts, dtype

    def finalize(self, layer: Linear) -> None:
        pass

    def fix_order(self) -> None:
        """See `TritonGroups.fix_order`."""
        self.fixed_order = True

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        x, out, first = x if x.stride(1) == 1 else x.contiguous(), x.new_empty(len(x), layer.out_features), 0
        many = len(x) > MANY_ROWS and x.element_size() == 2 and not self.fixed_order
        for part in self.parts:
            last = first + len(part.blocks)
            bias = None if layer.bias is None else layer.bias[first:last]
            if many:
                dequantize = partial(dequantize_blocks, part.blocks, part.type)
                multiply_dequantized(x, len(part.blocks), dequantize, out[:, first:last], bias)
            else:
                multiply_blocks(x, part.blocks, part.type, out, first, bias, fixed_order=self.fixed_order)
            first = last
        out[:, first:] = 0  # rows that pad the vocabulary
        return out
