"""The work of a step outside the layers in Triton, one launch each: fill and pad its inputs, write its new blocks into
the block tables, append its tokens to the token table.

The torch twins are `Ops.fill_inputs`, `Ops.write_entries` and `Ops.append_tokens`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from quire.worker.platforms.step_tensors import StepTensors

_BLOCK = 512  # tokens or entries of a block table per program


def fill_inputs(
    packed: torch.Tensor,
    sizes: list[int],
    tokens: torch.Tensor,
    blocks: torch.Tensor,
    block_size: int,
    tensors: StepTensors,
    arange: torch.Tensor,
    max_query_len: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do `Ops.fill_inputs` in one launch."""
    num_reqs, num_samples = sizes[0], sizes[4]
    padded, width = len(tensors.seq_lens), tensors.block_tables.shape[2]
    sampling = torch.empty(3, num_samples, dtype=torch.int64, device=packed.device)
    _fill_kernel[(padded, triton.cdiv(max(max_query_len, width), _BLOCK))](
        packed, tokens, blocks, tensors.input_ids, tensors.positions, tensors.slot_mappings, tensors.query_start_loc,
        tensors.seq_lens, tensors.block_tables, sampling, num_reqs, num_samples,
        len(tensors.positions) - (padded - num_reqs), width, tokens.stride(0), *blocks.stride()[:2],
        tensors.slot_mappings.stride(0), *tensors.block_tables.stride()[:2], BLOCK_SIZE=block_size, GROUPS=len(blocks),
        BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    return sampling.unbind()


def write_entries(table: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> None:
    """Do `Ops.write_entries` in one launch."""
    _write_kernel[(triton.cdiv(len(indices), _BLOCK),)](table, indices, values, len(indices), BLOCK=_BLOCK)


def append_tokens(
    tokens: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor, max_position: int
) -> None:
    """Do `Ops.append_tokens` in one launch."""
    num, length = len(token_ids), tokens.shape[1]
    _append_kernel[(triton.cdiv(num, _BLOCK),)](
        tokens, rows, positions, token_ids, num, length, tokens.stride(0), BLOCK=_BLOCK
    )


# the sizes of a step; specializing on them would recompile the kernel
@triton.jit(do_not_specialize=["num_reqs", "num_samples", "num_tokens", "width"])
def _fill_kernel(
    packed, tokens, blocks, input_ids, positions, slot_mappings, query_start_loc, seq_lens, block_tables, sampling,
    num_reqs, num_samples, num_tokens, width, tokens_stride, blocks_group_stride, blocks_stride, slots_group_stride,
    tables_group_stride, tables_stride, BLOCK_SIZE: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i, part = tl.program_id(0), tl.program_id(1)
    at = part * BLOCK + tl.arange(0, BLOCK)
    if i < num_reqs:
        row, computed = tl.load(packed + i), tl.load(packed + num_reqs + i)
        scheduled, start = tl.load(packed + 2 * num_reqs + i), tl.load(packed + 3 * num_reqs + i)
        there, inside, position = at < scheduled, at < width, computed + at
        token = tl.load(tokens + row * tokens_stride + position, mask=there, other=0)
        tl.store(input_ids + start + at, token, mask=there)
        tl.store(positions + start + at, position, mask=there)
        for group in tl.static_range(GROUPS):
            own = blocks + group * blocks_group_stride + row * blocks_stride
            block = tl.load(own + position // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
            slots = slot_mappings + group * slots_group_stride + start + at
            tl.store(slots, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=there)
            table = block_tables + group * tables_group_stride + i.to(tl.int64) * tables_stride
            tl.store(table + at, tl.load(own + at, mask=inside, other=0), mask=inside)
        if part == 0:
            if i == 0:
                tl.store(query_start_loc, 0)
            tl.store(query_start_loc + i + 1, (start + scheduled).to(tl.int32))
            tl.store(seq_lens + i, (computed + scheduled).to(tl.int32))
            if i < num_samples:
                which = tl.load(packed + 4 * num_reqs + 1 + i)
                length = tl.load(packed + num_reqs + which) + tl.load(packed + 2 * num_reqs + which)
                tl.store(sampling + i, tl.load(packed + which))
                tl.store(sampling + num_samples + i, length)
                tl.store(sampling + 2 * num_samples + i, tl.load(packed + 3 * num_reqs + which + 1) - 1)
    else:
        if part == 0:  # padding: token 0 at position 0 in the null block, which is also the state read and written
            index = num_tokens + i - num_reqs
            tl.store(input_ids + index, 0)
            tl.store(positions + index, 0)
            tl.store(query_start_loc + i + 1, index + 1)
            tl.store(seq_lens + i, 1)
            for group in tl.static_range(GROUPS):
                tl.store(slot_mappings + group * slots_group_stride + index, 0)
                table = block_tables + group * tables_group_stride + i.to(tl.int64) * tables_stride
                tl.store(table + at, 0, mask=(at < 2) & (at < width))


# parts of a packed copy, which begin anywhere in it
@triton.jit(do_not_specialize=["num"], do_not_specialize_on_alignment=["indices", "values"])
def _write_kernel(table, indices, values, num, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = at < num
    index, value = tl.load(indices + at, mask=there, other=0), tl.load(values + at, mask=there, other=0)
    tl.store(table + index, value.to(table.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["num", "length"], do_not_specialize_on_alignment=["rows", "positions", "token_ids"])
def _append_kernel(tokens, rows, positions, token_ids, num, length, stride, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = at < num
    row, position = tl.load(rows + at, mask=there, other=0), tl.load(positions + at, mask=there, other=0)
    token = tl.maximum(tl.load(token_ids + at, mask=there, other=0), 0)
    to = tokens + row * stride + position
    tl.store(to, token.to(tokens.dtype.element_ty), mask=there & (position < length))
