"""DRY, which penalizes tokens that would continue a sequence already in the context."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from quire.worker.messages import Dry

_BASE = 0x9E3779B97F4A7C15 - (1 << 64)  # odd: its powers mod 2**64 have inverses
_MIX = 0xBF58476D1CE4E5B9 - (1 << 64)
_LARGEST_EXPONENT = 88.7228391  # of e, for which float32 does not overflow


@dataclass(slots=True)
class Breakers:
    """The breakers that end sequences: `single` bool `[V]` are tokens that contain a breaker; `sequences` are others,
    as (bool `[V]` of first tokens, the tokens after them).
    """

    single: torch.Tensor
    sequences: list[tuple[torch.Tensor, list[int]]]


def read_breakers(dry: Dry, vocab_size: int, device: torch.device) -> Breakers:
    """Convert the breakers of a request. Raises ValueError for a token outside the vocabulary."""

    def mask(ids: tuple[int, ...]) -> torch.Tensor:
        return torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, torch.tensor(ids, dtype=torch.long), 1)

    used = [*dry.breakers, *(token for first, rest in dry.sequences for token in (*first, *rest))]
    if any(not 0 <= token < vocab_size for token in used):
        raise ValueError(f"dry_sequence_breakers: a token is outside the vocabulary of {vocab_size}")
    sequences = [(mask(first).to(device), list(rest)) for first, rest in dry.sequences]
    return Breakers(mask(dry.breakers).to(device), sequences)


def penalties(recent: torch.Tensor, dry: Dry, breakers: Breakers, vocab_size: int) -> torch.Tensor:
    """Return the amounts to subtract from the logits of one row, float32 `[V]`. `recent` `[W]` int64 are the last
    tokens of its context, the last one first.

    With the last n tokens repeated k tokens earlier, and n at least allowed_length, the token that followed there is
    penalized by multiplier * base ** (n - allowed_length), for its largest n. n ends at a breaker.
    """
    result = torch.zeros(vocab_size, dtype=torch.float32, device=recent.device)
    if len(recent) <= dry.allowed_length:
        return result
    limit = _num_since_breaker(recent, breakers)
    lengths = _repeated(recent).minimum(limit)  # for k from 1
    followers = recent[:-1]
    longest = torch.full((vocab_size,), -1, dtype=torch.int64, device=recent.device)
    longest.scatter_reduce_(0, followers, lengths, "amax")
    exponent = longest - dry.allowed_length
    penalized = (longest >= max(dry.allowed_length, 0)) & (limit >= dry.allowed_length) & ~breakers.single
    if dry.base > 1.000001:
        exponent = exponent.clamp(max=int(_LARGEST_EXPONENT / math.log(dry.base)))
    amounts = dry.multiplier * torch.pow(torch.tensor(dry.base, dtype=torch.float64), exponent.cpu().double())
    largest = torch.finfo(torch.float32).max
    return torch.where(penalized, amounts.clamp(max=largest).float().to(recent.device), result)


def _repeated(recent: torch.Tensor) -> torch.Tensor:
    """Return, for k = 1 .. W - 1, how many of the first tokens of `recent` recur at offset k: int64 `[W - 1]`.

    A binary search in polynomial hashes mod 2**64: the first n tokens are at k if hash(k, k + n) = hash(0, n) * B**k.
    """
    size, device = len(recent), recent.device
    mixed = (recent + 1) * _MIX
    mixed = mixed ^ ((mixed >> 29) & ((1 << 35) - 1))
    powers = torch.full((size,), _BASE, dtype=torch.int64, device=device)
    powers[0] = 1
    powers = powers.cumprod(0)
    hashes = torch.nn.functional.pad((mixed * powers).cumsum(0), (1, 0))  # hashes of the first n tokens
    k = torch.arange(1, size, device=device)
    low, high = torch.zeros_like(k), size - k  # equal up to low, not known up to high
    for _ in range(size.bit_length()):
        middle = (low + high + 1) // 2
        equal = hashes[k + middle] - hashes[k] == hashes[middle] * powers[k]
        low, high = torch.where(equal, middle, low), torch.where(equal, high, middle - 1)
    return low


def _num_since_breaker(recent: torch.Tensor, breakers: Breakers) -> torch.Tensor:
    """Return how many tokens follow the last breaker, all if there is none: an int64 scalar."""
    size, place = len(recent), torch.arange(len(recent), device=recent.device)
    # a breaker that begins at `place` and has `rest` more tokens: the nearest counts, of several the longest
    width = size + 1
    none = size * width
    nearest = torch.where(breakers.single[recent], place * width, none)
    for first, rest in breakers.sequences:
        here = first[recent]
        for offset, token in enumerate(rest, 1):
            here = here & (torch.roll(recent, offset) == token) & (place >= offset)
        nearest = torch.where(here, place * width - len(rest), nearest).minimum(nearest)
    best = nearest.amin()
    start = (best + width - 1) // width
    return torch.where(best >= none, size, start - (start * width - best))
