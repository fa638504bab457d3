"""Weights of integers with a scale, and possibly a zero point, per row and group of columns.

weight[row, column] = scale[row, column // group] * (value[row, column] - zero[row, column // group])

The values may be 8-bit floats instead, or 4-bit codes that a table of 16 numbers gives a value each (`Groups.table`).
`PlainGroups` is plain torch for machines without native kernels, and until these are compiled: it dequantizes the
weights for every matmul, which is correct but slow. A platform's native method (`Ops.quantized_method`) takes over its
numbers unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from quire.worker.host.huge_pages import Workspace
from quire.worker.layers.linear import Linear, LinearMethod, PlainLinear, product

_PIECE = 1 << 22  # weights dequantized at once
# properties that groups may require of kernels (`Groups.needs`)
E4M3, TABLE, GROUP_SIZE = "e4m3", "table", "group size"


@dataclass(frozen=True, slots=True)
class Groups:
    """A weight `[n, k]`. With `order`, column i of the weight is the input `order[i]` (GPTQ's act-order)."""

    values: torch.Tensor  # int8 [n, k]; -8 .. 7 for 4 bits. Or float8_e4m3fn, without zeros
    scales: torch.Tensor  # [n, ceil(k / group)], floating; with a table also in 8 bits (float8_e4m3fn, float8_e8m0fnu)
    zeros: torch.Tensor | None  # like scales, in units of the values; None: all 0
    bits: int  # 4 or 8
    group: int  # columns; the last group may be shorter
    order: torch.Tensor | None = None  # int64 [k]
    table: tuple[float, ...] | None = None  # 4 bits without zeros: 16 numbers, of which -8 stands for the first
    row_scales: torch.Tensor | None = None  # float64 [n], by which the scales of each row are multiplied

    @property
    def needs(self) -> frozenset[str]:
        """Return the properties that not every platform's kernels support (`Ops.takes`)."""
        needs = {TABLE} if self.table else {E4M3} if self.values.dtype == torch.float8_e4m3fn else set()
        whole = self.scales.shape[1] == 1
        return frozenset(needs) | (frozenset() if whole else needs_of(self.group))

    def dequantized(self) -> torch.Tensor:
        """Return the weight in float32 `[n, k]`, its columns in the order of the inputs."""
        weight = dequantize(self.values, self.scales, self.zeros, self.group, self.table, self.row_scales)
        return weight if self.order is None else weight[:, self.order.argsort()]

    def select_rows(self, rows: torch.Tensor | slice) -> Groups:
        """Return the rows with the indices `rows`."""

        def taken(tensor: torch.Tensor | None) -> torch.Tensor | None:
            if tensor is None or tensor.element_size() > 1:
                return None if tensor is None else tensor[rows]
            return tensor.view(torch.uint8)[rows].view(tensor.dtype)  # not every device indexes 8-bit floats

        tensors = {name: taken(getattr(self, name)) for name in ("values", "scales", "zeros", "row_scales")}
        return replace(self, **tensors)

    def regrouped(self) -> Groups | None:
        """Return the same weight in groups of a size that all kernels take, or None."""
        if self.scales.shape[1] == 1 or not needs_of(self.group):
            return self
        size = next((size for size in (128, 64, 32) if self.group % size == 0), None)
        if size is None:
            return None

        def repeated(entries: torch.Tensor) -> torch.Tensor:
            return entries.repeat_interleave(self.group // size, 1)[:, : -(-self.values.shape[1] // size)]

        zeros = None if self.zeros is None else repeated(self.zeros)
        return replace(self, scales=repeated(self.scales), zeros=zeros, group=size)

    @staticmethod
    def merged(parts: Sequence[object], num_rows: int) -> Groups | None:
        """Return the rows of all parts as one weight, or None if their kinds differ or there are not `num_rows` of
        them.
        """
        first, *others = parts
        if not all(isinstance(part, Groups) for part in parts) or sum(len(part.values) for part in parts) != num_rows:
            return None
        if not others:
            return first
        if any((part.bits, part.group, part.table) != (first.bits, first.group, first.table) for part in others):
            return None
        orders = [part.order for part in parts]
        if any(order is not None for order in orders) and (
            any(order is None for order in orders) or not all(torch.equal(order, orders[0]) for order in orders)
        ):
            return None
        zeros = None
        if any(part.zeros is not None for part in parts):
            zeros = torch.cat([torch.zeros_like(p.scales) if p.zeros is None else p.zeros for p in parts])
        values, scales = torch.cat([p.values for p in parts]), torch.cat([p.scales for p in parts])
        row_scales = None if first.row_scales is None else torch.cat([p.row_scales for p in parts])
        return replace(first, values=values, scales=scales, zeros=zeros, row_scales=row_scales)


def needs_of(group: int) -> frozenset[str]:
    """Return the requirements on kernels of groups of `group` columns: all kernels take 32, 64, 128 and multiples of
    256.
    """
    return frozenset() if group in (32, 64, 128) or group % 256 == 0 else frozenset({GROUP_SIZE})


def dequantize(
    values: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    group: int | torch.Tensor,
    table: tuple[float, ...] | None = None,
    row_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the weight in float32 `[n, k]` of values `[n, k]` and scales (and zeros) `[n, ceil(k / group)]`, or `[n,
    groups]` with the group of each column, int64 `[k]`. table and row_scales are as in `Groups`.
    """

    def wide(entries: torch.Tensor) -> torch.Tensor:
        entries = entries.float()
        if isinstance(group, torch.Tensor):
            return entries[:, group]
        return entries.repeat_interleave(group, 1)[:, : values.shape[1]] if entries.shape[1] > 1 else entries

    if table is None:
        weight = values.float()
    else:
        weight = torch.tensor(table, device=values.device)[values.int() + 8]
    if zeros is not None:
        weight -= wide(zeros)
    if row_scales is not None:  # rounds once, like the product or quotient of two floats
        scales = scales.double() * row_scales[:, None]
    return weight.mul_(wide(scales))


def give_groups(layer: Linear, groups: Groups, dtype: torch.dtype) -> None:
    """Give `layer` a method that multiplies by `groups` in `dtype`: the platform's if it has one for that type."""
    layer.method = PlainGroups(layer, groups, dtype)
    layer.method.finalize(layer)


class PlainGroups(PlainLinear):
    """Stores int8 values, or pairs of 4-bit values per byte (low half first), as buffers of the layer: `quantized`,
    `scales` and, if there are zero points, `zeros`.
    """

    def __init__(self, layer: Linear, groups: Groups, dtype: torch.dtype):
        self.layer, self.bits, self.group, self.dtype = layer, groups.bits, groups.group, dtype
        self.table = groups.table
        values = groups.values if groups.bits == 8 else pack_int4(groups.values)
        layer.register_buffer("quantized", values, persistent=False)
        layer.register_buffer("scales", groups.scales, persistent=False)
        layer.register_buffer("zeros", groups.zeros, persistent=False)
        layer.register_buffer("order", groups.order, persistent=False)
        layer.register_buffer("row_scales", groups.row_scales, persistent=False)

    def num_bytes(self, layer: Linear) -> int:
        return bytes_held(layer)

    def finalize(self, layer: Linear) -> None:
        if layer.ops is None or self.dtype not in layer.ops.quantized_types:
            return
        if native := layer.ops.quantized_method(layer, replace(self._groups(), order=None)):
            layer.method = native if layer.order is None else Reordered(native)

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        if layer.order is not None:
            x = x[:, layer.order]
        step = max(1, _PIECE // layer.in_features)
        pieces = [product(x, self._weight(slice(i, i + step))) for i in range(0, layer.out_features, step)]
        whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1)
        return whole if layer.bias is None else whole + layer.bias

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows `ids` `[T]` of the weight, for a tied embedding."""
        return self._weight(ids)

    def _groups(self, rows: slice | torch.Tensor = slice(None)) -> Groups:
        """Return rows of the weight."""
        layer = self.layer
        stored = Groups(
            layer.quantized, layer.scales, layer.zeros, self.bits, self.group, layer.order, self.table, layer.row_scales
        ).select_rows(rows)
        return stored if self.bits == 8 else replace(stored, values=unpack_int4(stored.values)[:, : layer.in_features])

    def _weight(self, rows: slice | torch.Tensor) -> torch.Tensor:
        return replace(self._groups(rows), order=None).dequantized().to(self.dtype)


def bytes_held(layer: Linear) -> int:
    """Return bytes of the parameters and buffers of a layer."""
    held = {id(tensor): tensor for tensor in (*layer.parameters(recurse=False), *layer.buffers(recurse=False))}
    return sum(tensor.nbytes for tensor in held.values())


class Reordered(LinearMethod):
    """Brings the inputs into the order of the layer's columns (`layer.order`) before `method` multiplies them."""

    def __init__(self, method: LinearMethod):
        self.method = method

    def num_bytes(self, layer: Linear) -> int:
        return bytes_held(layer)

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        return self.method.apply(layer, x[:, layer.order])

    def apply_float32(self, layer: Linear, x: torch.Tensor, workspace: Workspace | None = None) -> torch.Tensor:
        return self.method.apply_float32(layer, x[:, layer.order], workspace)

    def apply_gated(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        return self.method.apply_gated(layer, x[:, layer.order])

    def apply_halves(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        return self.method.apply_halves(layer, x[:, layer.order])


def pack_int4(values: torch.Tensor) -> torch.Tensor:
    """Pack int8 `[n, k]` of -8 .. 7 into uint8 `[n, ceil(k / 2)]`."""
    if values.shape[1] % 2:
        values = torch.nn.functional.pad(values, (0, 1))
    unsigned = (values + 8).to(torch.uint8)
    return unsigned[:, ::2] | unsigned[:, 1::2] << 4


def unpack_int4(packed: torch.Tensor) -> torch.Tensor:
    """Undo `pack_int4`, without removing the padding."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(1).to(torch.int8) - 8
