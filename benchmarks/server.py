"""`quire serve` as a child process of a measurement, for tests of failures and of memory."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import psutil

from quire.cli.bench.process import free_port

ROOT = Path(__file__).parent.parent
READY_TIMEOUT = 900.0  # seconds
LATE = 2.0  # seconds within which a probe must answer


class Server:
    """A server on a free port of 127.0.0.1, with a temporary folder of its own."""

    def __init__(
        self,
        flags: Sequence[str],
        *,
        tree: Path = ROOT,
        prefix: Sequence[str] = (),
        variables: Mapping[str, str] = MappingProxyType({}),
        max_files: int | None = None,
    ):
        """Start a server of the checkout `tree`, by the command `prefix`, with `max_files` descriptors."""
        self.port, self.folder = free_port(), Path(tempfile.mkdtemp(prefix="kr"))
        self.url, self.log_path = f"http://127.0.0.1:{self.port}", self.folder / "log"
        (self.folder / "tmp").mkdir()
        limit = None
        if max_files is not None:
            limit = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, max_files))  # noqa: E731
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "quire", "serve", "--port", str(self.port), *flags],
                cwd=tree,
                env=os.environ | {"PYTHONPATH": str(tree), "TMPDIR": str(self.folder / "tmp")} | variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=limit,
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def wait_ready(self) -> None:
        """Wait until the server answers. Raises RuntimeError with the end of its log if it ends or time is up."""
        if until(lambda: self.process.poll() is not None or self.status("/ready") == 200, READY_TIMEOUT) is None:
            raise RuntimeError(f"the server did not answer in time:\n{self.log[-3000:]}")
        if self.process.poll() is not None:
            raise RuntimeError(f"the server ended:\n{self.log[-3000:]}")

    def children(self, text: str = "") -> list[psutil.Process]:
        """Return the processes below the server whose command line contains `text`."""
        found = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if child.status() != psutil.STATUS_ZOMBIE and text in " ".join(child.cmdline()):
                    found.append(child)
        return found

    def engine(self) -> psutil.Process:
        return self.children("quire.engine.core")[0]

    def resident(self) -> dict[str, float]:
        """Return MB of each process, by name and number."""
        main, found = psutil.Process(self.process.pid), {}
        for process in [main, *self.children()]:
            with suppress(psutil.NoSuchProcess):  # a process that compiles grammars may be replaced
                role = "server" if process == main else _role(process)
                found[f"{role}-{process.pid}"] = process.memory_info().rss / 1e6
        return found

    def status(self, path: str = "/health") -> int | None:
        """Return the status code of `path`, or None without an answer in time."""
        try:
            return httpx.get(self.url + path, timeout=LATE, trust_env=False).status_code
        except httpx.HTTPError:
            return None

    def post(self, path: str, body: dict) -> None:
        """Send a body and read the answer. Raises urllib.error.HTTPError."""
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=120) as answer:
            answer.read()

    def exit_code(self, timeout: float = 60.0) -> int | None:
        """Return the exit code, or None if the server still runs after `timeout` seconds."""
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(timeout)

    def end(self) -> None:
        """Kill all processes and remove the folder."""
        for process in [*(self.children() if self.process.poll() is None else []), self.process]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def stop(self) -> None:
        """End the server by SIGTERM, then remove the folder."""
        self.process.terminate()
        self.exit_code(120)
        self.end()


@contextmanager
def serving(flags: Sequence[str], **settings: Any) -> Iterator[Server]:
    """Run a server, which is ready, until the block ends."""
    server = Server(flags, **settings)
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()


def family(pid: int) -> list[psutil.Process]:
    """Return a process and its descendants."""
    return [root := psutil.Process(pid), *root.children(recursive=True)]


def cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    """Return the CPU time that the processes have used."""
    times = [process.cpu_times() for process in processes]
    return sum(one.user + one.system for one in times)


def _role(process: psutil.Process) -> str:
    """Return the process's own name, or the module or script that it runs."""
    if process.name().startswith("quire"):
        return process.name()
    words = " ".join(process.cmdline())
    return next((word for word in ("compile", "resource_tracker", "decode") if word in words), process.name())


def until(condition: Callable[[], object], timeout: float) -> float | None:
    """Return the seconds until `condition` holds, or None if it does not within `timeout`."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > timeout:
            return None
        time.sleep(0.05)
    return time.monotonic() - start
