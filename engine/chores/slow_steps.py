"""Warnings of slow steps, which delay every request's next token."""

from __future__ import annotations

import logging
import math
import time

from quire.engine.chores.base import Chore
from quire.engine.scheduler import Scheduler
from quire.engine.step import Step

logger = logging.getLogger(__name__)

INTERVAL = 60.0  # seconds between warnings


class WarnOfSlowSteps(Chore):
    """Warn of steps that take `threshold` seconds or more."""

    def __init__(self, threshold: float, scheduler: Scheduler):
        self._threshold, self._scheduler = threshold, scheduler
        self._ended = 0.0  # time.monotonic() of the last step's result
        self._next = 0.0
        self._slow: tuple[Step, float] | None = None  # step to warn of, and its duration in seconds

    def observe(self, step: Step) -> None:
        now = time.monotonic()
        seconds, self._ended = now - max(step.scheduled, self._ended), now
        if seconds >= self._threshold and now >= self._next:
            self._next, self._slow = now + INTERVAL, (step, seconds)

    def due(self, idle: bool) -> float:
        return 0.0 if self._slow else math.inf

    def run(self, now: float, idle: bool) -> None:
        (step, seconds), self._slow = self._slow, None
        stats = self._scheduler.stats()
        logger.warning(
            "a step took %.1f s: %s; %d requests wait, %.0f %% of the KV cache is used",
            seconds,
            step.contents(),
            stats.num_waiting,
            100 * stats.kv_cache_usage,
        )
