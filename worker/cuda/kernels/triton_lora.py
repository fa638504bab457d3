"""LoRA adapters in Triton: grouped products of a step's rows with A (shrink) and with B (expand), each one launch for
all adapters of a layer. A program takes a tile of rows of one adapter. The torch twin is `layers.lora.add_lora`.

The kernels read tables of addresses and sizes, so that nothing is copied when adapters come and go.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from quire.worker.layers.lora import Group, LoraRows, LoraWeights, add_lora
from quire.worker.layers.lora_slots import NUMBERS, PARTS, LayerSlots, LoraSlots, add_lora_slots, weight_numbers

_ROWS, _RANKS, _COLUMNS, _DEPTH = 16, 16, 64, 64  # per tile
_TABLE = tl.constexpr(NUMBERS)
_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def add(x: torch.Tensor, out: torch.Tensor, groups: Sequence[Group], fixed_order: bool = False) -> None:
    """Compute `add_lora`. A row's sums always have one order."""
    if x.dtype not in _TYPES or any(len(weights.parts) > PARTS for _, weights in groups) or out.stride(1) != 1:
        return add_lora(x, out, groups, fixed_order)
    together = [group for group in groups if not group[0].overlaps]
    # rows with several adapters get them one after another
    for some in ([together] if together else []) + [[group] for group in groups if group[0].overlaps]:
        _add(x if x.stride(1) == 1 else x.contiguous(), out, some)


def _add(x: torch.Tensor, out: torch.Tensor, groups: list[Group]) -> None:
    rows = _stacked([_row_table(rows) for rows, _ in groups]).view(len(groups), 3)
    table = _stacked([_weight_table(weights) for _, weights in groups])
    most, rank = max(len(rows.index) for rows, _ in groups), max(len(weights.a) for _, weights in groups)
    num_parts = max(len(weights.parts) for _, weights in groups)
    widest = max(columns.stop - columns.start for _, weights in groups for _, columns, _ in weights.parts)
    _launch(x, out, rows, table, most, rank, num_parts, widest)


def add_slots(x: torch.Tensor, out: torch.Tensor, slots: LoraSlots, layer: LayerSlots) -> None:
    """Compute `add_lora_slots`."""
    if x.dtype not in _TYPES or out.stride(1) != 1:
        return add_lora_slots(x, out, slots, layer)
    x = x if x.stride(1) == 1 else x.contiguous()
    _launch(x, out, slots.rows, layer.table, len(x), layer.most_rank, layer.num_parts, out.shape[1])


def _launch(
    x: torch.Tensor, out: torch.Tensor, rows: torch.Tensor, table: torch.Tensor, most: int, rank: int, num_parts: int,
    widest: int,
) -> None:  # fmt: skip
    """Launch both kernels. `rows` `[groups, 3 or more]` and `table` `[groups, NUMBERS]`. The other numbers bound those
    of a group: `most` rows, `rank` and parts of `widest` columns.
    """
    ranks, tiles = triton.cdiv(rank, _RANKS), triton.cdiv(most, _ROWS)
    inner = torch.empty(len(rows), most, ranks * _RANKS, dtype=torch.float32, device=x.device)
    _shrink_kernel[(tiles, ranks, len(rows))](
        x, inner, rows, table, x.stride(0), inner.stride(0), inner.stride(1), x.shape[1], rows.stride(0),
        ROWS=_ROWS, RANKS=_RANKS, DEPTH=_DEPTH, num_warps=4,
    )  # fmt: skip
    _expand_kernel[(tiles, triton.cdiv(widest, _COLUMNS), len(rows) * num_parts)](
        inner, out, x, rows, table, out.stride(0), inner.stride(0), inner.stride(1), rows.stride(0), num_parts,
        ROWS=_ROWS, RANKS=_RANKS, COLUMNS=_COLUMNS, num_warps=4,
    )  # fmt: skip


def _stacked(tables: list[torch.Tensor]) -> torch.Tensor:
    return tables[0] if len(tables) == 1 else torch.cat(tables)


def _row_table(rows: LoraRows) -> torch.Tensor:
    """Return int64 `[3]`: addresses of the indices and scales, number of rows. Made once per step."""
    if rows.packed is None:
        scales = torch.ones_like(rows.index, dtype=torch.float32) if rows.scales is None else rows.scales
        numbers = [rows.index.data_ptr(), scales.data_ptr(), len(rows.index)]
        rows.packed = torch.tensor(numbers, device=rows.index.device), scales
    return rows.packed[0]


