"""The audit log: a JSON line for every accepted request, appended when it ends."""

from __future__ import annotations

import logging
import os
import time
from datetime import UTC, datetime

import msgspec

logger = logging.getLogger("quire.keys")

_LOOK_SECONDS = 1.0  # between looks whether the file was moved away


class AuditLog:
    """Appends audit lines. Several processes may share a file, because each line is one write. A file that a tool moved
    away is made anew.
    """

    def __init__(self, path: str):
        """Raise ValueError if the file cannot be written."""
        self.path = path
        self._failed = False
        self._looked = time.monotonic()
        try:
            self._descriptor = self._open()
        except OSError as error:
            raise ValueError(f"--audit-log {path}: {error.strerror}") from None

    @staticmethod
    def timestamp(seconds: float) -> str:
        return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")

    def write(self, row: dict[str, object]) -> None:
        """Write a line. Failures are logged as an error, once until a line can be written again."""
        line = msgspec.json.encode(row) + b"\n"
        try:
            self._reopen_if_moved()
            written = os.write(self._descriptor, line)
            if written < len(line):
                raise OSError(f"{len(line) - written} bytes of a line are missing")
        except OSError as error:
            if not self._failed:
                logger.error("--audit-log %s: cannot write: %s", self.path, error.strerror or error)
            self._failed = True
        else:
            self._failed = False

    def close(self) -> None:
        os.close(self._descriptor)

    def _open(self) -> int:
        return os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _reopen_if_moved(self) -> None:
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        try:
            moved = not os.path.samestat(os.stat(self.path), os.fstat(self._descriptor))
        except FileNotFoundError:
            moved = True
        if moved:
            fresh = self._open()
            os.close(self._descriptor)
            self._descriptor = fresh
