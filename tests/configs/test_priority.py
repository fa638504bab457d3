"""Work at a lower priority."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from quire.configs import platforms
from quire.configs.priority import run_nice


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has priorities of threads")
def test_the_work_and_its_threads_are_nice_and_nothing_else_is():
    before, seen, reports = niceness(), [], []

    def work(report):
        seen.append(niceness())
        thread = threading.Thread(target=lambda: seen.append(niceness()))
        thread.start()
        thread.join()
        report("half", 0.5)
        return threading.get_ident()

    def note(phase, fraction):
        reports.append((phase, fraction, threading.get_ident()))

    nicer = min(before + 3, 19)
    assert run_nice(3, work, note) != threading.get_ident()
    assert seen == [nicer, nicer] and niceness() == before
    assert reports == [("half", 0.5, threading.get_ident())]


def test_errors_are_the_callers():
    def fail(report):
        raise KeyError("a")

    with pytest.raises(KeyError, match="a"):
        run_nice(19, fail, print)


@pytest.mark.parametrize(("number", "linux"), [(0, True), (5, False)])
def test_without_a_priority_it_runs_here(monkeypatch, number, linux):
    monkeypatch.setattr(platforms, "LINUX", linux)
    assert run_nice(number, lambda report: threading.get_ident(), print) == threading.get_ident()
