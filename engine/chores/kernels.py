"""Looks for kernels that are still being compiled, while no request runs, so that no request pays for the switch."""

from __future__ import annotations

import math
import time

from quire.engine.chores.base import Chore
from quire.worker.messages import WorkerCalls

INTERVAL = 0.5  # seconds between looks


class LookForKernels(Chore):
    def __init__(self, workers: WorkerCalls):
        self._workers, self._next = workers, time.monotonic() + INTERVAL

    def due(self, idle: bool) -> float:
        return self._next if idle else math.inf

    def run(self, now: float, idle: bool) -> None:
        self._next = now + INTERVAL if self._workers.look_for_ops() else math.inf
