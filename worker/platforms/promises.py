"""Memory that servers on this machine have planned for and not touched yet, so that a server started next to them does
not plan for it, too. Torch-free.

Each process holds a lock on a file with its plan; the lock ends with the process. Servers that do not share the
temporary folder (containers) do not see each other.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO


class Promises:
    """The plans in `folder`, by default one per user in the temporary folder."""

    def __init__(self, folder: Path | None = None, proc: Path = Path("/proc")) -> None:
        self._folder = folder or Path(tempfile.gettempdir()) / f"quire-memory-{os.getuid()}"
        self._proc = proc
        self._file: BinaryIO | None = None  # ours, locked

    def make(self, size: int) -> None:
        """Note that this process will use `size` bytes in total. Raises OSError if the folder cannot be written."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        if self._file is None:
            # open until the process ends
            self._file = open(self._folder / str(os.getpid()), "wb", buffering=0)  # noqa: SIM115
            with suppress(BlockingIOError):  # another engine of this process has it
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._file.seek(0)
        self._file.truncate()
        self._file.write(str(size).encode())

    def unfilled(self) -> int:
        """Return bytes that other processes have planned for and do not occupy yet."""
        with suppress(FileNotFoundError):  # no server has planned anything
            return sum(self._unfilled(path) for path in self._folder.iterdir() if path.name != str(os.getpid()))
        return 0

    def _unfilled(self, path: Path) -> int:
        try:
            with open(path, "rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:  # its process lives
                    return max(int(file.read() or 0) - self._resident(path.name), 0)
                path.unlink()
        except (FileNotFoundError, PermissionError):  # it ended meanwhile; or the folder is another user's
            pass
        return 0

    def _resident(self, pid: str) -> int:
        """Return bytes in memory; 0 for a process of another container."""
        with suppress(OSError):
            return int((self._proc / pid / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return 0
