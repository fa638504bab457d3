"""Grouped products of a mixture-of-experts layer in Triton.

Rows (token and expert pairs) are sorted by expert (`triton_routing`) and each expert's rows padded to whole tiles, so
that every tile of rows belongs to one expert; all sizes are upper bounds that do not depend on the routing, so that a
step can be recorded as a CUDA graph. The first product ends with the activation; the second writes float32 results per
pair, which a third kernel sums by weight. The torch twin is `layers.moe.fused_experts`; tests compare the two.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.worker.cuda.kernels import limits
from quire.worker.cuda.kernels.triton_quantized import (
    StoredGroups,
    block_constants,
    block_table,
    load_blocks,
    load_groups,
)
from quire.worker.cuda.kernels.triton_routing import sort_by_expert

ACTIVATIONS = {"silu": 0, "gelu_pytorch_tanh": 1, "clamped_silu": 2}
FEW_ROWS = 16  # per expert on average, up to which tiles are narrow
_FIXED_TILE = 64
_MANY_ROWS = 96  # above which tiles of 128 rows are more full than empty


@dataclass(frozen=True, slots=True)
class StackedBlocks:
    """The weights of a stack of experts as blocks of a GGUF file: uint8 `[E, n, bytes]` of the type `kind`, a key of
    BLOCKS.
    """

    blocks: torch.Tensor
    kind: str


Stack = torch.Tensor | StoredGroups | StackedBlocks  # the weights [E, n, k] of a stack of experts
_NO_BLOCKS = {"KIND": 0, "CODES_AT": 0, "VALUES": 1, "BYTES": 1}


def arguments(stack: Stack) -> tuple[tuple, dict[str, int | str]]:
    """Return (tensors and strides, constants) of a stack of weights for the kernels."""
    if isinstance(stack, StoredGroups):
        values, scales = stack.values, stack.scales
        strides = values.stride(0), values.stride(1), scales.stride(0), scales.stride(1)
        return (*stack.tensors, stack.order, *strides), stack.constants | _NO_BLOCKS
    plain = isinstance(stack, torch.Tensor)
    weight, table = (stack, None) if plain else (stack.blocks, block_table(stack.kind, stack.blocks.device))
    constants = {"FORM": "plain" if plain else "blocks", "SCALES": "", "GROUP": 1}
    return (
        (weight, None, None, table, None, None, weight.stride(0), weight.stride(1), 0, 0),
        constants | (_NO_BLOCKS if plain else block_constants(stack.kind)),
    )


def _is_narrow(stack: Stack) -> bool:
    """Return whether tiles of few rows should have more columns, because the weights take few bytes."""
    return isinstance(stack, StoredGroups) and stack.bits == 4


def _tile_of(num_pairs: int, num_experts: int, stack: Stack, x: torch.Tensor) -> int:
    """Return the rows of a tile: 128 where experts have more rows than that and weights have 16 bits."""
    if num_pairs <= FEW_ROWS * num_experts:
        return 16
    plain = isinstance(stack, torch.Tensor) and x.element_size() == 2
    return (
        128 if plain and num_pairs > _MANY_ROWS * num_experts and limits.for_device(x.device).capability >= 90 else 64
    )


def fused_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: Stack,
    down: Stack,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    activation: str,
    first: int = 0,
    weigh_inputs: bool = False,
    fixed_order: bool = False,
) -> torch.Tensor:
    """Return for each row of x `[T, H]` the sum of its experts' outputs times `weights` `[T, k]`; ids are `[T, k]`.

    gate_up is `[E, 2 I, H]`, down `[E, H, I]`, their biases `[E, 2 I]` and `[E, H]`. The stacks begin with expert
    `first`; experts outside them add nothing. With `weigh_inputs` the weights multiply the experts' inputs instead.
    With `fixed_order` tiles have one size for any number of rows.
    """
    tokens, hidden = x.shape
    (stored, up_constants), (stored_down, down_constants) = arguments(gate_up), arguments(down)
    top_k, num_experts, size = ids.shape[1], len(stored[0]), stored[0].shape[1] // 2
    tile = _FIXED_TILE if fixed_order else _tile_of(tokens * top_k, num_experts, gate_up, x)
    pairs, experts, num_tiles = sort_by_expert(ids, first, num_experts, tile)
    weights, ids = weights.float().contiguous(), ids.contiguous()
    between = x.new_empty(tokens * top_k, size)
    columns, depth, warps = (32, 64, 4) if tile == 16 else (64, 64 if tile == 128 else 32, tile // 16)
    up_depth, down_depth = (2 * depth if _is_narrow(stack) and tile == 16 else depth for stack in (gate_up, down))
    _gate_up_kernel[(num_tiles, triton.cdiv(size, columns))](
        x, *stored, gate_up_bias, weights, pairs, experts, between, tokens * top_k, num_tiles, x.stride(0),
        HIDDEN=hidden, SIZE=size, TOP_K=top_k, ACTIVATION=ACTIVATIONS[activation], WEIGH=weigh_inputs, ROWS=tile,
        COLUMNS=columns, DEPTH=up_depth, **up_constants, num_warps=warps, num_stages=3,
    )  # fmt: skip
    results = torch.empty(tokens * top_k, hidden, dtype=torch.float32, device=x.device)
    _down_kernel[(num_tiles, triton.cdiv(hidden, 2 * columns))](
        between, *stored_down, down_bias, pairs, experts, results, tokens * top_k, num_tiles, HIDDEN=hidden,
        SIZE=size, ROWS=tile, COLUMNS=2 * columns, DEPTH=down_depth, **down_constants, num_warps=warps, num_stages=3,
    )  # fmt: skip
    return sum_by_token(results, ids, weights, torch.empty_like(x), first, num_experts, not weigh_inputs)


def sum_by_token(
    results: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor, first: int, num_experts: int,
    weigh: bool,
) -> torch.Tensor:  # fmt: skip
    """Write to `out` `[T, H]` the sums of each token's results, float32 `[T * k, H]`, of the experts `first`, `first` +
    1 ..., with `weigh` times `weights` `[T, k]`. Returns `out`.
    """
    (tokens, hidden), top_k = out.shape, ids.shape[1]
    block = min(1024, triton.next_power_of_2(hidden))
    _sum_kernel[(tokens, triton.cdiv(hidden, block))](
        results, ids, weights, out, first, hidden, out.stride(0), NUM=num_experts, TOP_K=top_k, WEIGH=weigh,
        BLOCK=block,
    )  # fmt: skip
    return out


@triton.jit
def activate(gate, up, ACTIVATION: tl.constexpr):
    if ACTIVATION == 0:
        result = gate / (1.0 + tl.exp(-gate)) * up
    elif ACTIVATION == 1:
        twice = 1.5957691216 * (gate + 0.044715 * gate * gate * gate)
        result = gate / (1.0 + tl.exp(-twice)) * up
    else:
        gate = tl.minimum(gate, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0)
        result = gate / (1.0 + tl.exp(-1.702 * gate)) * (up + 1.0)
    return result


@triton.jit
def _load(
    weight, scales, zeros, table, row_at, scale_at, tile, inside, SIZE: tl.constexpr, FORM: tl.constexpr,
    SCALES: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, CODES_AT: tl.constexpr, VALUES: tl.constexpr,
    BYTES: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Return columns `tile` * DEPTH to (`tile` + 1) * DEPTH of COLUMNS rows of a weight, of which `inside` exist:
    `[DEPTH, COLUMNS]`.
    """
    if FORM == "plain" or FORM == "blocks":
        depth = tile * DEPTH + tl.arange(0, DEPTH)
        mask = (depth < SIZE)[:, None] & inside[None, :]
        if FORM == "plain":
            result = tl.load(weight + row_at[None, :] + depth[:, None], mask=mask, other=0.0)
        else:
            at = weight + row_at[None, :] + (depth // VALUES * BYTES)[:, None]
            result = load_blocks(at, (depth % VALUES)[:, None], table, mask, KIND, CODES_AT)
    else:
        result = load_groups(
            weight, scales, zeros, table, row_at, scale_at, tile, SIZE, (SIZE + 1) // 2, inside, FORM, SCALES, GROUP,
            COLUMNS, DEPTH,
        )  # fmt: skip
    return result


@triton.jit
def _inputs(rows, order, tile, there, SIZE: tl.constexpr, DEPTH: tl.constexpr):
    """Return the inputs that these columns of the weight multiply, `[ROWS, DEPTH]`. `rows` points to their rows."""
    depth = tile * DEPTH + tl.arange(0, DEPTH)
    left = depth < SIZE
    at = depth if order is None else tl.load(order + depth, mask=left, other=0)
    return tl.load(rows[:, None] + at[None, :], mask=there[:, None] & left[None, :], other=0.0)


# these arguments change from step to step; specializing on them would recompile the kernel
@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def _gate_up_kernel(
    x, weight, scales, zeros, table, row_scales, order, expert_stride, row_stride, scales_expert_stride,
    scales_row_stride, bias, weights, pairs, experts, out, num_pairs, num_tiles, x_stride, HIDDEN: tl.constexpr,
    SIZE: tl.constexpr, TOP_K: tl.constexpr, ACTIVATION: tl.constexpr, WEIGH: tl.constexpr, FORM: tl.constexpr,
    SCALES: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, CODES_AT: tl.constexpr, VALUES: tl.constexpr,
    BYTES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    if tile < tl.load(experts + num_tiles):
        pair = tl.load(pairs + tile * ROWS + tl.arange(0, ROWS))
        there = pair < num_pairs
        expert = tl.load(experts + tile).to(tl.int64)
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside, own = columns < SIZE, columns.to(tl.int64)
        rows = x + (pair // TOP_K).to(tl.int64) * x_stride
        own_order = None if order is None else order + expert * HIDDEN
        gate_at = expert * expert_stride + own * row_stride
        up_at = gate_at + SIZE * row_stride
        gate_scale = expert * scales_expert_stride + own * scales_row_stride
        up_scale = gate_scale + SIZE * scales_row_stride
        gate = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        up = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        if WEIGH:
            factor = tl.load(weights + pair, mask=there, other=0.0)
        for k in range(0, tl.cdiv(HIDDEN, DEPTH)):
            a = _inputs(rows, own_order, k, there, HIDDEN, DEPTH)
            if WEIGH:
                a = (a.to(tl.float32) * factor[:, None]).to(a.dtype)
            b = _load(
                weight, scales, zeros, table, gate_at, gate_scale, k, inside, HIDDEN, FORM, SCALES, GROUP, KIND,
                CODES_AT, VALUES, BYTES, COLUMNS, DEPTH,
            )  # fmt: skip
            gate = tl.dot(a, b.to(a.dtype), gate, input_precision="ieee")
            b = _load(
                weight, scales, zeros, table, up_at, up_scale, k, inside, HIDDEN, FORM, SCALES, GROUP, KIND,
                CODES_AT, VALUES, BYTES, COLUMNS, DEPTH,
            )  # fmt: skip
            up = tl.dot(a, b.to(a.dtype), up, input_precision="ieee")
        own = expert * 2 * SIZE + columns
        if row_scales is not None:
            gate *= tl.load(row_scales + own, mask=inside, other=0.0)[None, :]
            up *= tl.load(row_scales + own + SIZE, mask=inside, other=0.0)[None, :]
        if bias is not None:
            gate += tl.load(bias + own, mask=inside, other=0.0).to(tl.float32)[None, :]
            up += tl.load(bias + own + SIZE, mask=inside, other=0.0).to(tl.float32)[None, :]
        result = activate(gate, up, ACTIVATION)
        at = out + pair.to(tl.int64)[:, None] * SIZE + columns[None, :]
        tl.store(at, result.to(out.dtype.element_ty), mask=there[:, None] & inside[None, :])


# these arguments change from step to step; specializing on them would recompile the kernel
@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def _down_kernel(
    x, weight, scales, zeros, table, row_scales, order, expert_stride, row_stride, scales_expert_stride,
    scales_row_stride, bias, pairs, experts, out, num_pairs, num_tiles, HIDDEN: tl.constexpr,
    SIZE: tl.constexpr, FORM: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr,
    CODES_AT: tl.constexpr, VALUES: tl.constexpr, BYTES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    if tile < tl.load(experts + num_tiles):
        pair = tl.load(pairs + tile * ROWS + tl.arange(0, ROWS))
        there = pair < num_pairs
        expert = tl.load(experts + tile).to(tl.int64)
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside, own = columns < HIDDEN, columns.to(tl.int64)
        rows = x + pair.to(tl.int64) * SIZE
        own_order = None if order is None else order + expert * SIZE
        row_at = expert * expert_stride + own * row_stride
        scale_at = expert * scales_expert_stride + own * scales_row_stride
        sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for k in range(0, tl.cdiv(SIZE, DEPTH)):
            a = _inputs(rows, own_order, k, there, SIZE, DEPTH)
            b = _load(
                weight, scales, zeros, table, row_at, scale_at, k, inside, SIZE, FORM, SCALES, GROUP, KIND,
                CODES_AT, VALUES, BYTES, COLUMNS, DEPTH,
            )  # fmt: skip
            sums = tl.dot(a, b.to(a.dtype), sums, input_precision="ieee")
        if row_scales is not None:
            sums *= tl.load(row_scales + expert * HIDDEN + columns, mask=inside, other=0.0)[None, :]
        if bias is not None:
            sums += tl.load(bias + expert * HIDDEN + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
        result_at = out + pair.to(tl.int64)[:, None] * HIDDEN + columns[None, :]
        tl.store(result_at, sums, mask=there[:, None] & inside[None, :])


@triton.jit
def _sum_kernel(
    results, ids, weights, out, first, hidden, out_stride, NUM: tl.constexpr, TOP_K: tl.constexpr,
    WEIGH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < hidden
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for j in tl.static_range(TOP_K):
        pair = token * TOP_K + j
        expert = tl.load(ids + pair) - first
        # another rank's expert has no results here
        size = tl.where((expert >= 0) & (expert < NUM), hidden, 0)
        row = tl.load(results + pair * hidden + columns, mask=columns < size, other=0.0)
        if WEIGH:
            row *= tl.load(weights + pair)
        total += row
    tl.store(out + token * out_stride + columns, total.to(out.dtype.element_ty), mask=inside)
