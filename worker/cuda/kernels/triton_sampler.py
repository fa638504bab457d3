"""Sampling in Triton: greedy rows, random rows, and rows with a top-k, top-p or min-p, in one launch for all rows of a
step, or two if a row has a filter.

Every logit is read, and of each tile of a row its largest value is stored with its index and the sum of its weights
exp((x - max) / temperature). The last program of a row to do so picks the token; with filters, which take more
registers, a second kernel does, one program per row.

- Without filters it scales the tiles' sums to the row's maximum, finds the tile in which the running sum passes
`uniform * total`, and reads that tile again to find the token. It adds float32 weights in float64 where the twin adds
integers, so a token may differ if the uniform number falls on the edge between two tokens.
- With filters it computes the same result as the twin, in the twin's integers: q = floor(w * 2^40), thresholds on w,
and the first token, by id, at which the running sum of the kept q exceeds floor(uniform * total). One pass over the row
makes a histogram of the weights' highest bits. It gives a lower bound above which the weights include all tokens that
the filters can keep, or enough of them nearly always. A second pass collects those tokens in the order of their ids;
thresholds and token are found among them. If they do not suffice (a flat distribution with a large top_p), the
thresholds are found by bisection over the whole row, with the same result.

The torch twin and the source of the uniform number are in `worker/sampling/arithmetic.py`. A row's result depends on
that row only, not on the rest of the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.worker.cuda.kernels.triton_split import COUNTERS, comes_last, counters_of

TILE = 4096  # logits per program
CANDIDATES = 4096  # tokens of a row that are searched first for those that the filters keep

# tensors that begin anywhere in a larger one; specializing on that would recompile the kernel
_ANYWHERE = ["rows", "positions", "tile_sum"]
_BASE = tl.constexpr((127 - 40) << 23)  # the bits of 2^-40: smaller weights are treated as equal
_TOP = tl.constexpr(40 << 23)  # the key of weight 1, the weight of the largest logit: keys have 29 bits
_BIN_SHIFT = tl.constexpr(19)
_BINS = tl.constexpr(1024)  # bins of the histogram of keys >> _BIN_SHIFT, at most 640 used
_SCALE = tl.constexpr(1099511627776.0)  # 2^40


@triton.jit
def _weights(x, maximum, temperature):
    """Return exp((x - maximum) / temperature). A maximum of -inf (all excluded) gives zeros instead of NaN."""
    reference = tl.where(maximum == float("-inf"), 0.0, maximum)
    return tl.exp((x - reference) / temperature)


@triton.jit
def _uniform(state, position):
    """Compute `sampling_math.uniform`: SplitMix64 in wrapping int64 arithmetic. A right shift preserves the
    sign, hence the masks.
    """
    z = state + (position + 1) * -7046029254386353131
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    z = z ^ ((z >> 31) & 0x1FFFFFFFF)
    return ((z >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def _store_tile(
    logits, temperature, tile_max, tile_index, tile_sum, row_stride, size, num_tiles, TILE: tl.constexpr
):  # fmt: skip
    """Store what is needed of this program's tile of its row."""
    i, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tile * TILE + tl.arange(0, TILE)
    x = tl.load(logits + i * row_stride + columns, mask=columns < size, other=float("-inf")).to(tl.float32)
    maximum = tl.max(x, 0)
    first = tl.min(tl.where(x == maximum, columns, size), 0)
    has_nan = tl.max((x != x).to(tl.int32), 0)
    weights = _weights(x, maximum, tl.where(temperature > 0, temperature, 1.0))
    at = i * num_tiles + tile
    tl.store(tile_max + at, tl.where(has_nan > 0, float("nan"), maximum))
    tl.store(tile_index + at, tl.minimum(first, size - 1))
    tl.store(tile_sum + at, tl.sum(weights, 0))


@triton.jit(do_not_specialize_on_alignment=_ANYWHERE)
def _tiles_kernel(
    logits, rows, temperatures, tile_max, tile_index, tile_sum, row_stride, size, num_tiles, TILE: tl.constexpr
):
    temperature = tl.load(temperatures + tl.load(rows + tl.program_id(0)))
    _store_tile(logits, temperature, tile_max, tile_index, tile_sum, row_stride, size, num_tiles, TILE)


