"""Products whose columns are summed by several programs, so that a product with few outputs has programs for all
multiprocessors (split-K).

Each program stores its partial sums; the last one of a tile to arrive adds those of all splits, always in the order of
the columns, so that a result does not depend on the order in which programs finish. Its counter is 0 again afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache

import torch
import triton
import triton.language as tl

from quire.worker.cuda.kernels import limits

_MOST = 8  # splits of a product
_STEPS = 4  # least steps of the inner loop in a split
_RESIDENT = 4  # programs that a multiprocessor runs at once, by their registers
_SHARE = 1.5  # most bytes per second of a multiprocessor, in even shares of the memory's
COUNTERS = 1 << 14


@dataclass(frozen=True, slots=True)
class Splits:
    """The number of splits and the memory they need."""

    num: int
    partial: torch.Tensor | None  # float32 [tiles, num, size of a tile]
    counters: torch.Tensor | None  # int32, 0 between kernels


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiles of a product: how many there are, steps of the inner loop, bytes of the weight that a step reads, steps
    that are loaded ahead, and how many sums a tile has and how many of them are of real rows.
    """

    num: int
    steps: int
    step_bytes: int
    ahead: int
    size: int
    sums: int

    def cost(self, splits: int, limit: limits.Limits) -> float:
        """Return the time of the product, as the bytes that memory could read in it."""
        programs = self.num * splits
        running = min(programs, _RESIDENT * limit.processors)
        asked = running * self.ahead * self.step_bytes / (limit.processors * limit.flight)
        even = programs / (limit.processors * -(-programs // limit.processors))
        read = self.num * self.steps * self.step_bytes / min(1.0, asked, _SHARE * even)
        # partial sums are written and read, in the L2 cache, which is twice as fast
        return read + (4 * self.sums * programs if splits > 1 else 0)

    def best(self, limit: limits.Limits) -> int:
        """Return the number of splits that costs least: a power of two, so that few variants are compiled."""
        fitting = [1 << i for i in range(_MOST.bit_length()) if 1 << i <= min(_MOST, max(1, self.steps // _STEPS))]
        return min(fitting, key=lambda splits: self.cost(splits, limit))


def splits_of(tiles: Tiles, device: torch.device, num: int | None = None) -> Splits:
    """Return the splits of a product. `num` replaces the choice."""
    num = _best(tiles, limits.for_device(device)) if num is None else num
    if num == 1 or tiles.num > COUNTERS:
        return Splits(1, None, None)
    partial = torch.empty(tiles.num, num, tiles.size, dtype=torch.float32, device=device)
    return Splits(num, partial, counters_of(device))


@lru_cache(maxsize=1024)  # all layers have a few, and the host would compute it anew for each
def _best(tiles: Tiles, limit: limits.Limits) -> int:
    return tiles.best(limit)


@cache
def counters_of(device: torch.device) -> torch.Tensor:
    """Return counters of tiles, of products or others. Kernels of one device use them in turn, in the order of its
    stream.
    """
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


@triton.jit
def part_of(num_steps, SPLITS: tl.constexpr):
    """Return (first, last + 1) of the steps that this program, whose third index is its split, sums."""
    each = tl.cdiv(num_steps, SPLITS)
    first = tl.program_id(2) * each
    return first, tl.minimum(first + each, num_steps)


@triton.jit
def combined(sums, mask, partial, counters, SPLITS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Return (the sums `[HEIGHT, WIDTH]` of all splits where `mask` is set, whether this program has them)."""
    is_last = True
    if SPLITS > 1:
        program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        lanes = tl.arange(0, HEIGHT)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        at = partial + program.to(tl.int64) * (SPLITS * HEIGHT * WIDTH) + lanes
        tl.store(at + tl.program_id(2) * (HEIGHT * WIDTH), sums, mask=mask)
        is_last = comes_last(counters + program, SPLITS)
        if is_last:
            sums = tl.zeros((HEIGHT, WIDTH), dtype=tl.float32)
            for split in range(SPLITS):  # from the L2 cache, which other multiprocessors write to
                sums += tl.load(at + split * (HEIGHT * WIDTH), mask=mask, other=0.0, cache_modifier=".cg")
    return sums, is_last


@triton.jit
def comes_last(counter, num):
    """Return whether this program is the last of `num` that share a counter: what all of them stored can be read, from
    the L2 cache. The counter is 0 again afterwards.
    """
    tl.debug_barrier()  # every thread has stored before one of them counts
    is_last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == num - 1
    tl.store(counter, 0, mask=is_last)
    return is_last
