"""Removes names that only some systems have from the standard library. Python imports it at the start of each process
that has this folder in PYTHONPATH.
"""

import ctypes
import mmap
import os
import resource
import select
import socket
import sys

_NAMES = {
    os: "memfd_create eventfd pidfd_open posix_fadvise copy_file_range splice sched_getaffinity sched_setaffinity "
    "sched_setscheduler SCHED_BATCH getrandom O_TMPFILE O_PATH",
    socket: "SO_REUSEPORT SO_PEERCRED TCP_USER_TIMEOUT TCP_KEEPIDLE SOCK_CLOEXEC SOCK_NONBLOCK AF_NETLINK",
    resource: "RLIMIT_AS RLIMIT_NOFILE prlimit",
    mmap: "MADV_HUGEPAGE MADV_DONTFORK",
    select: "epoll",
}
_ABSENT = ("/proc/", "/dev/shm", "/sys/")


def _take_names() -> None:
    for module, names in _NAMES.items():
        for name in names.split():
            if hasattr(module, name):
                delattr(module, name)


def _hide_folders() -> None:
    """Make files that only Linux has missing for `open`, `os.stat` and similar functions."""

    def hide(event: str, arguments: tuple) -> None:
        path = arguments[0] if arguments else None
        is_read = event in ("open", "os.listdir", "os.scandir") and isinstance(path, (str, bytes))
        if is_read and os.fsdecode(path).startswith(_ABSENT):
            raise FileNotFoundError(2, "No such file or directory", path)
        if event == "socket.bind" and isinstance(arguments[1], (str, bytes)) and arguments[1][:1] in ("\0", b"\0"):
            raise OSError(22, "no abstract sockets")

    sys.addaudithook(hide)
    statvfs = os.statvfs

    def own_statvfs(path):
        if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(_ABSENT):
            raise FileNotFoundError(2, "No such file or directory", path)
        return statvfs(path)

    os.statvfs = own_statvfs


class _WithoutPrctl(ctypes.CDLL):
    """Wraps the C library without calls that other systems lack."""

    def __getattr__(self, name: str):
        if name in ("prctl", "accept4", "getauxval", "malloc_trim", "mallinfo2") and self._name is None:
            raise AttributeError(name)
        return super().__getattr__(name)


_take_names()
_hide_folders()
ctypes.CDLL = _WithoutPrctl
