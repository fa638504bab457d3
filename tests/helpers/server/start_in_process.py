"""Runs `quire serve` in this process: the unchanged command line, launcher and frontend, and the engine's own loop in a
thread instead of a process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Iterator

import pytest

from quire.cli import main as cli
from quire.engine.core import EngineCore
from quire.engine.ipc import ServerSocket
from quire.server.engines.process import EngineProcess
from quire.server.engines.spare import SpareEngine
from quire.server.launch import Launcher

STARTED: list[EngineThread] = []  # started by the current server


class EngineThread(EngineProcess):
    """Runs an engine with the interface of its process."""

    def start(self) -> None:
        self._end, self._wake = os.pipe()
        STARTED.append(self)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        socket = ServerSocket(self.address)
        socket.watch(self._end)  # readable when the loop ends, as a worker's sentinel
        core = EngineCore(self.config, socket, self.index)
        try:
            core.start()
            core.run()
        except Exception as error:
            if not self._killed:
                core.die(error)
        finally:
            core.stop()
            if core.executor is not None:
                core.executor.shutdown()
            socket.close()

    def wait(self) -> int:
        self._thread.join()
        return 1

    def terminate(self, timeout: float) -> int:
        self.kill()
        return self.wait()

    def kill(self) -> None:
        if not self._killed:
            self._killed = True
            os.write(self._wake, b"end")


@contextlib.contextmanager
def starts_in_process() -> Iterator[None]:
    """Make `cli.main(["serve", ...])` run in this process; a server that becomes ready ends at once."""

    def leave(code: int) -> None:
        raise SystemExit(code)

    def announce(self: Launcher, ready: object) -> None:
        announce_as_before(self, ready)
        self.on_signal(signal.SIGTERM)

    announce_as_before = Launcher._announce
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SpareEngine, "prepare", lambda self, parallel: None)  # or the engine would be a process
        patch.setattr("quire.server.startup.engine_group.EngineProcess", EngineThread)
        patch.setattr("quire.server.launch.os._exit", leave)  # after a failed start
        patch.setattr("quire.server.launch.logging.shutdown", lambda: None)
        patch.setattr(Launcher, "_announce", announce)
        yield
        while STARTED:
            STARTED.pop().terminate(0)


def run(arguments: list[str]) -> int:
    """Return the exit code of `quire ARGUMENTS`."""
    try:
        return cli.main(arguments)
    except SystemExit as error:
        return error.code


class Errors(logging.Handler):
    """Collects the messages of errors."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
