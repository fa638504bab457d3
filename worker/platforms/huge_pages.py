"""Host memory on huge pages: fewer TLB misses where much of it is read in one go, and in a virtual machine a miss costs
several times as much.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from math import prod

import torch

PAGE = 1 << 21


def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of zeros that take up memory only once they are written.

    The memory comes from the system, since an allocator may hand out what has been touched, in small pages, before; and
    it begins with a huge page, since most matrices are a whole number of pages long. Where the system grants no huge
    pages it works as well.
    """
    size = prod(shape) * dtype.itemsize
    if size < PAGE:
        return torch.zeros(shape, dtype=dtype)
    memory = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)  # keeps `memory` alive
    start = -tensor.data_ptr() % PAGE
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE, start, size // PAGE * PAGE)
    return tensor[start : start + size].view(dtype).view(shape)


def well_placed(
    *shape: int, dtype: torch.dtype, conflicts: Callable[[int], float], enough: float, tries: int = 5
) -> torch.Tensor:
    """The same for memory that is to stay in a core's cache, which some pages make impossible: of several tries the one
    with the least `conflicts(address)`, or the first with less than `enough`.
    """
    tensors = []  # those that lose are kept until the end, for the system would hand them out again
    for _ in range(tries):
        tensor = zeros(*shape, dtype=dtype)
        tensors.append((conflicts(tensor.data_ptr()), tensor))
        if tensors[-1][0] < enough:
            break
    return min(tensors, key=lambda candidate: candidate[0])[1]


class Workspace:
    """Memory that stays, on huge pages, for results that are dead when the next one is wanted: new memory would cost a
    fault for each of its pages, every time.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._memory = torch.empty(0, dtype=dtype)

    def take(self, *shape: int) -> torch.Tensor:
        """An uninitialised tensor; what was taken before lies in the same place."""
        size = prod(shape)
        if size > len(self._memory):
            self._memory = zeros(1 << (size - 1).bit_length(), dtype=self._memory.dtype)
        return self._memory[:size].view(shape)


def make_resident(address: int, size: int) -> bool:
    """Have the system give memory to `size` bytes at `address` as if they had been written, which they are not; may run
    beside their use. False where it cannot (before Linux 5.14).
    """
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    return _madvise()(start, address + size - start, 23) == 0  # MADV_POPULATE_WRITE


@cache
def _madvise() -> Callable[[int, int, int], int]:
    """The system's function, which releases the GIL; mmap's own knows no addresses."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return madvise
