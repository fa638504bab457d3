"""Folders for this user alone that a lock marks as in use: those of processes that were killed are removed by the next
one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_LOCK = "lock"


def make_folder(base: Path, prefix: str) -> tuple[Path, int]:
    """Return a new folder, and the descriptor that holds its lock. It gets its name when it is locked."""
    folder = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=base))  # mode 0700
    mark = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
    named = base / folder.name[1:]
    folder.rename(named)
    return named, mark


def remove_abandoned(base: Path, prefix: str) -> None:
    """Remove the folders of this user's processes that have ended without doing so."""
    for folder in base.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # another user's, or removed by another process just now
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            mark = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(mark)
