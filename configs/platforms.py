"""Wraps functions that some operating systems lack, with substitutes.

Other modules ask here instead of using names of `os`, `resource` and `mmap` that only some systems have.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import resource
import signal
import socket
import sys
import threading
from pathlib import Path

LINUX = sys.platform == "linux"
UNLIMITED = resource.RLIM_INFINITY
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_SHARED_MEMORY = Path("/dev/shm")


def usable_cpus() -> set[int]:
    """Return the CPUs that this process may use; all where the system does not tell (macOS)."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def process_exists(pid: int) -> bool:
    """Return whether a process with this id exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        pass
    return True


def name_process(name: str) -> None:
    """Show `name` (its first 15 bytes) as the command in ps, top and the debugger. Nothing happens outside Linux."""
    _prctl(_PR_SET_NAME, name.encode())


def signal_at_parents_end(number: signal.Signals) -> None:
    """Have the kernel send signal `number` to this process when the thread that started it ends. Nothing happens
    outside Linux, where processes watch a pipe of their parent.
    """
    _prctl(_PR_SET_PDEATHSIG, number)


def _prctl(option: int, value: bytes | int) -> None:
    prctl = getattr(ctypes.CDLL(None), "prctl", None) if LINUX else None
    if prctl is not None:
        prctl(option, value, 0, 0, 0)


def can_join_machines() -> bool:
    """Return whether the system ends connections to machines that are silent, and tells the end of a process."""
    return hasattr(socket, "TCP_USER_TIMEOUT") and hasattr(os, "pidfd_open")


def end_after_silence(connected: socket.socket, seconds: int) -> None:
    """Let a connection end when the other machine does not answer. Needs `can_join_machines`."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, 2),
        (socket.TCP_KEEPINTVL, 2),
        (socket.TCP_KEEPCNT, (seconds - 2) // 2),
        (socket.TCP_USER_TIMEOUT, seconds * 1000),
    ):
        connected.setsockopt(socket.IPPROTO_TCP, option, value)


def open_process(pid: int) -> int:
    """Return a descriptor that is readable once the process has ended. Needs `can_join_machines`."""
    return os.pidfd_open(pid)


def shared_memory(num_bytes: int) -> Path | None:
    """Return the folder of files in memory, if there is one with room for `num_bytes`."""
    with contextlib.suppress(OSError):
        status = os.statvfs(_SHARED_MEMORY)
        if os.access(_SHARED_MEMORY, os.W_OK) and status.f_bavail * status.f_frsize >= num_bytes:
            return _SHARED_MEMORY
    return None


def limit_memory(num_bytes: int) -> bool:
    """Limit the address space of this process. Returns False where the system cannot (macOS)."""
    limit = getattr(resource, "RLIMIT_AS", None)
    if limit is None:
        return False
    try:
        resource.setrlimit(limit, (num_bytes, num_bytes))
    except (ValueError, OSError):  # macOS has the name, but refuses
        if LINUX:
            raise
        return False
    return True


def open_files_limits() -> tuple[int, int]:
    """Return the (soft, hard) limits of open files; UNLIMITED where there is no limit."""
    limit = getattr(resource, "RLIMIT_NOFILE", None)
    return (UNLIMITED, UNLIMITED) if limit is None else resource.getrlimit(limit)


def set_open_files_limit(soft: int, hard: int) -> None:
    """Let this process and its children open `soft` files. Raises ValueError or OSError if the system refuses."""
    if hasattr(resource, "RLIMIT_NOFILE"):
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def schedule_thread_as_batch() -> None:
    """Lower the scheduling preference of the calling thread, where the system can (Linux)."""
    if hasattr(os, "sched_setscheduler") and hasattr(os, "SCHED_BATCH"):
        os.sched_setscheduler(threading.get_native_id(), os.SCHED_BATCH, os.sched_param(0))


def advise_huge_pages(memory: mmap.mmap, start: int, size: int) -> None:
    """Ask for huge pages, which only some Linux kernels grant on request."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE, start, size)
