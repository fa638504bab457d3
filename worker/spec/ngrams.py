"""Tables of embeddings of n-grams (Qwen4-Exp), each row of which is that of many n-grams: sizes and hashes. Torch-free.

An n-gram is the last 2 to n tokens. For each such length several heads hash it to a row of their own table, whose
number of rows is a prime.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import isqrt

_BITS = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class NgramSpec:
    """The embeddings of n-grams of one layer, which a convolution follows."""

    rows: tuple[int, ...]  # of each head's table, those for 2 tokens first
    multipliers: tuple[int, ...]  # of the last token, the one before it, and so on
    total: int  # rows of all tables, and of padding behind them
    embed_dim: int  # of all heads together
    width: int  # of the convolution, whose taps are `size` tokens apart
    streams: int  # residual streams to which the embeddings are added
    eos: int  # token before which nothing counts
    num_files: int  # tensors among which the files divide the tables

    @property
    def size(self) -> int:
        """Return the most tokens of an n-gram."""
        return len(self.multipliers)

    def shapes(self, hidden_size: int) -> tuple[tuple[int, ...], ...]:
        """Return the states: inputs of the convolution, and the tokens before the next one."""
        return ((self.width - 1) * self.size, self.streams * hidden_size), (self.size - 1,)


def table_sizes(least: int, first: int, number: int) -> tuple[int, ...]:
    """Return the primes number `first` to `first + number` of those from `least` on."""
    return _primes(least, first + number)[first:]


def multipliers(vocab_size: int, size: int, table: int, seed: int) -> tuple[int, ...]:
    """Return the odd numbers by which tokens are multiplied before they are combined; their products with tokens have
    63 bits. `table` is the number of the layer among those that embed n-grams.
    """
    bound = max(1, ((1 << 63) - 1) // max(vocab_size, 1) // 2)
    first = seed + 10007 * table
    return tuple(2 * (_split_mix(first + 0x9E3779B97F4A7C15 * (i + 1)) % bound) + 1 for i in range(size))


def _split_mix(value: int) -> int:
    """Return the SplitMix64 hash of a number of 64 bits."""
    value = (value + 0x9E3779B97F4A7C15) & _BITS
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _BITS
    return value ^ (value >> 31)


@lru_cache
def _primes(least: int, number: int) -> tuple[int, ...]:
    found: list[int] = []
    while len(found) < number:
        if least > 1 and all(least % divisor for divisor in range(2, isqrt(least) + 1)):
            found.append(least)
        least += 1
    return tuple(found)
