"""Files that only the server's user can read, which appear whole or not at all, and the errors of a full disk."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sqlite3
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from quire.server.errors import InsufficientStorage

_PART = ".part-"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def is_full(error: BaseException) -> bool:
    """Return whether the disk has no space."""
    if isinstance(error, sqlite3.Error):
        return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
    return isinstance(error, OSError) and error.errno in _FULL


@contextlib.contextmanager
def or_full() -> Iterator[None]:
    """Raise InsufficientStorage where the disk is full."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        if not is_full(error):
            raise
        raise InsufficientStorage("The server's disk is full: this request was not stored.") from None


class Part:
    """A file in the making, without its name: `finish` gives it one, `discard` removes it. Locked, so that the sweep of
    another process does not take it for abandoned.
    """

    def __init__(self, folder: Path):
        self.path = folder / f"{_PART}{uuid.uuid4().hex}"
        self.file: BinaryIO = os.fdopen(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
        fcntl.flock(self.file, fcntl.LOCK_EX)

    def close(self) -> int:
        """Write everything to the disk; returns the size."""
        self.file.flush()
        os.fsync(self.file.fileno())
        return self.file.tell()

    def finish(self, path: Path) -> None:
        self.path.rename(path)
        self.file.close()

    def discard(self) -> None:
        """Discard the file. Idempotent, without effect after `finish`."""
        if self.file.closed:
            return
        self.path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # the rest cannot be written: the disk is full
            self.file.close()

    def __del__(self) -> None:
        if hasattr(self, "file"):
            self.discard()


def abandoned(folder: Path, known: set[str]) -> list[Path]:
    """Return orphaned files: neither `known` names nor parts that a process is writing."""
    ours = (path for path in folder.iterdir() if path.name.startswith(("file-", _PART)))
    return [path for path in ours if path.name not in known and not _is_locked(path)]


def _is_locked(path: Path) -> bool:
    if not path.name.startswith(_PART):
        return False
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return True  # its process finished it just now
    return False
