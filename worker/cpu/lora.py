"""LoRA adapters for the native kernels (csrc/lora.cpp): their matrices, packed when an adapter is first used, for
single layers and for all layers of a decoder in one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Array, addressof, byref
from itertools import chain

import torch
import torch.nn.functional as F

from quire.worker.cpu.native import (
    KERNELS,
    LinearArgs,
    LoraColumnsArgs,
    LoraMatricesArgs,
    LoraPartArgs,
    LoraRowsArgs,
    LoraTilesArgs,
)
from quire.worker.cpu.ops import DTYPES
from quire.worker.host import huge_pages
from quire.worker.layers.linear import Linear, LinearMethod
from quire.worker.layers.lora import Adapted, Group, LoraRows, LoraWeights, StepLora, add_lora

_FEW_ROWS = 32  # that tiles of AMX are not used for
_VECTOR = 16  # columns of a gate, and of up, that alternate in the product of a packed weight


class PackedLora:
    """One adapter's matrices for one layer."""

    def __init__(self, weights: LoraWeights):
        self.rank, self.k = weights.a.shape
        self.a = F.pad(weights.a, (0, -self.k % 32, 0, -self.rank % 4)).contiguous()
        self.parts = [(ranks, columns, _blocked(b)) for ranks, columns, b in weights.parts]
        self._owned: list[object] = []  # what the structs point to
        self._packed_a: torch.Tensor | None = None
        self._many: LoraMatricesArgs | None = None
        self._in: tuple[LinearMethod, LoraMatricesArgs] | None = None
        self.alone = self.args()

    @classmethod
    def from_weights(cls, weights: LoraWeights) -> PackedLora:
        if weights.packed is None:
            weights.packed = cls(weights)
        return weights.packed

    def args(self, half: int | None = None) -> LoraMatricesArgs:
        """Return the C struct, which this object must outlive. With `half` the layer's output is a gate and up of that
        many columns each, as they alternate in a packed weight.
        """
        return self._args(half)

    @property
    def tile_elements(self) -> int:
        """Return the elements that tiles of AMX take; 0 if there is no AMX."""
        of_b = sum(KERNELS.lib.quire_lora_tiles_elements(b.shape[1], len(b) * 32) for *_, b in self.parts)
        return of_b and of_b + self._elements_of_a

    @property
    def _elements_of_a(self) -> int:
        return -(-self.rank // 16) * -(-self.k // 32) * 512

    def args_in(self, linear: Linear, room: TileRoom | None = None) -> LoraMatricesArgs:
        """Return the C struct for products that add the adapter to those of `linear`, a packed layer. Its tiles, if
        they are new, are in `room`.
        """
        if self._in is None or self._in[0] is not linear.method:
            args = self._args(linear.out_features // 2 if linear.gated else None)
            self._add_tiles(args, linear.method.args(), room)
            self._in = linear.method, args
        return self._in[1]

    @property
    def many(self) -> LoraMatricesArgs:
        """Return the C struct for many rows."""
        if self._many is None:
            self._many = self._args(None)
            self._add_tiles(self._many, None)
        return self._many

    def _args(self, half: int | None) -> LoraMatricesArgs:
        parts = (LoraPartArgs * len(self.parts))(*(
            (b.data_ptr(), ranks.start, ranks.stop - ranks.start, columns.stop - columns.start, *_place(columns, half))
            for ranks, columns, b in self.parts
        ))  # fmt: skip
        self._owned.append(parts)
        return LoraMatricesArgs(self.a.data_ptr(), self.rank, self.k, addressof(parts), len(parts), None)

    def _add_tiles(self, args: LoraMatricesArgs, linear: LinearArgs | None, room: TileRoom | None = None) -> None:
        """Give the struct the tiles of AMX, if there is AMX and the layer's columns suit them."""
        parts = (LoraPartArgs * args.num_parts).from_address(args.parts)
        elements = sum(KERNELS.lib.quire_lora_tiles_elements(part.rank, part.columns) for part in parts)
        if not elements or self.a.dtype != torch.bfloat16:
            return
        last = max(part.at + (part.columns - 1) // _VECTOR * part.step for part in parts) // _VECTOR
        columns = (LoraColumnsArgs * (last // 2 * 2 + 2))()
        room = room or TileRoom(self.tile_elements)
        b, tiles = room.take(elements), LoraTilesArgs(self._tiles_of_a(room).data_ptr())
        pointers = byref(args), None if linear is None else byref(linear), byref(tiles), b.data_ptr()
        if KERNELS.lib.quire_lora_tiles_pack(*pointers, columns, len(columns)):
            self._owned += [columns, b, tiles]
            args.tiles = addressof(tiles)

    def _tiles_of_a(self, room: TileRoom) -> torch.Tensor:
        """Return A `[r, k]`, packed like a weight; the last 16 or fewer rows have one tile per k-step, not two."""
        if self._packed_a is None:
            packed = torch.empty(-(-self.rank // 32), -(-self.k // 32), 2, 512, dtype=torch.bfloat16)
            sizes = self.rank, self.k, 0
            KERNELS.lib.quire_gemm_pack(self.a.data_ptr(), self.a.stride(0), packed.data_ptr(), *sizes)
            whole = (self.rank + 15) // 32
            self._packed_a = room.take(self._elements_of_a)
            torch.cat([packed[:whole].flatten(), packed[whole:, :, 0].flatten()], out=self._packed_a)
        return self._packed_a


class TileRoom:
    """Memory for the tiles of an adapter's layers, one after another: on small pages each 4 KiB would be a TLB miss."""

    def __init__(self, elements: int):
        self._left = huge_pages.zeros(elements, dtype=torch.bfloat16)

    def take(self, elements: int) -> torch.Tensor:
        taken, self._left = self._left[:elements], self._left[elements:]
        return taken


def _blocked(b: torch.Tensor) -> torch.Tensor:
    """Return B `[out, r]` as `[out / 32, r, 32]`."""
    return F.pad(b, (0, 0, 0, -len(b) % 32)).view(-1, 32, b.shape[1]).transpose(1, 2).contiguous()


def _place(columns: slice, half: int | None) -> tuple[int, int]:
    """Return (where the columns begin, the distance of their vectors) in a layer's output."""
    if half is None:
        return columns.start, _VECTOR
    is_up = columns.start >= half
    begin, end = (columns.start - half, columns.stop - half) if is_up else (columns.start, columns.stop)
    assert end <= half and begin % _VECTOR == 0, "a part is of the gate or of up"
    return 2 * begin + _VECTOR * is_up, 2 * _VECTOR


def rows_args(rows: LoraRows, layers: int) -> LoraRowsArgs:
    """Return the C struct for the matrices at the address `layers`."""
    assert rows.index.dtype == torch.int64
    scales = None if rows.scales is None else rows.scales.data_ptr()
    return LoraRowsArgs(rows.index.data_ptr(), scales, len(rows.index), layers)


def add_native(x: torch.Tensor, out: torch.Tensor, groups: Sequence[Group], fixed_order: bool = False) -> None:
    """Do `add_lora`."""
    if x.dtype not in DTYPES or out.dtype not in (x.dtype, torch.float32) or out.stride(1) != 1:
        return add_lora(x, out, groups, fixed_order)
    x = x if x.stride(1) == 1 else x.contiguous()
    packed = [PackedLora.from_weights(weights) for _, weights in groups]
    is_many = len(x) > _FEW_ROWS and not fixed_order
    layers = [one.many if is_many else one.alone for one in packed]
    args = (LoraRowsArgs * len(groups))(
        *(rows_args(rows, addressof(layer)) for (rows, _), layer in zip(groups, layers))
    )
    KERNELS.lib.quire_add_lora(
        args,
        len(groups),
        x.data_ptr(),
        x.stride(0),
        out.data_ptr(),
        out.stride(0),
        len(x),
        DTYPES[x.dtype],
        DTYPES[out.dtype],
        fixed_order,
    )


def run_adapted(linear: Linear, x: torch.Tensor, groups: Sequence[Group]) -> torch.Tensor:
    """Return the product of x `[T, k]` bfloat16 and `linear`, a packed layer, with what adapters add, after the
    activation if there is one: the same bits as in a call for all layers.
    """
    x, args = x if x.stride(1) == 1 else x.contiguous(), linear.method.args()
    layers = [PackedLora.from_weights(weights).args_in(linear) for _, weights in groups]
    rows = (LoraRowsArgs * len(groups))(*(rows_args(one, addressof(of)) for (one, _), of in zip(groups, layers)))
    out = torch.empty(len(x), linear.out_features // (2 if linear.gated else 1), dtype=torch.bfloat16)
    pointers = byref(args), x.data_ptr(), x.stride(0), out.data_ptr(), out.stride(0)
    KERNELS.lib.quire_run_adapted(*pointers, len(x), rows, len(groups))
    return out


class SegmentsLora:
    """The adapters of decoder layers that run in one call. `linears` are four per layer, in the order of
    `AdaptedLinear` in csrc/segment.cpp; None is a layer that takes no adapter.
    """

    def __init__(self, linears: Sequence[Sequence[Linear | None]]):
        self.linears = list(chain(*linears))
        self._tables: dict[str, tuple[Adapted, Array | None, list[PackedLora]]] = {}

    def takes(self, step: StepLora) -> bool:
        """Return whether the adapters of a step have matrices for these layers only."""
        return all(self._table(rows.key, step) is not None for rows in step.rows)

    def args(self, step: StepLora, groups: Sequence[LoraRows]) -> Array:
        """Return `groups` of the step for the native call."""
        return (LoraRowsArgs * len(groups))(
            *(rows_args(rows, addressof(self._table(rows.key, step))) for rows in groups)
        )

    def _table(self, key: str, step: StepLora) -> Array | None:
        """Return an adapter's matrices for each of the layers, or None if it has some for others."""
        adapted = step.active[key]
        known = self._tables.get(key)
        if known is None or known[0] is not adapted:
            self._tables = {one: table for one, table in self._tables.items() if one in step.active}
            known = self._tables[key] = (adapted, *self._build(adapted))
        return known[1]

    def _build(self, adapted: Adapted) -> tuple[Array | None, list[PackedLora]]:
        if not {id(linear) for linear, _ in adapted} <= {id(linear) for linear in self.linears if linear is not None}:
            return None, []
        weights = {id(linear): PackedLora.from_weights(of_layer) for linear, of_layer in adapted}
        table = (LoraMatricesArgs * len(self.linears))()
        room = TileRoom(sum(packed.tile_elements for packed in weights.values()))
        for i, linear in enumerate(self.linears):
            if (packed := weights.get(id(linear))) is not None:
                table[i] = packed.args_in(linear, room)
        return table, list(weights.values())
