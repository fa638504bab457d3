"""Statistics for every server: INTERVAL after a change, at once when no request is left."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from quire.engine.chores.base import Chore

INTERVAL = 0.25  # seconds between statistics while requests run


class SendStats(Chore):
    def __init__(self, send: Callable[[], None]):
        self._send, self._due = send, math.inf

    def schedule(self) -> None:
        """Send statistics soon, because something changed."""
        if self._due == math.inf:
            self._due = time.monotonic() + INTERVAL

    def due(self, idle: bool) -> float:
        return 0.0 if idle and self._due < math.inf else self._due

    def run(self, now: float, idle: bool) -> None:
        self._due = math.inf
        self._send()
