"""Starts the process of an engine with the standard library alone, so that `quire serve` can start one before its other
imports.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec

from quire.configs.stacks import STACKS_FOLDER

# the folder of the package quire; added to a child's path, so that it can import quire even if it is not installed
ROOT = os.path.dirname(os.path.dirname(os.path.realpath(find_spec("quire").origin)))
_MAX_SOCKET_PATH = 100  # sun_path holds 108 bytes on Linux, 104 on macOS
# Flags, or beginnings of flags, of commands that need no engine or another one. A flag that is missing here costs the
# time of a process that is killed.
_NEED_ANOTHER = (
    *("-h", "--help", "--print-config", "--headless", "--models", "--hub-cache", "-tp", "--tensor-parallel", "-pp"),
    *("--pipeline-parallel", "-dp", "--data-parallel", "--distributed-executor"),
)


class EarlyEngine:
    """A process that imports the executor of one rank and waits for its configuration, as after
    `EngineProcess.preload`. It belongs to this object until `take`.
    """

    executor = "uniproc"

    def __init__(self) -> None:
        """Start the process. Raises OSError."""
        self.folder = socket_folder()
        try:
            self._process: subprocess.Popen | None = spawn(
                address_in(self.folder), self.folder, 0, {}, (self.executor, "0")
            )
        except OSError:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def take(self) -> subprocess.Popen:
        """Give the process away, once, with its folder."""
        process, self._process = self._process, None
        return process

    def close(self) -> None:
        """Kill the process, unless it was taken. Idempotent."""
        if (process := self.take()) is not None:
            end(process, self.folder)


def early_engine(arguments: Sequence[str]) -> EarlyEngine | None:
    """Return an engine for `quire serve ARGUMENTS`; None if they need another one, or if the system cannot start it,
    which the model's own engine reports.
    """
    if any(argument.replace("_", "-").startswith(_NEED_ANOTHER) for argument in arguments):
        return None
    with suppress(OSError):
        return EarlyEngine()
    return None


def spawn(
    address: str, folder: str, index: int, environment: Mapping[str, str], arguments: Sequence[str]
) -> subprocess.Popen:
    """Start an engine with more `arguments`, in its own process group. Raises OSError."""
    # -P: modules in the current folder must not shadow ours
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "quire.engine.core", address, str(index), *arguments],
        stdin=subprocess.PIPE,
        env=python_environment() | {STACKS_FOLDER: folder} | environment,
        process_group=0,
    )


def end(process: subprocess.Popen | None, folder: str) -> None:
    """Kill an engine and its remaining workers with SIGKILL, and remove its folder. Call it once, because the id of
    the group may be reused later. `process` is None if it failed to start.
    """
    if process is not None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(BrokenPipeError):
            process.stdin.close()
    shutil.rmtree(folder, ignore_errors=True)


def python_environment() -> dict[str, str]:
    """Return the environment for a child process that imports quire.

    Torch threads that spin after an operation would occupy the cores that threads of the native kernels need next:
    models that alternate between the two were five times slower on two cores.
    """
    paths = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))
    return {"OMP_WAIT_POLICY": "PASSIVE"} | os.environ | {"PYTHONPATH": paths}


def address_in(folder: str) -> str:
    """Return the address of the engine whose socket is in `folder`."""
    return f"ipc://{folder}/engine"


def socket_folder() -> str:
    """Return a new private folder whose path is short enough for a Unix socket."""
    folder = tempfile.mkdtemp(prefix="quire-")
    if len(folder) + len("/engine") > _MAX_SOCKET_PATH:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="quire-", dir="/tmp")
    return folder
