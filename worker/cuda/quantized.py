"""Linear methods whose quantized weights are multiplied by the Triton kernels."""

from __future__ import annotations

from dataclasses import replace

import torch

from quire.worker.cuda.triton_quantized import FEW_ROWS, StoredGroups, multiply_blocks, multiply_groups
from quire.worker.layers.linear import Linear, LinearMethod
from quire.worker.layers.quantization.blocks import PlainBlocks, Rows
from quire.worker.layers.quantization.int_groups import Groups, bytes_held, pack_int4, unpack_int4

_LARGEST = 448.0  # e4m3


class TritonGroups(LinearMethod):
    """A weight in groups, as buffers of the layer: `quantized`, `scales`, `zeros` and `row_scales`."""

    fixed_order = True  # each result is one program's sum, in the order of the columns

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

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        tables = layer.scales, layer.zeros, self.bits, self.group, self.table, layer.row_scales
        weight = StoredGroups(layer.quantized, *tables)
        return multiply_groups(x if x.stride(1) == 1 else x.contiguous(), weight, layer.bias)

    def num_bytes(self, layer: Linear) -> int:
        return bytes_held(layer)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows `ids` `[T]` of the weight, for a tied embedding."""
        layer = self.layer
        tables = layer.scales, layer.zeros, self.bits, self.group, None, self.table, layer.row_scales
        rows = Groups(layer.quantized, *tables).of_rows(ids)
        if self.bits == 4:
            rows = replace(rows, values=unpack_int4(rows.values)[:, : layer.in_features])
        return rows.dequantized().to(self.dtype)


def _narrowed(scales: torch.Tensor) -> torch.Tensor:
    """The same scales in 16 bits, if one of the two types has all of them."""
    for dtype in (torch.float16, torch.bfloat16):
        if scales.element_size() > 2 and torch.equal((narrow := scales.to(dtype)).to(scales.dtype), scales):
            return narrow.contiguous()
    return scales.contiguous()


class Float8Channels(TritonGroups):
    """8-bit floats with one scale per output, on a GPU that multiplies 8-bit floats: products of more than FEW_ROWS
    rows round each row of the inputs to 8-bit floats, too, as other servers do for all rows.
    """

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        if len(x) <= FEW_ROWS:
            return super().apply(layer, x)
        scales = x.abs().amax(1, keepdim=True).float().clamp_(min=1e-12) / _LARGEST
        rounded = (x / scales).clamp_(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
        # torch takes scales per row and column with a result in bfloat16 only
        weight_scales = layer.scales.float().T
        out = torch._scaled_mm(rounded, layer.quantized.T, scales, weight_scales, out_dtype=torch.bfloat16)
        out = out.to(x.dtype)
        return out if layer.bias is None else out + layer.bias

    @staticmethod
    def fits(groups: Groups) -> bool:
        """Whether torch multiplies such a weight."""
        n, k = groups.values.shape
        floats = groups.values.dtype == torch.float8_e4m3fn
        return floats and groups.scales.shape[1] == 1 and n % 16 == 0 and k % 16 == 0


class TritonBlocks(PlainBlocks):
    """Blocks of a GGUF file, which the layer holds already."""

    fixed_order = True

    def __init__(self, parts: list[Rows], dtype: torch.dtype):
        self.parts, self.dtype = parts, dtype

    def finalize(self, layer: Linear) -> None:
        pass

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        x, out, first = x if x.stride(1) == 1 else x.contiguous(), x.new_empty(len(x), layer.out_features), 0
        for part in self.parts:
            last = first + len(part.blocks)
            bias = None if layer.bias is None else layer.bias[first:last]
            multiply_blocks(x, part.blocks, part.type, out, first, bias)
            first = last
        out[:, first:] = 0  # rows that pad the vocabulary
        return out
