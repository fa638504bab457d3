"""What requests ask of logits besides sampling in Triton, one launch each for all rows of a step: masks of
grammars, penalties of tokens that a request has, and log-probabilities.

The torch twins are in `sampling/grammar.py`, `sampling/processors.py` and `sampling/logprobs.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from quire.worker.cuda.kernels.triton_split import COUNTERS, comes_last, counters_of

_TILE = 4096  # logits per program
_COUNTED = 2048  # logits per program with counts, which take registers
_BLOCK = 1024  # tokens of a request that are counted at once


@triton.jit
def _exclude_kernel(logits, rows, masks, logits_stride, masks_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < SIZE
    words = tl.load(masks + i.to(tl.int64) * masks_stride + tokens // 32, mask=inside, other=-1)
    excluded = inside & (((words >> (tokens % 32)) & 1) == 0)
    row = tl.load(rows + i)
    tl.store(logits + row * logits_stride + tokens, float("-inf"), mask=excluded)


def exclude_by_bitmask(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    """See `Ops.exclude_by_bitmask`."""
    size = logits.shape[1]
    grid = (len(rows), triton.cdiv(size, _TILE))
    _exclude_kernel[grid](logits, rows, masks, logits.stride(0), masks.stride(0), SIZE=size, BLOCK=_TILE)


def penalize(logits: torch.Tensor, tokens: torch.Tensor, numbers: torch.Tensor, values: torch.Tensor) -> None:
    """Change rows of logits `[S, V]` float32 by the tokens in rows of the token table `tokens`.

    numbers is `[5, n]` int64: for each changed row of the logits its index, its request's row in `tokens`, how many
    tokens that has, and from which of them on they count, for the repetition penalty and for the two others. values is
    `[>= 3, n]` float32: repetition, frequency and presence penalty.
    """
    num, size = numbers.shape[1], logits.shape[1]
    _penalize_kernel[(num, triton.cdiv(size, _COUNTED))](
        logits, tokens, numbers, values, num, logits.stride(0), tokens.stride(0), size, TILE=_COUNTED, BLOCK=_BLOCK,
        num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _count(row_tokens, first, last, base, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Return how often each of the tokens from `base` on is among those at positions [first, last)."""
    counts = tl.zeros([TILE], tl.int32)
    for at in range(first, last, BLOCK):
        position = at + tl.arange(0, BLOCK)
        there = position < last
        token = tl.load(row_tokens + position, mask=there, other=-1).to(tl.int32) - base
        there = there & (token >= 0) & (token < TILE)
        counts += tl.histogram(tl.where(there, token, 0), TILE, mask=there)
    return counts


# these change from step to step; specializing on them would recompile the kernel
@triton.jit(do_not_specialize=["num"], do_not_specialize_on_alignment=["numbers", "values"])
def _penalize_kernel(
    logits, tokens, numbers, values, num, logits_stride, tokens_stride, size, TILE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    i, base = tl.program_id(0), tl.program_id(1) * TILE
    row, length = tl.load(numbers + num + i), tl.load(numbers + 2 * num + i).to(tl.int32)
    start, prompt = (tl.load(numbers + 3 * num + i).to(tl.int32), tl.load(numbers + 4 * num + i).to(tl.int32))
    repetition, frequency = tl.load(values + i), tl.load(values + num + i)
    presence = tl.load(values + 2 * num + i)
    row_tokens = tokens + row * tokens_stride
    count = _count(row_tokens, prompt, length, base, TILE, BLOCK)
    found = (count > 0) | (_count(row_tokens, start, prompt, base, TILE, BLOCK) > 0)
    lanes = base + tl.arange(0, TILE)
    found = found & (lanes < size)
    at = logits + tl.load(numbers + i) * logits_stride + lanes
    x = tl.load(at, mask=found, other=0.0)
    x = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
    x = x - count.to(tl.float32) * frequency
    tl.store(at, x - tl.where(count > 0, presence, 0.0), mask=found)


def logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, best: tuple[torch.Tensor, torch.Tensor] | None, normalize: bool
) -> tuple[torch.Tensor, Callable[[torch.Tensor], tuple[torch.Tensor, ...]]]:
    """Return (results, a function that takes them apart as (token ids `[n, 1 + k]`, their values, ranks `[n]`)) for the
    tokens `token_ids` `[n]` of logits `[n, V]` float32, where a negative one stands for token 0, and the k `best`
    (values, indices) of each row. See `sampling.logprobs.entries`.
    """
    (rows, size), num = logits.shape, 0 if best is None else best[0].shape[1]
    packed = logits.new_empty(_packed_size(rows, num), dtype=torch.int64)
    chosen, values, ranks = _unpacked(packed, rows, num)
    for first in range(0, rows, COUNTERS):
        part = slice(first, first + COUNTERS)
        _launch_logprobs(
            logits[part], token_ids[part], best and tuple(x[part] for x in best), chosen[part], values[part],
            ranks[part], normalize, triton.cdiv(size, _TILE),
        )  # fmt: skip
    return packed, lambda results: _unpacked(results, rows, num)


