"""The C library's heap of a process that serves HTTP (glibc; elsewhere nothing happens)."""

from __future__ import annotations

import ctypes

_M_MMAP_THRESHOLD = -3
_OWN_MAPPING = 128 << 10  # bytes from which an allocation is a mapping of its own: glibc's initial value


def fix_mmap_threshold() -> None:
    """Keep the size from which an allocation gets a mapping of its own, which glibc would raise up to 32 MiB. asyncio
    reads from a socket into a new object of 256 KiB and shrinks it to the received size. On the heap each leaves a hole
    of another size, and texts of many lengths made the process grow without end, though nothing was leaked.
    """
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_M_MMAP_THRESHOLD, _OWN_MAPPING)


def trim() -> None:
    """Return freed memory to the system."""
    if (malloc_trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        malloc_trim(0)
