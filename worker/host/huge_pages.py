"""Host memory on huge pages. It reduces TLB misses in large sequential reads; in a virtual machine a miss costs several
times as much.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from math import prod
from pathlib import Path
from threading import Lock

import torch

from quire.configs import platforms

PAGE = 1 << 21


def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of zeros whose memory becomes resident only when written.

    The memory comes from the system, because an allocator may return memory that was touched before, in small pages. It
    begins on a huge page boundary, because most matrices are a whole number of huge pages long. Also works if the
    system grants no huge pages.
    """
    size = prod(shape) * dtype.itemsize
    if size < PAGE:
        return torch.zeros(shape, dtype=dtype)
    memory = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)  # keeps `memory` alive
    start = -tensor.data_ptr() % PAGE
    platforms.advise_huge_pages(memory, start, size // PAGE * PAGE)
    return tensor[start : start + size].view(dtype).view(shape)


class _Shared:
    """The memory of small tensors: a chunk at a time, freed with the last of its tensors."""

    CHUNK = 16 * PAGE
    LARGEST = 4 * PAGE  # of a tensor; what is left of a chunk is lost

    def __init__(self) -> None:
        self._lock, self._left = Lock(), torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> torch.Tensor:
        """Return `size` bytes, which begin on a cache line."""
        whole = -(-size // 64) * 64
        with self._lock:
            if whole > len(self._left):
                self._left = zeros(self.CHUNK, dtype=torch.uint8)
            taken, self._left = self._left[:size], self._left[whole:]
        return taken


_shared = _Shared()


def lasting(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Allocate as `zeros` does, for a tensor that is kept as long as others made at that time, e.g. a packed weight:
    small ones share huge pages.
    """
    size = prod(shape) * dtype.itemsize
    if size > _Shared.LARGEST:
        return zeros(*shape, dtype=dtype)
    return _shared.take(size).view(dtype).view(shape)


def well_placed(
    *shape: int, dtype: torch.dtype, conflicts: Callable[[int], float], enough: float, tries: int = 5
) -> torch.Tensor:
    """Allocate as `zeros` does, for memory that should stay in a core's cache, which conflicts between some pages
    prevent: of several tries, return the tensor with the fewest `conflicts(address)`, or the first with fewer than
    `enough`.
    """
    tensors = []  # keep rejected tensors until the end, because the system would hand out the same memory again
    for _ in range(tries):
        tensor = zeros(*shape, dtype=dtype)
        tensors.append((conflicts(tensor.data_ptr()), tensor))
        if tensors[-1][0] < enough:
            break
    return min(tensors, key=lambda candidate: candidate[0])[1]


class Workspace:
    """Reusable memory on huge pages for results that are dead when the next result is computed: new memory would cost a
    page fault per page every time.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._memory = torch.empty(0, dtype=dtype)

    def take(self, *shape: int) -> torch.Tensor:
        """Return an uninitialised tensor, at the same address as the previous one."""
        size = prod(shape)
        if size > len(self._memory):
            self._memory = zeros(1 << (size - 1).bit_length(), dtype=self._memory.dtype)
        return self._memory[:size].view(shape)


def make_resident(address: int, size: int) -> bool:
    """Make `size` bytes at `address` resident without changing their contents; other threads may use them meanwhile.
    Returns False if the system cannot (Linux before 5.14).
    """
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    return _madvise()(start, address + size - start, 23) == 0  # MADV_POPULATE_WRITE


def discard(address: int, size: int) -> None:
    """Return the whole pages in `size` bytes at `address` of private memory to the system: they are zero afterwards."""
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    if (whole := (address + size) // mmap.PAGESIZE * mmap.PAGESIZE - start) > 0:
        _madvise()(start, whole, mmap.MADV_DONTNEED)


def drop_mapped(tensor: torch.Tensor) -> None:
    """Drop the whole pages of a tensor that is a view of a mapped file and was not written to: they are read again
    from the file when they are needed.
    """
    end = tensor.data_ptr() + tensor.nbytes
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    if (size := end // mmap.PAGESIZE * mmap.PAGESIZE - start) > 0:
        _madvise()(start, size, mmap.MADV_DONTNEED)


def mappings_of(paths: Iterable[Path]) -> list[range]:
    """Return the addresses of this process at which files are mapped (Linux; elsewhere none)."""
    real, maps = {str(path.resolve()) for path in paths}, Path("/proc/self/maps")
    found = (line.split(maxsplit=5) for line in (maps.read_text().splitlines() if maps.is_file() else ()))
    bounds = (fields[0].split("-") for fields in found if fields[5:] and fields[5] in real)
    return [range(int(start, 16), int(end, 16)) for start, end in bounds]


def trim() -> None:
    """Return freed memory to the system, which an allocator keeps otherwise (glibc; elsewhere nothing happens)."""
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


@cache
def _madvise() -> Callable[[int, int, int], int]:
    """Return the C function, which releases the GIL; `mmap.madvise` takes no addresses."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return madvise
