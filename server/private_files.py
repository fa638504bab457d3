"""Files and folders that only the server's user can read."""

from __future__ import annotations

import os
from pathlib import Path


def private_folder(path: Path) -> None:
    """Create the folder for this user alone; one that exists keeps its mode. Raises OSError."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


def private_database(path: Path) -> None:
    """Make the file of a SQLite database ours alone; files next to it get its mode. Raises OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(descriptor, 0o600)
    finally:
        os.close(descriptor)
