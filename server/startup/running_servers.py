"""Records the servers of this user that run on this machine, for `quire ps` and `quire stop`: a file per process in
quire's cache folder.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from quire.checkpoints import packaged
from quire.configs.config import Config
from quire.server.private_files import private_folder
from quire.server.startup.address_file import address_of
from quire.server.startup.model_names import served_names

logger = logging.getLogger("quire")
_START = 19  # index among the fields of /proc/PID/stat after the name: the process start time, in clock ticks


@dataclass(frozen=True, slots=True)
class Running:
    """One server. `started` distinguishes the process from a later one with the same pid."""

    pid: int
    url: str  # http://HOST:PORT, or unix:PATH
    models: list[str]
    started: str


def folder() -> Path:
    """Return $QUIRE_CACHE/running/HOST, by default below ~/.cache/quire: machines may share a home."""
    return packaged.folder().parent / "running" / socket.gethostname()


def record(config: Config, listener: socket.socket) -> None:
    """Write the file of this process. A failed write is only logged: the server works without the file."""
    address = address_of(listener)
    if not address.startswith("unix:"):
        address = f"http{'s' if config.server.ssl_certfile else ''}://{address}"
    mine = Running(os.getpid(), address, served_names(config), _started(os.getpid()))
    _write(mine)


def rename(names: list[str]) -> None:
    """Replace the model names in the file of this process, if it has one."""
    with contextlib.suppress(OSError):
        _write(replace(Running(**json.loads(_file(os.getpid()).read_text(encoding="utf-8"))), models=names))


def _write(mine: Running) -> None:
    try:
        private_folder(folder())
        part = folder() / f".{mine.pid}"
        part.write_text(json.dumps(asdict(mine)), encoding="utf-8")
        part.replace(_file(mine.pid))
    except OSError as error:
        logger.debug("`quire ps` will not see this server: cannot write to %s: %s", folder(), error)


def forget() -> None:
    """Remove the file of this process."""
    with contextlib.suppress(OSError):
        _file(os.getpid()).unlink()


def running() -> list[Running]:
    """Return the running servers, by pid; remove the files of those that were killed."""
    found = []
    for path in sorted(folder().glob("[0-9]*")):
        try:
            one = Running(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            continue  # the server has just ended, or the file is no record
        if is_running(one):
            found.append(one)
        else:
            with contextlib.suppress(OSError):
                path.unlink()
    return sorted(found, key=lambda one: one.pid)


def is_running(server: Running) -> bool:
    try:
        os.kill(server.pid, 0)
    except OSError:
        return False
    return _started(server.pid) == server.started


def _file(pid: int) -> Path:
    return folder() / str(pid)


def _started(pid: int) -> str:
    """Return the process start in ticks since boot; empty if the system does not tell (macOS), or if the process has
    ended and its parent has not reaped it.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[_START]
