"""Products whose columns are summed by several programs, so that a product with few outputs has programs for all
multiprocessors (split-K).

Each program stores its partial sums; the last one of a tile to arrive adds those of all splits, always in the order of
the columns, so that a result does not depend on the order in which programs finish. Its counter is 0 again afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from quire.worker.cuda.kernels import limits

_MOST = 8  # splits of a product
_TILES = 4  # least steps of the inner loop in a split
_PER_PROCESSOR = 2  # programs per multiprocessor, which hide each other's memory latency
_COUNTERS = 1 << 14


@dataclass(frozen=True, slots=True)
class Splits:
    """The number of splits and the memory they need."""

    num: int
    partial: torch.Tensor | None  # float32 [tiles, num, size of a tile]
    counters: torch.Tensor | None  # int32, 0 between kernels


def splits_of(num_programs: int, num_steps: int, tile: int, device: torch.device, num: int | None = None) -> Splits:
    """Return the splits of a product of `num_programs` tiles with `tile` entries, whose inner loop has `num_steps`
    steps: a power of two, so that few variants are compiled. `num` replaces the choice.
    """
    if num is None:
        most = min(_MOST, _PER_PROCESSOR * limits.for_device(device).processors // num_programs, num_steps // _TILES)
        num = 1 << (max(1, most).bit_length() - 1)
    if num == 1 or num_programs > _COUNTERS:
        return Splits(1, None, None)
    return Splits(num, torch.empty(num_programs, num, tile, dtype=torch.float32, device=device), _counters(device))


@cache
def _counters(device: torch.device) -> torch.Tensor:
    """Return counters of a product's tiles. Products of one device use them in turn, in the order of its stream."""
    return torch.zeros(_COUNTERS, dtype=torch.int32, device=device)


@triton.jit
def part_of(num_steps, SPLITS: tl.constexpr):
    """Return (first, last + 1) of the steps that this program, whose third index is its split, sums."""
    each = tl.cdiv(num_steps, SPLITS)
    first = tl.program_id(2) * each
    return first, tl.minimum(first + each, num_steps)


@triton.jit
def combined(sums, partial, counters, SPLITS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Return (the sums `[HEIGHT, WIDTH]` of all splits, whether this program has them)."""
    is_last = True
    if SPLITS > 1:
        program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        lanes = tl.arange(0, HEIGHT)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        at = partial + program.to(tl.int64) * (SPLITS * HEIGHT * WIDTH) + lanes
        tl.store(at + tl.program_id(2) * (HEIGHT * WIDTH), sums)
        tl.debug_barrier()  # every thread has stored before one of them counts
        is_last = tl.atomic_add(counters + program, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
        if is_last:
            sums = tl.zeros((HEIGHT, WIDTH), dtype=tl.float32)
            for split in range(SPLITS):  # from the L2 cache, which other multiprocessors write to
                sums += tl.load(at + split * (HEIGHT * WIDTH), cache_modifier=".cg")
            tl.store(counters + program, 0)
    return sums, is_last
