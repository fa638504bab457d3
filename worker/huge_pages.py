"""Host memory on huge pages: fewer TLB misses where much of it is read in one go, and in a virtual machine a miss costs several times as much."""

from __future__ import annotations

import mmap
from contextlib import suppress
from math import prod

import torch

_PAGE = 1 << 21


def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of zeros that take up memory only once they are written.

    The memory comes from the system, since an allocator may hand out what has been touched, in small pages, before; and it begins with a huge page, since most
    matrices are a whole number of pages long. Where the system grants no huge pages it works as well.
    """
    size = prod(shape) * dtype.itemsize
    if size < _PAGE:
        return torch.zeros(shape, dtype=dtype)
    memory = mmap.mmap(-1, size + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)  # keeps `memory` alive
    start = -tensor.data_ptr() % _PAGE
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE, start, size // _PAGE * _PAGE)
    return tensor[start : start + size].view(dtype).view(shape)
