"""What a process of ours does about its name, its parent and its signals."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from quire.engine.messages import STACKS_FOLDER, STACKS_SUFFIX

RENDEZVOUS = "rendezvous"  # in the engine's folder: the file in which ranks of one machine find each other
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def set_name(name: str) -> None:
    """Show `name` (its first 15 bytes) as the command in ps, top and the debugger.

    Linux only; elsewhere nothing happens.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends.

    Linux only: elsewhere EOF on the pipe does it, between steps.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def end_with_parent() -> None:
    """Have the kernel end this process one second after the thread that started it, so that whoever sees the parent's
    end can tidy up first.

    This works also while compiled code holds the interpreter: the handler is a function of the C library. It is called
    with the signal's number, and SIGHUP is 1: `alarm(1)`, whose SIGALRM ends the process. Linux only.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        libc.signal(signal.SIGHUP, ctypes.cast(libc.alarm, ctypes.c_void_p))
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGHUP, 0, 0, 0)


def kill_descendants() -> None:
    """SIGKILL every process below this one, also in groups and sessions of its own: a Ray cluster that was started here
    has such, and its workers notice the end of their parents only after seconds. Linux only.
    """
    children: dict[int, list[int]] = {}
    for pid in filter(str.isdigit, os.listdir("/proc") if sys.platform == "linux" else []):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:  # it may end meanwhile
            parent = int(file.read().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(pid))
    below = [os.getpid()]
    for pid in below:  # grows: all are known before the first is killed, whose children would get another parent
        below += children.get(pid, [])
    for pid in below[1:]:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def dump_stacks_on(number: signal.Signals, name: str) -> None:
    """Have that signal write the stacks of all threads: also of a thread that hangs in compiled code and never returns
    to Python.

    They go to a file, `name` with STACKS_SUFFIX, in the folder that the environment's STACKS_FOLDER names, without one
    to stderr, where those of several processes would mix: they are written a few bytes at a time.
    """
    folder = os.environ.get(STACKS_FOLDER)
    file = Path(folder, name + STACKS_SUFFIX).open("w") if folder else sys.stderr  # noqa: SIM115  it stays open for the handler
    faulthandler.register(number, file, all_threads=True, chain=False)


def remove_files() -> None:
    """Remove what the processes of this engine have in its folder: stacks, and where the ranks met."""
    if folder := os.environ.get(STACKS_FOLDER):
        for path in (*Path(folder).glob("*" + STACKS_SUFFIX), Path(folder, RENDEZVOUS)):
            path.unlink(missing_ok=True)


def wake_on_signals() -> int:
    """A descriptor that every signal makes readable. A poll that includes it returns, so that the handler runs, also
    when the signal came just before the poll began or the kernel gave it to another thread; without it such a signal
    waits for the next message.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    return reader


def start_logging(level: str, name: str) -> None:
    """Log to stderr, every line with the process's name. The parent's stderr is ours, too."""
    logging.basicConfig(level=level.upper(), format=f"%(asctime)s %(levelname)s {name}: %(message)s", stream=sys.stderr)


def watch_parent(fd: int, on_message: Callable[[], None], on_eof: Callable[[], None]) -> None:
    """From a thread: call `on_message` when something arrives at `fd`, and `on_eof` once that has ended. A blocked read
    costs nothing and sees both in the middle of a long step.
    """

    def watch() -> None:
        while os.read(fd, 4096):
            on_message()
        on_eof()

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
