"""Starts engines as forks of one process that has imported torch, which costs each of them 2 seconds of CPU time
otherwise. That process has one thread and runs no operation of torch, so that a fork is as good as a new process.

Engines of servers in the tests' own process are forked. A `quire serve` that a test starts is as users have it, and so
is an engine with other variables that imports depend on.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait

import pytest

from quire.engine.messages import STACKS_FOLDER
from quire.server.engines.process import EngineProcess, python_environment

PRELOADED = ["tests.helpers.engine.preloaded", "tests.helpers.engine.fake_executor"]
# variables that imports depend on: an engine with others than these tests have is not forked
IMPORTANT = ("ATEN_", "KMP_", "LD_", "MKL_", "OMP_", "PYTHON", "TORCH", "TRITON")

_context = multiprocessing.get_context("forkserver")
_spawn = EngineProcess._spawn


class Fork:
    """Has the part of `subprocess.Popen` that `EngineProcess` uses."""

    def __init__(self, arguments: list[str], environment: Mapping[str, str]):
        theirs, self._pipe = multiprocessing.Pipe(duplex=False)
        streams = [theirs, *(Connection(os.dup(number), readable=False) for number in (1, 2))]
        self._process = _context.Process(
            target=_run, args=(arguments, dict(environment), os.getcwd(), streams), daemon=True
        )
        self._process.start()
        for stream in streams:
            stream.close()
        self.stdin = os.fdopen(os.dup(self._pipe.fileno()), "wb")
        self._pipe.close()
        self.pid = self._process.pid
        self._lock = threading.Lock()  # the exit code can be read once

    def poll(self) -> int | None:
        with self._lock:
            return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        if not wait([self._process.sentinel], timeout):
            raise subprocess.TimeoutExpired("engine", timeout)
        return self.poll()


def _run(arguments: list[str], environment: dict[str, str], folder: str, streams: list[Connection]) -> None:
    """Run an engine in the forked process."""
    from quire.engine import core

    os.setpgid(0, 0)
    multiprocessing.current_process().daemon = False  # it may start ranks
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, stream in enumerate(streams):
        os.dup2(stream.fileno(), number)
        stream.close()
    sys.stdin, sys.argv = os.fdopen(0), ["engine", *arguments]
    core.main()


class Forks:
    """Starts engines in place of `EngineProcess._spawn`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._environment: dict[str, str] | None = None  # important variables of the process that is forked

    def start(self, engine: EngineProcess, environment: Mapping[str, str], *arguments: str) -> None:
        whole = python_environment() | {STACKS_FOLDER: engine._folder} | environment
        with self._lock:
            if self._environment is None:
                self._environment = _important(whole)
                self._preload()
        if _important(whole) == self._environment:
            engine._process = Fork([engine.address, str(engine.index), *arguments], whole)
        else:
            _spawn(engine, environment, *arguments)

    def _preload(self) -> None:
        _context.set_forkserver_preload(PRELOADED)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in self._environment.items():
                patch.setenv(name, value)
            forkserver.ensure_running()


def _important(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(IMPORTANT)}


@contextlib.contextmanager
def forked_engines() -> Iterator[None]:
    """Fork the engines that are started while the block runs."""
    forks = Forks()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineProcess, "_spawn", lambda engine, *arguments: forks.start(engine, *arguments))
        yield
