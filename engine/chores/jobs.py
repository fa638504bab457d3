"""Calls that take more than a moment: generators, resumed one after the other, so that steps run in between."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator
from typing import Any

from quire.engine.chores.base import Chore

INTERVAL = 0.001  # seconds between two parts of a job: it waits for the disk


class Jobs(Chore):
    def __init__(self) -> None:
        self._jobs: deque[tuple[Generator[None, None, Any], Callable[[Any, Exception | None], None]]] = deque()
        self._next = 0.0

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def add(self, job: Generator[None, None, Any], reply: Callable[[Any, Exception | None], None]) -> None:
        """Queue a job. `reply` gets its result or its error."""
        self._jobs.append((job, reply))

    def due(self, idle: bool) -> float:
        return self._next if self._jobs else math.inf

    def run(self, now: float, idle: bool) -> None:
        """Resume the first job."""
        job, reply = self._jobs[0]
        self._next = now + INTERVAL
        try:
            next(job)
        except StopIteration as end:
            self._jobs.popleft()
            reply(end.value, None)
        except Exception as error:
            self._jobs.popleft()
            reply(None, error)