def _launch_logprobs(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    best: tuple[torch.Tensor, ...] | None,
    chosen: torch.Tensor,
    values: torch.Tensor,
    ranks: torch.Tensor,
    normalize: bool,
    num_tiles: int,
) -> None:
    rows, width = chosen.shape
    partial = logits.new_empty(3, rows, num_tiles)
    best_values, best_ids = best or (None, None)
    _logprobs_kernel[(rows, num_tiles)](
        logits, token_ids, best_values, best_ids, *partial, counters_of(logits.device), chosen, values, ranks,
        logits.stride(0), logits.shape[1], num_tiles, width - 1, TILE=_TILE,
        TILES=max(16, triton.next_power_of_2(num_tiles)), BLOCK=128, NORMALIZE=normalize, num_warps=8,
    )  # fmt: skip


def _packed_size(rows: int, num: int) -> int:
    return rows * (2 + num) + (rows * (1 + num) + 1) // 2


def _unpacked(packed: torch.Tensor, rows: int, num: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (token ids `[n, 1 + num]`, their values float32, ranks `[n]` of the first) that share the memory of
    `packed` int64: one copy brings all to the host.
    """
    size = rows * (1 + num)
    values = packed[size + rows :].view(torch.float32)[:size]
    return packed[:size].view(rows, -1), values.view(rows, -1), packed[size : size + rows]


@triton.jit
def _finite(x):
    return tl.where(tl.abs(x) == float("inf"), 0.0, x)


# parts of larger tensors begin anywhere
@triton.jit(
    do_not_specialize=["num"],
    do_not_specialize_on_alignment=[
        "logits", "token_ids", "best_values", "best_ids", "tile_max", "tile_sum", "tile_above", "chosen", "values",
        "ranks",
    ],
)  # fmt: skip
def _logprobs_kernel(
    logits, token_ids, best_values, best_ids, tile_max, tile_sum, tile_above, counters, chosen, values, ranks,
    row_stride, size, num_tiles, num, TILE: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr,
    NORMALIZE: tl.constexpr,
):  # fmt: skip
    i, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tile * TILE + tl.arange(0, TILE)
    x = tl.load(logits + i * row_stride + columns, mask=columns < size, other=float("-inf"))
    token = tl.maximum(tl.load(token_ids + i), 0)
    value = tl.load(logits + i * row_stride + token)
    maximum = tl.max(x, 0)
    at = i * num_tiles + tile
    tl.store(tile_max + at, maximum)
    tl.store(tile_sum + at, tl.sum(tl.exp(x - _finite(maximum)), 0))
    tl.store(tile_above + at, tl.sum((x > value).to(tl.int32), 0).to(tl.float32))  # exact: a tile is small
    if comes_last(counters + i, num_tiles):
        tiles = tl.arange(0, TILES)
        mask, there = tiles < num_tiles, i * num_tiles + tiles
        above = tl.load(tile_above + there, mask=mask, other=0.0, cache_modifier=".cg")
        tl.store(ranks + i, tl.sum(above.to(tl.int64), 0) + 1)
        normalizer = 0.0
        if NORMALIZE:
            maxima = tl.load(tile_max + there, mask=mask, other=float("-inf"), cache_modifier=".cg")
            sums = tl.load(tile_sum + there, mask=mask, other=0.0, cache_modifier=".cg")
            largest = _finite(tl.max(maxima, 0))
            factors = tl.where(maxima == float("-inf"), 0.0, tl.exp(_finite(maxima) - largest))
            normalizer = largest + tl.log(tl.sum(sums * factors, 0))
        to = i * (num + 1)
        tl.store(chosen + to, token)
        tl.store(values + to, value - normalizer)
        if best_values is not None:
            for first in range(0, num, BLOCK):
                lanes = first + tl.arange(0, BLOCK)
                inside = lanes < num
                ids = tl.load(best_ids + i * num + lanes, mask=inside, other=0)
                logit = tl.load(best_values + i * num + lanes, mask=inside, other=0.0)
                tl.store(chosen + to + 1 + lanes, ids, mask=inside)
                tl.store(values + to + 1 + lanes, logit - normalizer, mask=inside)
