"""Sampling in Triton for rows without filters: greedy, or random with a temperature alone. The vocabulary is read once.

A first kernel reads every logit and leaves, for each tile of a row, its largest value with its index and the sum of its weights exp((x - max) / temperature).
A second one, a program per row, puts the tiles' sums on one scale, finds the tile in which the running sum passes `uniform * total`, and reads that one
again to find the token. The uniform number is that of `worker/sampling_math.py`, which is the twin in torch: both invert the same distribution at the same
number. The twin does so in integers, this in float64 from float32 weights, so a token may differ where the number falls on an edge between two.

A row's result depends on that row alone, whatever else is in the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE = 4096  # logits of one program


@triton.jit
def _weights(x, maximum, temperature):
    """exp((x - maximum) / temperature). A maximum of -inf (everything is excluded) gives zeros instead of NaN."""
    reference = tl.where(maximum == float("-inf"), 0.0, maximum)
    return tl.exp((x - reference) / temperature)


@triton.jit
def _uniform(state, position):
    """`sampling_math.uniform`: SplitMix64 in int64, whose products wrap around; a shift right keeps the sign, hence the masks."""
    z = state + (position + 1) * -7046029254386353131
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    z = z ^ ((z >> 31) & 0x1FFFFFFFF)
    return ((z >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def _tiles_kernel(logits, rows, temperatures, tile_max, tile_index, tile_sum, row_stride, size, num_tiles, TILE: tl.constexpr):
    i, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tile * TILE + tl.arange(0, TILE)
    x = tl.load(logits + i * row_stride + columns, mask=columns < size, other=float("-inf"))
    temperature = tl.load(temperatures + tl.load(rows + i))
    maximum = tl.max(x, 0)
    first = tl.min(tl.where(x == maximum, columns, size), 0)
    has_nan = tl.max((x != x).to(tl.int32), 0)
    weights = _weights(x, maximum, tl.where(temperature > 0, temperature, 1.0))
    at = i * num_tiles + tile
    tl.store(tile_max + at, tl.where(has_nan > 0, float("nan"), maximum))
    tl.store(tile_index + at, tl.minimum(first, size - 1))
    tl.store(tile_sum + at, tl.sum(weights, 0))


@triton.jit
def _choose_kernel(
    logits, rows, positions, temperatures, states, tile_max, tile_index, tile_sum, values, token_ids,
    row_stride, size, num_tiles, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + i)
    temperature = tl.load(temperatures + row)
    tiles = tl.arange(0, BLOCK)
    mask = tiles < num_tiles
    maxima = tl.load(tile_max + i * num_tiles + tiles, mask=mask, other=float("-inf"))
    maximum = tl.max(maxima, 0)
    has_nan = tl.max((maxima != maxima).to(tl.int32), 0)
    tl.store(values + i, tl.where(has_nan > 0, float("nan"), maximum))
    if temperature > 0:
        sums = tl.load(tile_sum + i * num_tiles + tiles, mask=mask, other=0.0).to(tl.float64) * _weights(maxima, maximum, temperature).to(tl.float64)
        sums = tl.where(mask & (sums > 0.0), sums, 0.0)
        running = tl.cumsum(sums, 0)
        target = _uniform(tl.load(states + row), tl.load(positions + i)) * tl.sum(sums, 0)
        last = tl.max(tl.where(sums > 0.0, tiles, 0), 0)
        tile = tl.minimum(tl.sum((mask & (running <= target)).to(tl.int32), 0), last)
        target -= tl.sum(tl.where(tiles < tile, sums, 0.0), 0)
        lanes = tl.arange(0, TILE)
        columns = tile * TILE + lanes
        x = tl.load(logits + i * row_stride + columns, mask=columns < size, other=float("-inf"))
        weights = _weights(x, maximum, temperature).to(tl.float64)
        weights = tl.where(weights >= 9.094947017729282e-13, weights, 0.0)  # 2^-40, as the twin
        running = tl.cumsum(weights, 0)
        last = tl.max(tl.where(weights > 0.0, lanes, 0), 0)
        lane = tl.minimum(tl.sum((running <= target).to(tl.int32), 0), last)
        tl.store(token_ids + i, (tile * TILE + lane).to(tl.int64))
    else:
        first = tl.min(tl.where(maxima == maximum, tiles, num_tiles - 1), 0)
        tl.store(token_ids + i, tl.load(tile_index + i * num_tiles + first).to(tl.int64))


def sample(logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, temperatures: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(largest value `[S]` float32, sampled token `[S]` int64) of each row of logits `[S, V]` float32. The value is NaN if any logit is; the token then means nothing.

    rows and positions are `[S]` int64. temperatures float32 (0: greedy, the first of the largest) and states int64 (`sampling_math.seed_state`) are tables that
    `rows` index.
    """
    num_rows, size = logits.shape
    num_tiles = triton.cdiv(size, TILE)
    tile_max, tile_sum = logits.new_empty(num_rows, num_tiles), logits.new_empty(num_rows, num_tiles)
    tile_index = logits.new_empty(num_rows, num_tiles, dtype=torch.int32)
    values, token_ids = logits.new_empty(num_rows), logits.new_empty(num_rows, dtype=torch.int64)
    _tiles_kernel[(num_rows, num_tiles)](logits, rows, temperatures, tile_max, tile_index, tile_sum, logits.stride(0), size, num_tiles, TILE=TILE, num_warps=8)
    _choose_kernel[(num_rows,)](logits, rows, positions, temperatures, states, tile_max, tile_index, tile_sum, values, token_ids,
                                logits.stride(0), size, num_tiles, TILE=TILE, BLOCK=max(16, triton.next_power_of_2(num_tiles)), num_warps=8)  # fmt: skip
    return values, token_ids
