"""An estimate of a request's wait in the queue, from the rate at which running ones end."""

from __future__ import annotations

import math
import time

from quire.engine.messages import EngineStats

MEMORY = 60.0  # seconds after which what was measured counts 1/e
MAX_RETRY_AFTER = 60  # seconds: OpenAI's clients ignore a longer Retry-After and try again sooner


class QueueWait:
    """Counts requests that ended while others ran, and the time for it; old counts fade."""

    def __init__(self) -> None:
        self._num_ended = self._busy_seconds = 0.0
        self._was_busy: dict[int, bool] = {}
        self._observed: dict[int, float] = {}

    def observe(self, engine: int, stats: EngineStats, now: float | None = None) -> None:
        """Observe `stats` of one of the engines, counted since its last ones."""
        now = time.monotonic() if now is None else now
        since = now - self._observed.get(engine, now)
        if self._was_busy.get(engine):
            self._num_ended += stats.num_ended
            self._busy_seconds += since
            if self._busy_seconds > MEMORY:
                fade = MEMORY / self._busy_seconds
                self._num_ended *= fade
                self._busy_seconds = MEMORY
        self._observed[engine], self._was_busy[engine] = now, stats.num_running > 0

    def seconds(self, num_waiting: int) -> float:
        """Estimate the seconds until `num_waiting` requests leave the queue. Before one has ended, assume that one is
        about to.
        """
        num_engines = max(len(self._observed), 1)
        rate = max(self._num_ended, 1.0) / max(self._busy_seconds, 0.001)
        return num_waiting / (rate * num_engines)


def retry_after(seconds: float) -> int:
    """Return the Retry-After header of a wait."""
    return min(max(math.ceil(seconds), 1), MAX_RETRY_AFTER)
