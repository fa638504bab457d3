"""The heaps of a process that serves HTTP: the C library's (glibc; elsewhere nothing happens), and Python's objects."""

from __future__ import annotations

import ctypes
import gc

_RARELY, _USUAL = (100_000, 10, 10), (700, 10, 10)  # Python's thresholds of garbage collections
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


def collect_rarely() -> None:
    """Run few garbage collections until `settle`: while packages are imported they find little, and scan all earlier
    objects again.
    """
    gc.set_threshold(*_RARELY)


def settle() -> None:
    """End `collect_rarely`, and exclude all objects from later collections, which would stop every request to scan what
    lives as long as the process. Does nothing in a process that did not begin with `collect_rarely`.
    """
    if gc.get_threshold() == _RARELY:
        gc.set_threshold(*_USUAL)
        gc.freeze()
