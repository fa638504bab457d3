"""The arithmetic of sampling: map a uniform random number to a token of a row of logits. Each row is independent of the
other rows in the batch.

A row's logits x become weights w = exp((x - max x) / temperature), elementwise, and these become integers q = floor(w *
2^40). All later operations are sums and comparisons of integers, which are exact in any order: the split of a batch,
the choice between the two paths below and the device's reduction order cannot change a token. A token whose weight is
below 2^-40 of the largest weight is never picked.

Filters are thresholds on w, so tokens of equal weight are all kept or all dropped. In this order: min-p keeps w >=
min_p; top-k keeps weights not below the k-th largest; top-p keeps the fewest largest weights whose sum reaches top_p of
the sum that min-p and top-k leave. The picked token is the first one, by id, at which the running sum of the kept q
exceeds floor(u * their total): the inverse of the distribution's CDF at u.

No path sorts the vocabulary. The threshold of the k-th largest weight or of the nucleus is found with histograms over
the bits of w, which order like w, from the highest bits to the lowest. On CPU the search covers only the blocks of the
row with the largest maxima, unless they turn out not to suffice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_SCALE = float(2**40)
_BASE = (127 - 40) << 23  # the bits of 2^-40
_LEVELS_LONG = ((14, 15), (0, 14))  # (shift, bits) of each histogram: few passes over a long row
_LEVELS_SHORT = ((19, 10), (9, 10), (0, 9))  # few bins for a short row
_NUCLEUS = 256  # this many tokens nearly always hold top_p of the weight
_GOLDEN = 0x9E3779B97F4A7C15
_MIX1, _MIX2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK64 = (1 << 64) - 1


@dataclass(slots=True)
class RandomRows:
    """Sampling parameters of S rows, each `[S]` on the device, and flags on the host about all of the rows.

    A top_k of 0 and a top_p of 1 disable the filter.
    """

    temperature: torch.Tensor  # float32
    top_p: torch.Tensor  # float64
    min_p: torch.Tensor  # float32
    top_k: torch.Tensor  # int64
    uniform: torch.Tensor  # float64 in [0, 1)
    max_top_k: int
    all_top_k: bool  # every row has a top_k
    any_top_p: bool
    all_top_p: bool
    any_min_p: bool

    def select(self, index: torch.Tensor | slice) -> RandomRows:
        """Return the parameters of some of the rows."""
        tensors = (tensor[index] for tensor in (self.temperature, self.top_p, self.min_p, self.top_k, self.uniform))
        return RandomRows(*tensors, self.max_top_k, self.all_top_k, self.any_top_p, self.all_top_p, self.any_min_p)


# ---- random numbers


def seed_state(seed: int) -> int:
    """Convert a seed to the state that `uniform` takes: a well-mixed signed 64-bit number, so that the streams of
    adjacent seeds are unrelated.
    """
    return _signed(_mix_int(seed & _MASK64))


def uniform(states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the number in [0, 1) that picks the token at `positions[i]` of the request with `states[i]`; both are
    int64, the result is float64.

    SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) at index `position` of the seed's stream, in wrapping int64
    arithmetic.
    """
    z = states + (positions + 1) * _signed(_GOLDEN)
    z = (z ^ _shift(z, 30)) * _signed(_MIX1)
    z = (z ^ _shift(z, 27)) * _signed(_MIX2)
    z = z ^ _shift(z, 31)
    return _shift(z, 11).double() * 2.0**-53


