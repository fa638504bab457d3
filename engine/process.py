"""Process helpers: name, parent death, signals, stack dumps and logging."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import logging
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from quire.configs import platforms
from quire.configs.config import Config
from quire.configs.log_format import apply_log_config, formatter
from quire.configs.log_ring import LogRing
from quire.configs.serving import ServerConfig
from quire.configs.stacks import STACKS_FOLDER, STACKS_SUFFIX

EXIT_SIGNAL = signal.SIGUSR1  # the thread that watches stdin sends it to the main thread
RENDEZVOUS = "rendezvous"  # file in the engine's folder through which the ranks of one machine find each other


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Suspend garbage collection while large packages are imported: it would scan the same objects again and
    again. At the end all objects are excluded from later collections, because modules live as long as the process.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends.

    Linux only. Elsewhere the process exits between steps, on EOF of its pipe.
    """
    platforms.signal_at_parents_end(signal.SIGKILL)


def end_with_parent() -> None:
    """Have the kernel end this process one second after the thread that started it, so that a process that sees the
    parent's exit can clean up first.

    This also works while compiled code holds the interpreter: the signal handler is a function of the C library. It is
    called with the signal's number, and SIGHUP is 1, so it runs `alarm(1)`, whose SIGALRM ends the process. Linux only.
    """
    if platforms.LINUX:
        libc = ctypes.CDLL(None)
        libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        libc.signal(signal.SIGHUP, ctypes.cast(libc.alarm, ctypes.c_void_p))
        platforms.signal_at_parents_end(signal.SIGHUP)


def kill_descendants() -> None:
    """Send SIGKILL to every descendant of this process, including those in other process groups and sessions. A Ray
    cluster started here has such processes, and its workers notice their parents' exit only after seconds. Linux only.
    """
    children: dict[int, list[int]] = {}
    for pid in filter(str.isdigit, os.listdir("/proc") if platforms.LINUX else []):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:  # the process may exit meanwhile
            parent = int(file.read().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(pid))
    below = [os.getpid()]
    for pid in below:  # grows; collect all before killing any, because a killed process's children get another parent
        below += children.get(pid, [])
    for pid in below[1:]:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def dump_stacks_on(number: signal.Signals, name: str) -> None:
    """Write, on signal `number`, the stacks of all threads, including threads that hang in compiled code and never
    return to Python.

    The dump goes to the file `name` + STACKS_SUFFIX in the folder that the environment variable STACKS_FOLDER names, or
    to stderr if it is not set. Dumps are written a few bytes at a time, so those of several processes would mix on
    stderr.
    """
    folder = os.environ.get(STACKS_FOLDER)
    # The file stays open for the handler.
    file = Path(folder, name + STACKS_SUFFIX).open("w") if folder else sys.stderr  # noqa: SIM115
    faulthandler.register(number, file, all_threads=True, chain=False)


def remove_files() -> None:
    """Remove this engine's files from its folder: stack dumps and the rendezvous file."""
    if folder := os.environ.get(STACKS_FOLDER):
        for path in (*Path(folder).glob("*" + STACKS_SUFFIX), Path(folder, RENDEZVOUS)):
            path.unlink(missing_ok=True)


def kill_engine(unlink: Callable[[], None]) -> None:
    """Kill this process and all its descendants at once, from any thread. Called when the parent died and cannot clean
    up; `unlink` removes the files of the socket.
    """
    kill_descendants()
    remove_files()
    unlink()
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def exit_on(number: signal.Signals) -> None:
    """Exit with code 0 on signal `number`."""
    signal.signal(number, lambda *_: sys.exit(0))


def request_exit() -> None:
    """Ask the main thread to exit, from another thread. The signal also interrupts a sleep or a poll."""
    signal.pthread_kill(threading.main_thread().ident, EXIT_SIGNAL)


def flush_stderr() -> None:
    """Flush stderr; a full disk or a closed pipe must not prevent the exit."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()


def wake_on_signals() -> int:
    """Return a descriptor that every signal makes readable.

    A poll that includes it returns, so that the signal handler runs, even if the signal came just before the poll or
    the kernel delivered it to another thread. Without it such a signal waits for the next message.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    return reader


def start_logging(config: ServerConfig, name: str) -> None:
    """Log to stderr, with the process's name on every line. The process shares the parent's stderr.

    Raises ValueError for a --log-config-file that cannot be used.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(config.log_format, name))
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler, LogRing()])
    if config.log_config_file is not None:
        apply_log_config(config.log_config_file)


def read_config(fd: int) -> Config:
    """Read the length-prefixed configuration from `fd`. Raises EOFError if it is incomplete."""

    def read(count: int) -> bytes:
        data = b""
        while len(data) < count:
            if not (part := os.read(fd, count - len(data))):
                raise EOFError("stdin ended before the configuration")
            data += part
        return data

    return msgspec.msgpack.decode(read(int.from_bytes(read(4), "big")), type=Config)


def watch_hang_up(fd: int, on_eof: Callable[[], None]) -> None:
    """Start a thread that calls `on_eof` when the writer of the pipe `fd` ends. It reads nothing from it."""

    def watch() -> None:
        poll = select.poll()
        poll.register(fd, 0)
        poll.poll()
        on_eof()

    threading.Thread(target=watch, name="hang-up-watch", daemon=True).start()


def watch_parent(fd: int, on_message: Callable[[], None], on_eof: Callable[[], None]) -> None:
    """Start a thread that calls `on_message` when data arrives at `fd` and `on_eof` at its end. The blocking read costs
    nothing and notices both during a long step.
    """

    def watch() -> None:
        while os.read(fd, 4096):
            on_message()
        on_eof()

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
