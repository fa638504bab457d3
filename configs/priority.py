"""Runs work at a lower priority than the rest of the process."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

from quire.configs import platforms

T = TypeVar("T")
Report = Callable[[str, float], None]  # (phase, fraction of it)


def run_nice(niceness: int, function: Callable[[Report], T], report: Report) -> T:
    """Return `function(report)`, run in a thread whose niceness is higher by `niceness` (0 to 19). `report` is called
    in this thread.

    Threads that the function starts have the same niceness; a thread cannot be given its priority back, so they should
    end with it. Without Linux, where a thread has no priority of its own, or at 0, the function runs here.
    """
    if not niceness or not platforms.LINUX:
        return function(report)
    reports: queue.SimpleQueue[tuple[str, float] | None] = queue.SimpleQueue()
    found: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            own = os.getpriority(os.PRIO_PROCESS, os.getpid())
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(own + niceness, 19))
            found.append(function(lambda phase, fraction: reports.put((phase, fraction))))
        except BaseException as error:  # raised below
            errors.append(error)
        finally:
            reports.put(None)

    thread = threading.Thread(target=run, name="nice", daemon=True)
    thread.start()
    while (progress := reports.get()) is not None:
        report(*progress)
    thread.join()
    if errors:
        raise errors[0]
    return found[0]