@triton.jit
def _row_maximum(row_max, num_tiles, BLOCK: tl.constexpr):
    """Return (largest values of a row's tiles, the largest of them, whether there is a NaN)."""
    tiles = tl.arange(0, BLOCK)
    maxima = tl.load(row_max + tiles, mask=tiles < num_tiles, other=float("-inf"), cache_modifier=".cg")
    return maxima, tl.max(maxima, 0), tl.max((maxima != maxima).to(tl.int32), 0) > 0


@triton.jit
def _unfiltered_token(
    row_logits, row_index, row_sum, maxima, maximum, temperature, state, position, size, num_tiles,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the token of a row without filters. `state` and `position` are where the row's are stored."""
    tiles = tl.arange(0, BLOCK)
    mask = tiles < num_tiles
    if temperature > 0:
        sums = tl.load(row_sum + tiles, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float64)
        sums *= _weights(maxima, maximum, temperature).to(tl.float64)
        sums = tl.where(mask & (sums > 0.0), sums, 0.0)
        running = tl.cumsum(sums, 0)
        target = _uniform(tl.load(state), tl.load(position)) * tl.sum(sums, 0)
        last = tl.max(tl.where(sums > 0.0, tiles, 0), 0)
        tile = tl.minimum(tl.sum((mask & (running <= target)).to(tl.int32), 0), last)
        target -= tl.sum(tl.where(tiles < tile, sums, 0.0), 0)
        lanes = tl.arange(0, TILE)
        w = _load_weights(row_logits, tile, maximum, temperature, size, TILE).to(tl.float64)
        w = tl.where(w >= 9.094947017729282e-13, w, 0.0)  # 2^-40, as the twin
        running = tl.cumsum(w, 0)
        last = tl.max(tl.where(w > 0.0, lanes, 0), 0)
        token = tile * TILE + tl.minimum(tl.sum((running <= target).to(tl.int32), 0), last)
    else:
        first = tl.min(tl.where(maxima == maximum, tiles, num_tiles - 1), 0)
        token = tl.load(row_index + first, cache_modifier=".cg")
    return token.to(tl.int64)


@triton.jit
def _store_result(values, token_ids, tokens, i, row, position, length, tokens_stride, token, maximum, has_nan):
    """Store the token of a sampling row, also in the row `tokens` of its request, as `Ops.append_tokens` does."""
    tl.store(values + i, tl.where(has_nan, float("nan"), maximum))
    token = tl.where(has_nan | (tl.abs(maximum) == float("inf")), -1, token)
    tl.store(token_ids + i, token)
    if tokens is not None:
        stored = tl.maximum(token, 0).to(tokens.dtype.element_ty)
        tl.store(tokens + row * tokens_stride + position, stored, mask=position < length)


@triton.jit(do_not_specialize_on_alignment=_ANYWHERE)
def _sample_kernel(
    logits, rows, positions, temperatures, states, tile_max, tile_index, tile_sum, counters, values, token_ids, tokens,
    row_stride, size, num_tiles, length, tokens_stride, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + i)
    temperature = tl.load(temperatures + row)
    _store_tile(logits, temperature, tile_max, tile_index, tile_sum, row_stride, size, num_tiles, TILE)
    if comes_last(counters + i, num_tiles):
        maxima, maximum, has_nan = _row_maximum(tile_max + i * num_tiles, num_tiles, BLOCK)
        token = _unfiltered_token(
            logits + i * row_stride, tile_index + i * num_tiles, tile_sum + i * num_tiles, maxima, maximum,
            temperature, states + row, positions + i, size, num_tiles, TILE, BLOCK,
        )  # fmt: skip
        position = tl.load(positions + i)
        _store_result(values, token_ids, tokens, i, row, position, length, tokens_stride, token, maximum, has_nan)


@triton.jit
def _keys(w):
    """Return the bits of weights >= 2^-40: integers from 0 that order as the weights do."""
    return tl.minimum(tl.maximum(w.to(tl.int32, bitcast=True) - _BASE, 0), _TOP)


@triton.jit
def _load_weights(row_logits, tile, maximum, temperature, size, TILE: tl.constexpr):
    """Return weights of a tile; 0 after the end of the row."""
    columns = tile * TILE + tl.arange(0, TILE)
    x = tl.load(row_logits + columns, mask=columns < size, other=float("-inf")).to(tl.float32)
    return _weights(x, maximum, temperature)


@triton.jit
def _amounts(w, min_p):
    """Return the twin's integers, 0 for weights that min-p drops."""
    return tl.where(w >= min_p, (w * _SCALE).to(tl.int64), 0)


@triton.jit
def _sums_reach(amounts, keys, needed):
    """Return the largest key such that the amounts of all keys >= it sum to `needed`. All amounts together do."""
    found = tl.zeros([], tl.int32)
    for level in range(29):
        trial = found | (1 << (28 - level))
        found = tl.where(tl.sum(tl.where(keys >= trial, amounts, 0), 0) >= needed, trial, found)
    return found


@triton.jit
def _sum_from(row_logits, key, count, maximum, temperature, min_p, size, num_tiles, TILE: tl.constexpr):
    """Return the sum over a whole row of the amounts of keys >= `key`; with `count`, the number of such keys,
    regardless of min-p.
    """
    total = tl.zeros([TILE], tl.int64)
    for tile in range(0, num_tiles):
        w = _load_weights(row_logits, tile, maximum, temperature, size, TILE)
        columns = tile * TILE + tl.arange(0, TILE)
        amounts = tl.where(count, tl.full([TILE], 1, tl.int64), _amounts(w, min_p))
        total += tl.where((_keys(w) >= key) & (columns < size), amounts, 0)
    return tl.sum(total, 0)


@triton.jit
def _row_sums_reach(
    row_logits, needed, count, lowest, maximum, temperature, min_p, size, num_tiles, TILE: tl.constexpr,
):  # fmt: skip
    """Return `_sums_reach` over a whole row, of the keys >= `lowest`."""
    found = tl.zeros([], tl.int32)
    for level in range(29):
        trial = found | (1 << (28 - level))
        key = tl.maximum(trial, lowest)
        reached = _sum_from(row_logits, key, count, maximum, temperature, min_p, size, num_tiles, TILE)
        found = tl.where(reached >= needed, trial, found)
    return found


@triton.jit
def _needed(total, top_p):
    """Return the part of `total` that the nucleus must hold."""
    return tl.minimum(tl.maximum(tl.ceil(total.to(tl.float64) * top_p).to(tl.int64), 1), total)


@triton.jit
def _target(total, uniform):
    return tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)


