"""The engine as a child process: `python -m quire.engine.core ADDRESS`, with its configuration on stdin. Writing to
stdin later asks it to exit; it also exits when stdin closes, because the server has ended. A process may be started
before its configuration is known, so that it imports its packages meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import msgspec

from quire.configs.config import Config
from quire.configs.stacks import STACKS_SUFFIX
from quire.server.engines.spawn import EarlyEngine, address_in, end, socket_folder, spawn


class EngineProcess:
    """One run of the engine.

    `config.model.model` must be a local folder; `index` is its number among `data_parallel_size` engines. The
    configuration may be set after `preload`, before `start`.
    """

    is_remote = False

    def __init__(
        self,
        config: Config | None,
        index: int = 0,
        address: str | None = None,
        slot: int | None = None,
        early: EarlyEngine | None = None,
    ):
        """Create the process, or take over an `early` one; `slot` is the engine's number on this machine, if it differs
        from `index`.
        """
        self.config, self.index, self._slot = config, index, index if slot is None else slot
        self._process: subprocess.Popen | None = None
        self._killed = False
        if early is None:
            self._folder = socket_folder()
        else:
            self._folder, self._process = early.folder, early.take()
        self.address = address or address_in(self._folder)

    def preload(self, executor: str, niceness: int = 0) -> None:
        """Start a process that imports `executor`, a value of `distributed_executor_backend`, and waits for `start`.
        Only for a configuration with one engine. The same thread rules and errors apply as for `start`.
        """
        self._spawn({}, executor, str(niceness))

    def start(self) -> None:
        """Start and return; the engine binds `address` before it loads anything. It runs in its own process group,
        so that Ctrl-C reaches only the server.

        The calling thread must outlive the engine: on Linux the kernel kills the engine when that thread ends.
        Raises OSError if the system has no descriptors, memory or processes left.
        """
        if self._process is None:
            several = self.config.parallel.data_parallel_size > 1
            devices = _devices(self.config, self._slot, os.environ.get("CUDA_VISIBLE_DEVICES")) if several else ""
            self._spawn({"CUDA_VISIBLE_DEVICES": devices} if several else {})
        config = msgspec.msgpack.encode(self.config)
        with contextlib.suppress(BrokenPipeError):  # the engine died already: `wait` reports that
            self._process.stdin.write(len(config).to_bytes(4, "big") + config)
            self._process.stdin.flush()

    def _spawn(self, environment: dict[str, str], *arguments: str) -> None:
        self._process = spawn(self.address, self._folder, self.index, environment, arguments)

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """Return the exit code, or None while the engine runs."""
        return self._process.poll()

    def wait(self) -> int:
        """Block until the engine ends. Call it in a thread."""
        return self._process.wait()

    def successor(self) -> EngineProcess:
        """Return another run of this engine, not started."""
        return EngineProcess(self.config, self.index)

    def locate(self) -> str:
        return self.address

    def describe_end(self, code: int) -> str:
        return describe_exit(code)

    def terminate(self, timeout: float) -> int:
        """Ask the engine to exit, kill it and its workers after `timeout` seconds, and clean up.

        Returns the exit code. Idempotent. Call it only after `start`.
        """
        with contextlib.suppress(OSError, ValueError):  # the engine has ended
            self._process.stdin.write(b"end")
            self._process.stdin.flush()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)
        self.kill()
        return self._process.wait()

    def dump_stacks(self) -> None:
        """Make the engine and its workers write their stacks to files, even if they hang in native code.

        Call it only before `kill`.
        """
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGUSR2)

    def stacks(self) -> dict[str, str]:
        """Return the stacks written by `dump_stacks`, by process name.

        Empty for a process that is stopped or blocked in the kernel.
        """
        return {
            path.stem: path.read_text(errors="replace") for path in sorted(Path(self._folder).glob("*" + STACKS_SUFFIX))
        }

    def kill(self) -> None:
        """Kill the engine and its remaining workers with SIGKILL. Idempotent."""
        if self._killed:
            return
        self._killed = True
        end(self._process, self._folder)


def describe_exit(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def _devices(config: Config, index: int, visible: str | None) -> str:
    """Return the GPUs of engine `index`: one per rank, out of the `visible` ones (None: all).

    Has no effect without GPUs.
    """
    count = config.parallel.world_size
    mine = range(index * count, (index + 1) * count)
    if visible is None:
        return ",".join(map(str, mine))
    devices = [device for device in visible.split(",") if device.strip()]
    return ",".join(devices[i] for i in mine if i < len(devices))
