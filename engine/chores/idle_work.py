"""Work that the workers deferred until no request runs, such as recordings of CUDA graphs."""

from __future__ import annotations

import math

from quire.engine.chores.base import Chore
from quire.worker.messages import WorkerCalls


class IdleWork(Chore):
    """Runs one piece per turn, so that the engine receives messages in between."""

    def __init__(self, workers: WorkerCalls):
        self._workers, self._is_left = workers, True

    def due(self, idle: bool) -> float:
        return 0.0 if idle and self._is_left else math.inf

    def run(self, now: float, idle: bool) -> None:
        self._is_left = self._workers.work_idle()