def _weight_table(weights: LoraWeights) -> torch.Tensor:
    """Return int64 `[_TABLE]`. Made with the first use of an adapter."""
    if weights.packed is None:
        weights.packed = torch.tensor(weight_numbers(weights), device=weights.a.device)
    return weights.packed


# an adapter's sizes; specializing on them would recompile the kernel
@triton.jit(do_not_specialize=["stride_group", "stride_rows"])
def _shrink_kernel(
    x, inner, rows, table, stride_x, stride_group, stride_row, width, stride_rows,
    ROWS: tl.constexpr, RANKS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Compute inner[group, i, r] = scale of row i * (its x . row r of A) for a tile of rows and ranks of an adapter."""
    tile, block, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count, rank = tl.load(rows + group * stride_rows + 2), tl.load(table + group * _TABLE + 1)
    if (tile * ROWS < count) & (block * RANKS < rank):
        i, r = tile * ROWS + tl.arange(0, ROWS), block * RANKS + tl.arange(0, RANKS)
        index = tl.load(rows + group * stride_rows).to(tl.pointer_type(tl.int64))
        scales = tl.load(rows + group * stride_rows + 1).to(tl.pointer_type(tl.float32))
        a = tl.load(table + group * _TABLE).to(tl.pointer_type(x.dtype.element_ty))
        token = tl.load(index + i, mask=i < count, other=0)
        sums = tl.zeros((ROWS, RANKS), tl.float32)
        for start in range(0, width, DEPTH):
            k = start + tl.arange(0, DEPTH)
            values = tl.load(
                x + token[:, None] * stride_x + k[None, :], mask=(i < count)[:, None] & (k < width)[None, :], other=0.0
            )
            weights = tl.load(
                a + r[None, :].to(tl.int64) * width + k[:, None], mask=(r < rank)[None, :] & (k < width)[:, None],
                other=0.0,
            )  # fmt: skip
            sums = tl.dot(values, weights, sums, input_precision="ieee")
        sums *= tl.load(scales + i, mask=i < count, other=0.0)[:, None]
        tl.store(inner + group * stride_group + i[:, None] * stride_row + r[None, :], sums, mask=(i < count)[:, None])


@triton.jit(do_not_specialize=["stride_group", "stride_rows", "num_parts"])
def _expand_kernel(
    inner, out, like, rows, table, stride_out, stride_group, stride_row, stride_rows, num_parts,
    ROWS: tl.constexpr, RANKS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add inner . B to a tile of rows and columns of one part of one adapter. B has the type of `like`."""
    tile, block = tl.program_id(0), tl.program_id(1)
    group, part = tl.program_id(2) // num_parts, tl.program_id(2) % num_parts
    place = table + group * _TABLE + 2 + part * 5
    count, columns = tl.load(rows + group * stride_rows + 2), tl.load(place + 4)
    if (tile * ROWS < count) & (block * COLUMNS < columns):
        i, c = tile * ROWS + tl.arange(0, ROWS), block * COLUMNS + tl.arange(0, COLUMNS)
        index = tl.load(rows + group * stride_rows).to(tl.pointer_type(tl.int64))
        b = tl.load(place).to(tl.pointer_type(like.dtype.element_ty))
        first, rank, column = tl.load(place + 1), tl.load(place + 2), tl.load(place + 3)
        token = tl.load(index + i, mask=i < count, other=0)
        sums = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, rank, RANKS):
            r = start + tl.arange(0, RANKS)
            values = tl.load(
                inner + group * stride_group + i[:, None] * stride_row + first + r[None, :],
                mask=(i < count)[:, None] & (r < rank)[None, :], other=0.0,
            )  # fmt: skip
            weights = tl.load(
                b + c[None, :].to(tl.int64) * rank + r[:, None], mask=(c < columns)[None, :] & (r < rank)[:, None],
                other=0.0,
            )  # fmt: skip
            sums = tl.dot(values.to(like.dtype.element_ty), weights, sums, input_precision="ieee")
        place_out = out + token[:, None] * stride_out + column + c[None, :]
        mask = (i < count)[:, None] & (c < columns)[None, :]
        tl.store(place_out, (tl.load(place_out, mask=mask, other=0.0) + sums).to(out.dtype.element_ty), mask=mask)
