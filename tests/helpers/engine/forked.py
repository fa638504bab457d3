"""Starts engines and ranks as forks of one process that has imported torch, which costs each of them 2 seconds of CPU
time otherwise. That process has one thread and runs no operation of torch, so that a fork is as good as a new process.

Engines of servers, and ranks of executors, in the tests' own process are forked. A `quire serve` that a test starts is
as users have it, and so is an engine or rank with other variables that imports depend on.
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
from typing import Any

import pytest

from quire.configs.stacks import STACKS_FOLDER
from quire.engine.executor.multiproc import MultiprocExecutor, worker_main
from quire.server.engines.process import EngineProcess
from quire.server.engines.spawn import python_environment

PRELOADED = ["tests.helpers.engine.preloaded", "tests.helpers.engine.fake_executor"]
# variables that imports depend on: an engine with others than these tests have is not forked
IMPORTANT = ("ATEN_", "KMP_", "LD_", "MKL_", "OMP_", "PYTHON", "TORCH", "TRITON")
# set by scikit-learn, torch and Ray; no engine needs them
BY_IMPORTS = ("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "PYTHONBREAKPOINT", "TORCHINDUCTOR_CACHE_DIR")

_context = multiprocessing.get_context("forkserver")
_spawn, _spawn_rank = EngineProcess._spawn, MultiprocExecutor._spawn


class Fork:
    """Has the part of `subprocess.Popen` that `EngineProcess` uses."""

    def __init__(self, arguments: list[str], environment: Mapping[str, str]):
        theirs, self._pipe = multiprocessing.Pipe(duplex=False)
        streams = [theirs, *_outputs()]
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
    _enter(environment, folder, streams)
    sys.stdin, sys.argv = os.fdopen(0), ["engine", *arguments]
    core.main()


def _run_rank(arguments: tuple, environment: dict[str, str], folder: str, streams: list[Connection]) -> None:
    """Run a rank in the forked process."""
    _enter(environment, folder, [Connection(os.open(os.devnull, os.O_RDONLY), writable=False), *streams])
    worker_main(*arguments)


def _outputs() -> list[Connection]:
    """Return copies of stdout and stderr that can be sent to another process."""
    return [Connection(os.dup(number), readable=False) for number in (1, 2)]


def _enter(environment: dict[str, str], folder: str, streams: list[Connection]) -> None:
    """Take over the variables, the folder, and stdin, stdout and stderr of the process that asked for a fork."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, stream in enumerate(streams):
        os.dup2(stream.fileno(), number)
        stream.close()


class Forks:
    """Starts engines in place of `EngineProcess._spawn`, and ranks in place of `MultiprocExecutor._spawn`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._environment: dict[str, str] | None = None  # important variables of the process that is forked

    def start(self, engine: EngineProcess, environment: Mapping[str, str], *arguments: str) -> None:
        whole = python_environment() | {STACKS_FOLDER: engine._folder} | environment
        if self._can_fork(whole):
            engine._process = Fork([engine.address, str(engine.index), *arguments], whole)
        else:
            _spawn(engine, environment, *arguments)

    def start_rank(self, *arguments: Any) -> multiprocessing.process.BaseProcess:
        whole = dict(python_environment())
        if not self._can_fork(whole):
            return _spawn_rank(*arguments)
        streams = _outputs()
        process = _context.Process(target=_run_rank, args=(arguments, whole, os.getcwd(), streams), daemon=True)
        process.start()
        for stream in streams:
            stream.close()
        return process

    def _can_fork(self, environment: Mapping[str, str]) -> bool:
        """Return whether imports would be the same with these variables. The first ones are those of all forks."""
        with self._lock:
            if self._environment is None:
                self._environment = _important(environment)
                self._preload()
        return _important(environment) == self._environment

    def _preload(self) -> None:
        _context.set_forkserver_preload(PRELOADED)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in self._environment.items():
                patch.setenv(name, value)
            forkserver.ensure_running()


def _important(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(IMPORTANT) and name not in BY_IMPORTS}


@contextlib.contextmanager
def forked_engines() -> Iterator[None]:
    """Fork the engines and ranks that are started while the block runs."""
    forks = Forks()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineProcess, "_spawn", lambda engine, *arguments: forks.start(engine, *arguments))
        patch.setattr(MultiprocExecutor, "_spawn", staticmethod(forks.start_rank))
        yield
