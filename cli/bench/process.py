"""Runs a measured server as a child process: starts its command line, probes it over HTTP, ends it by process id."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence

from quire.cli.bench.connection import Client, HttpError

POLL_SECONDS = 0.01


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


class ServerProcess:
    """Runs `command`, in which every "{port}" is replaced: `with ServerProcess(command, port) as server:`.

    `environment` is added to the variables of this process. `started` is time.perf_counter() at its start. After
    `grace` seconds the server is killed.
    """

    def __init__(
        self, command: Sequence[str], port: int, grace: float = 60.0, environment: Mapping[str, str] | None = None
    ):
        self.command = [part.replace("{port}", str(port)) for part in command]
        self.port, self.grace, self.environment = port, grace, os.environ | (environment or {})
        self.client = Client(f"http://127.0.0.1:{port}")

    def __enter__(self) -> ServerProcess:
        self.log = tempfile.TemporaryFile()
        self.started = time.perf_counter()
        # its own session: Ctrl-C in the terminal reaches only the measurement, which then stops the server
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            env=self.environment,
            start_new_session=True,
        )
        return self

    def __exit__(self, *exception: object) -> None:
        self.client.close()
        self.process.terminate()
        try:
            self.process.wait(timeout=self.grace)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.log.close()

    async def wait_for(self, *paths: str, timeout: float = 900.0) -> float:
        """Return the seconds from the start until one of `paths` answers 200.

        Raises RuntimeError with the end of the log when the process ends or time is up.
        """
        deadline = self.started + timeout
        while time.perf_counter() < deadline:
            for path in paths:
                with contextlib.suppress(OSError, HttpError, asyncio.IncompleteReadError):
                    if (await self.client.fetch("GET", path))[0] == 200:
                        return time.perf_counter() - self.started
            if self.process.poll() is not None:
                raise RuntimeError(f"{self.command[0]} ended with status {self.process.returncode}:\n{self.log_tail()}")
            await asyncio.sleep(POLL_SECONDS)
        raise RuntimeError(f"{' or '.join(paths)} did not answer 200 within {timeout:g} s:\n{self.log_tail()}")

    def log_tail(self, size: int = 3000) -> str:
        self.log.seek(0, os.SEEK_END)
        self.log.seek(max(0, self.log.tell() - size))
        return self.log.read().decode(errors="replace")
