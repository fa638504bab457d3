"""Keeps the newest warnings and errors of a process's log, for the page at `/` and /server_info."""

from __future__ import annotations

import logging
from collections import deque
from typing import TypedDict

NUM_LINES, MOST_TEXT = 100, 1000  # kept; characters of one


class Line(TypedDict):
    time: float  # seconds since the epoch
    level: str
    logger: str
    message: str


class LogRing(logging.Handler):
    """Keeps the lines. A process adds one as a handler of its root logger."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: deque[Line] = deque(maxlen=NUM_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()[:MOST_TEXT]
        self.lines.append(Line(time=record.created, level=record.levelname, logger=record.name, message=message))


def kept_lines() -> list[Line]:
    """Return the lines that this process keeps, the oldest first."""
    rings = [handler for handler in logging.getLogger().handlers if isinstance(handler, LogRing)]
    return [line for ring in rings for line in ring.lines]