@triton.jit
def _invert_row(row_logits, lowest, target, maximum, temperature, min_p, size, num_tiles, TILE: tl.constexpr):
    """Return the first token of a row at which the running sum of the amounts of keys >= `lowest` exceeds `target`."""
    token = tl.zeros([], tl.int32)
    before = tl.zeros([], tl.int64)
    for tile in range(0, num_tiles):
        w = _load_weights(row_logits, tile, maximum, temperature, size, TILE)
        running = before + tl.cumsum(tl.where(_keys(w) >= lowest, _amounts(w, min_p), 0), 0)
        # the running sum never falls: this counts the tokens before the result
        token += tl.sum((running <= target).to(tl.int32), 0)
        before = tl.max(running, 0)
    return tl.minimum(token, size - 1)


@triton.jit
def _filtered_token(
    row_logits, tile_max, indices, weights, maximum, temperature, uniform, top_k, top_p, min_p,
    size, num_tiles, TILE: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Return the sampled token of a row with filters. `indices` and `weights` are its buffers for candidates."""
    histogram = tl.zeros([_BINS], tl.int32)
    sums = tl.zeros([TILE], tl.int64)
    for tile in range(0, num_tiles):
        w = _load_weights(row_logits, tile, maximum, temperature, size, TILE)
        histogram += tl.histogram(_keys(w) >> _BIN_SHIFT, _BINS)
        sums += _amounts(w, min_p)
    total = tl.sum(sums, 0)

    # Positions after the end of the row count in bin 0: the searches below may find more there than needed, never less.
    bins = tl.arange(0, _BINS)
    from_top = tl.sum(histogram, 0) - tl.cumsum(histogram, 0) + histogram
    edges = ((tl.minimum(bins, _TOP >> _BIN_SHIFT) << _BIN_SHIFT) + _BASE).to(tl.float32, bitcast=True)
    # Lower bound of the sum of the weights in each bin.
    least = tl.where(bins > 0, (edges * _SCALE).to(tl.int64), 0) * histogram.to(tl.int64)
    mass_from_top = tl.sum(least, 0) - tl.cumsum(least, 0) + least
    kth = tl.where(top_k > 0, tl.sum((from_top >= top_k).to(tl.int32), 0) - 1, 0)
    nucleus = tl.sum((mass_from_top >= _needed(total, top_p)).to(tl.int32), 0) - 1
    nucleus = tl.where((top_p < 1) & (top_k == 0), nucleus, 0)
    least_kept = _keys(min_p + tl.zeros([], tl.float32)) >> _BIN_SHIFT
    enough = tl.maximum(tl.maximum(kth, nucleus), least_kept)  # the filters drop everything below this bin
    fitting = tl.sum((from_top > CANDIDATES).to(tl.int32), 0)  # below this bin the candidates exceed their buffers
    first_key = tl.maximum(enough, fitting) << _BIN_SHIFT

    num = tl.zeros([], tl.int32)
    for tile in range(0, num_tiles):
        if _keys(_weights(tl.load(tile_max + tile), maximum, temperature)) >= first_key:
            w = _load_weights(row_logits, tile, maximum, temperature, size, TILE)
            columns = tile * TILE + tl.arange(0, TILE)
            chosen = (_keys(w) >= first_key) & (columns < size)
            slots = num + tl.cumsum(chosen.to(tl.int32), 0) - 1
            tl.store(indices + slots, columns, mask=chosen & (slots < CANDIDATES))
            tl.store(weights + slots, w, mask=chosen & (slots < CANDIDATES))
            num += tl.sum(chosen.to(tl.int32), 0)
    tl.debug_barrier()  # make the stores of each thread visible to the others

    lanes = tl.arange(0, CANDIDATES)
    w = tl.load(weights + lanes, mask=lanes < num, other=0.0)
    keys = tl.where(lanes < num, _keys(w), -1)
    amounts = tl.where(lanes < num, _amounts(w, min_p), 0)
    has_kth = (top_k > 0) & (top_k <= num)
    lowest = tl.where(has_kth, _sums_reach((lanes < num).to(tl.int32), keys, top_k), 0)
    amounts = tl.where(keys >= lowest, amounts, 0)
    held = tl.sum(amounts, 0)
    complete = has_kth | (enough >= fitting)  # the candidates include all tokens that remain before top-p
    total = tl.where(top_k > 0, held, total)
    needed = _needed(total, top_p)
    if complete | ((top_k == 0) & (top_p < 1) & (held >= needed)):
        lowest = tl.where(top_p < 1, _sums_reach(amounts, keys, needed), 0)
        amounts = tl.where(keys >= lowest, amounts, 0)
        target = _target(tl.sum(amounts, 0), uniform)
        at = tl.sum((tl.cumsum(amounts, 0) <= target).to(tl.int32), 0)
        tokens = tl.load(indices + lanes, mask=lanes < num, other=0)
        token = tl.sum(tl.where(lanes == tl.minimum(at, num - 1), tokens, 0), 0)
    else:
        lowest = tl.zeros([], tl.int32)
        if top_k > 0:
            lowest = _row_sums_reach(
                row_logits, top_k.to(tl.int64), True, 0, maximum, temperature, min_p, size, num_tiles, TILE
            )
        if top_p < 1:
            total = _sum_from(row_logits, lowest, False, maximum, temperature, min_p, size, num_tiles, TILE)
            nucleus = _row_sums_reach(
                row_logits, _needed(total, top_p), False, lowest, maximum, temperature, min_p, size, num_tiles, TILE
            )
            lowest = tl.maximum(lowest, nucleus)
        total = _sum_from(row_logits, lowest, False, maximum, temperature, min_p, size, num_tiles, TILE)
        target = _target(total, uniform)
        token = _invert_row(row_logits, lowest, target, maximum, temperature, min_p, size, num_tiles, TILE)
    return tl.minimum(tl.maximum(token, 0), size - 1)


@triton.jit(do_not_specialize_on_alignment=_ANYWHERE)
def _choose_kernel(
    logits, rows, positions, temperatures, states, top_ks, top_ps, min_ps, tile_max, tile_index, tile_sum,
    indices, weights, values, token_ids, tokens, row_stride, size, num_tiles, length, tokens_stride,
    TILE: tl.constexpr, BLOCK: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + i)
    temperature = tl.load(temperatures + row)
    maxima, maximum, has_nan = _row_maximum(tile_max + i * num_tiles, num_tiles, BLOCK)
    top_k, top_p, min_p = tl.load(top_ks + row).to(tl.int32), tl.load(top_ps + row), tl.load(min_ps + row)
    filters = (temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0))
    if filters & (has_nan == 0) & (tl.abs(maximum) < float("inf")):
        uniform = _uniform(tl.load(states + row), tl.load(positions + i))
        token = _filtered_token(
            logits + i * row_stride, tile_max + i * num_tiles, indices + i * CANDIDATES, weights + i * CANDIDATES,
            maximum, temperature, uniform, top_k, top_p, min_p, size, num_tiles, TILE, CANDIDATES,
        ).to(tl.int64)  # fmt: skip
    else:
        token = _unfiltered_token(
            logits + i * row_stride, tile_index + i * num_tiles, tile_sum + i * num_tiles, maxima, maximum,
            temperature, states + row, positions + i, size, num_tiles, TILE, BLOCK,
        )  # fmt: skip
    position = tl.load(positions + i)
    _store_result(values, token_ids, tokens, i, row, position, length, tokens_stride, token, maximum, has_nan)


def sample(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    temperatures: torch.Tensor,
    states: torch.Tensor,
    top_ks: torch.Tensor | None = None,
    top_ps: torch.Tensor | None = None,
    min_ps: torch.Tensor | None = None,
    tokens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (largest value `[S]` float32, sampled token `[S]` int64) of each row of logits `[S, V]`, float32 or
    of 16 bits. The value is NaN if any logit is NaN; if the value is not finite, the token is -1.

    rows and positions are `[S]` int64. The other arguments are tables that `rows` index: temperatures float32 (0:
    greedy, the first of the largest logits), states int64 (`sampling_math.seed_state`) and, unless no row of the batch
    has a filter, top_ks int64 (0: off), top_ps float64 (1: off) and min_ps float32 (0: off). The token is also stored
    in the token table `tokens`, if given, in its row at its position.
    """
    num_rows, size = logits.shape
    if num_rows > COUNTERS:
        filters = () if top_ks is None else (top_ks, top_ps, min_ps)
        parts = zip(*(x.split(COUNTERS) for x in (logits, rows, positions)))
        values, token_ids = zip(*(sample(*part, temperatures, states, *filters, tokens=tokens) for part in parts))
        return torch.cat(values), torch.cat(token_ids)
    num_tiles = triton.cdiv(size, TILE)
    tile_max, tile_sum = logits.new_empty(2, num_rows, num_tiles, dtype=torch.float32)
    tile_index = logits.new_empty(num_rows, num_tiles, dtype=torch.int32)
    values, token_ids = (logits.new_empty(num_rows, dtype=dtype) for dtype in (torch.float32, torch.int64))
    partial, sizes = (tile_max, tile_index, tile_sum), (logits.stride(0), size, num_tiles)
    table = (0, 0) if tokens is None else (tokens.shape[1], tokens.stride(0))
    block = max(16, triton.next_power_of_2(num_tiles))
    if top_ks is None:
        _sample_kernel[(num_rows, num_tiles)](
            logits, rows, positions, temperatures, states, *partial, counters_of(logits.device), values, token_ids,
            tokens, *sizes, *table, TILE=TILE, BLOCK=block, num_warps=8)  # fmt: skip
        return values, token_ids
    indices, weights = (logits.new_empty(num_rows, CANDIDATES, dtype=dtype) for dtype in (torch.int32, torch.float32))
    _tiles_kernel[(num_rows, num_tiles)](logits, rows, temperatures, *partial, *sizes, TILE=TILE, num_warps=8)
    _choose_kernel[(num_rows,)](
        logits, rows, positions, temperatures, states, top_ks, top_ps, min_ps, *partial, indices, weights, values,
        token_ids, tokens, *sizes, *table, TILE=TILE, BLOCK=block, CANDIDATES=CANDIDATES, num_warps=8)  # fmt: skip
    return values, token_ids