def _mix_int(z: int) -> int:
    z = (z + _GOLDEN) & _MASK64
    z = ((z ^ (z >> 30)) * _MIX1) & _MASK64
    z = ((z ^ (z >> 27)) * _MIX2) & _MASK64
    return z ^ (z >> 31)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _shift(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right logically; torch's shift preserves the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


# ---- greedy


def best(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (largest value, its first index) of each row `[S, V]`. NaN counts as the largest value, so it is visible
    in the result.
    """
    block = block_size(logits)
    if not block:
        value, index = logits.max(-1)
        return value, index
    # Two vectorized reductions and a search in one block are several times faster than torch's search along a long row.
    blocks = logits.view(len(logits), -1, block)
    first = blocks.amax(-1).argmax(-1, keepdim=True)
    value, offset = _take_blocks(blocks, first).max(-1)
    return value, first.squeeze(1) * block + offset


def largest(logits: torch.Tensor, num: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (values, indices) of the `num` largest entries of each row `[S, V]`, in descending order, each `[S, num]`.

    Equal entries may come in any order.
    """
    block = block_size(logits)
    if not block or num * block * 2 > logits.shape[1]:
        values, indices = logits.topk(num, -1)
        return values, indices
    # the num largest entries are in the num blocks with the largest maxima
    blocks = logits.view(len(logits), -1, block)
    index = blocks.amax(-1).topk(num, -1).indices
    values, at = _take_blocks(blocks, index).topk(num, -1)
    return values, index.gather(1, at // block) * block + at % block


def _take_blocks(blocks: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the blocks `index` `[S, m]` of blocks `[S, n, block]`: `[S, m * block]`."""
    return blocks.gather(1, index[:, :, None].expand(-1, -1, blocks.shape[2])).view(len(blocks), -1)


def block_size(logits: torch.Tensor) -> int:
    """Return the size of the blocks into which a search on CPU may split rows; 0 if it should not split."""
    size = logits.shape[1]
    block = min(size & -size, 128)
    return block if logits.device.type == "cpu" and block >= 32 and size >= 4096 and logits.is_contiguous() else 0


# ---- random


def pick(logits: torch.Tensor, rows: RandomRows) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (largest value, picked token) of each row of logits `[S, V]` float32.

    If the largest value is not finite, the token is meaningless.
    """
    maximum = logits.amax(-1)
    block = block_size(logits)
    num_blocks = _blocks_to_search(rows, logits.shape[1] // block) if block else 0
    if not num_blocks:
        return maximum, _pick_from_all(logits, maximum, rows)
    tokens, certain = _pick_from_blocks(logits.view(len(logits), -1, block), num_blocks, maximum, rows)
    if not certain.all():
        index = (~certain).nonzero().squeeze(1)
        tokens[index] = _pick_from_all(logits[index], maximum[index], rows.select(index))
    return maximum, tokens


def _pick_from_all(logits: torch.Tensor, maximum: torch.Tensor, rows: RandomRows) -> torch.Tensor:
    w = _weights(logits, maximum, rows)
    q = (w * _SCALE).long()
    threshold = _threshold(w, q, rows)
    if threshold is not None:
        q.masked_fill_(w < threshold[:, None], 0)
    return _invert(q, rows.uniform, block_size(logits))


def filtered(logits: torch.Tensor, rows: RandomRows) -> torch.Tensor:
    """Return the logits `[S, V]` after temperature, with -inf for tokens that the filters drop."""
    w = _weights(logits, logits.amax(-1), rows)
    threshold = _threshold(w, (w * _SCALE).long(), rows)
    scaled = logits / rows.temperature[:, None]
    return scaled if threshold is None else scaled.masked_fill_(w < threshold[:, None], float("-inf"))


def _weights(logits: torch.Tensor, maximum: torch.Tensor, rows: RandomRows) -> torch.Tensor:
    return (logits - maximum[:, None]).div_(rows.temperature[:, None]).exp_()


def _threshold(w: torch.Tensor, q: torch.Tensor, rows: RandomRows) -> torch.Tensor | None:
    """Return the smallest weight that the filters keep in each row, `[S]`; None if they keep all."""
    threshold = rows.min_p if rows.any_min_p else None
    if rows.max_top_k:
        kth = kth_weight(w, torch.ones_like(q), torch.where(rows.top_k > 0, rows.top_k, w.shape[1]))
        threshold = kth if threshold is None else torch.maximum(threshold, kth)
    if rows.any_top_p:
        if threshold is not None:
            q = q.masked_fill(w < threshold[:, None], 0)
        nucleus = torch.where(rows.top_p < 1, kth_weight(w, q, _needed(q.sum(-1), rows.top_p)), 0)
        threshold = nucleus if threshold is None else torch.maximum(threshold, nucleus)
    return threshold


def _needed(total: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    return (total * top_p).ceil().long().clamp(min=1).minimum(total)


def kth_weight(w: torch.Tensor, amounts: torch.Tensor, needed: torch.Tensor) -> torch.Tensor:
    """Return the largest t such that the amounts of the weights >= t sum to at least `needed` `[S]`; w is `[S, V]`
    float32, amounts `[S, V]` int64.

    Weights below 2^-40 are treated as equal.
    """
    key = (w.view(torch.int32) - _BASE).clamp_(0, (127 << 23) - _BASE).long()  # 29 bits; NaN is also clamped into range
    found = torch.zeros_like(needed)
    for shift, bits in _LEVELS_LONG if w.shape[1] >= 1 << 15 else _LEVELS_SHORT:
        digit = (key >> shift) & ((1 << bits) - 1)
        reached, needed = _find_bin(digit, amounts, needed, 1 << bits)
        found += reached << shift
        if shift:
            amounts = amounts * (digit == reached[:, None])
    return (found + _BASE).int().view(torch.float32)


def _find_bin(
    bins: torch.Tensor, amounts: torch.Tensor, needed: torch.Tensor, num_bins: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bin in which the sum from the top reaches `needed`, and the part of `needed` that remains inside that
    bin.
    """
    histogram = torch.zeros(len(bins), num_bins, dtype=torch.int64, device=bins.device).scatter_add_(1, bins, amounts)
    from_top = histogram.flip(1).cumsum(1)
    index = torch.searchsorted(from_top, needed[:, None]).clamp_(max=num_bins - 1)
    reached = num_bins - 1 - index
    above = from_top.gather(1, index) - histogram.gather(1, reached)
    return reached.squeeze(1), needed - above.squeeze(1)


def _invert(q: torch.Tensor, uniform: torch.Tensor, block: int = 0) -> torch.Tensor:
    """Return the first index at which the running sum of q `[S, n]` exceeds floor(uniform * total), `[S]`.

    With `block`, search in two levels, which is faster on a CPU.
    """
    if block:
        blocks = q.view(len(q), -1, block)
        sums = blocks.sum(-1)
        index, target = _search(sums, _target(sums.sum(-1), uniform))
        return index * block + _search(_take_blocks(blocks, index[:, None]), target)[0]
    return _search(q, _target(q.sum(-1), uniform))[0]


def _target(total: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    return (uniform * total).long().minimum(total - 1)


def _search(q: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (index at which the running sum first exceeds target, offset of target inside that entry), each `[S]`."""
    sums = q.cumsum(-1)
    index = torch.searchsorted(sums, target[:, None], right=True).clamp_(max=q.shape[1] - 1)
    return index.squeeze(1), target - (sums.gather(1, index) - q.gather(1, index)).squeeze(1)


def _blocks_to_search(rows: RandomRows, num_blocks: int) -> int:
    """Return the number of blocks that nearly always hold all tokens that the filters keep; 0 if searching them is not
    faster than searching the whole row.
    """
    if rows.all_top_k:
        return 2 * rows.max_top_k if 4 * rows.max_top_k <= num_blocks else 0
    return num_blocks // 8 if rows.all_top_p and not rows.max_top_k else 0


def _pick_from_blocks(
    blocks: torch.Tensor, num_blocks: int, maximum: torch.Tensor, rows: RandomRows
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pick as `_pick_from_all` does, but search only the `num_blocks` blocks with the largest maxima of a row `[S, n,
    block]`. Returns (tokens, whether each is certain).

    No weight in another block exceeds the smallest of the chosen maxima. So if the threshold of top-k or top-p is above
    it, all weights not below the threshold are in the chosen blocks. These are in the order of token ids, so the
    running sums equal those of the whole row.
    """
    block = blocks.shape[2]
    maxima, index = blocks.amax(-1).topk(num_blocks, -1)
    index = index.sort(-1).values
    w = _weights(_take_blocks(blocks, index), maximum, rows)
    left_out = _weights(maxima[:, -1:], maximum, rows)
    q = (w * _SCALE).long()
    if rows.any_min_p:
        q.masked_fill_(w < rows.min_p[:, None], 0)
    if rows.all_top_k:
        best = w.topk(rows.max_top_k, -1).values
        threshold = best.gather(1, rows.top_k[:, None] - 1)
        if rows.any_top_p:
            q.masked_fill_(w < threshold, 0)
            certain = threshold > left_out
            threshold = _nucleus(w, q, best, _needed(q.sum(-1), rows.top_p))
        else:
            certain = threshold > left_out
    else:
        best = w.topk(min(_NUCLEUS, w.shape[1]), -1).values
        threshold = _nucleus(w, q, best, _needed(_total(blocks, maximum, rows), rows.top_p))
        certain = threshold > left_out
    q.masked_fill_(w < threshold, 0)
    at = _invert(q, rows.uniform, block)[:, None]
    return (index.gather(1, at // block) * block + at % block).squeeze(1), certain.squeeze(1)


def _nucleus(w: torch.Tensor, q: torch.Tensor, best: torch.Tensor, needed: torch.Tensor) -> torch.Tensor:
    """Return `kth_weight(w, q, needed)` as `[S, 1]`, read from the running sums over the `best` weights, in descending
    order, if they suffice.
    """
    sums = (best * _SCALE).long().cumsum(-1)
    if bool((sums[:, -1] >= needed).all()):
        return best.gather(1, torch.searchsorted(sums, needed[:, None]))
    return kth_weight(w, q, needed)[:, None]


def _total(blocks: torch.Tensor, maximum: torch.Tensor, rows: RandomRows) -> torch.Tensor:
    """Return the sum of q over the whole row."""
    w = _weights(blocks.view(len(blocks), -1), maximum, rows)
    if rows.any_min_p:
        w.masked_fill_(w < rows.min_p[:, None], 0)
    return w.mul_(_SCALE).long().sum(-1)
