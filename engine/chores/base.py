"""A chore: work of the engine in addition to its steps, with a schedule of its own. A feature that is off has none."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from quire.engine.step import Step


class Chore:
    def due(self, idle: bool) -> float:
        """Return when to run next, by time.monotonic(); math.inf: not in this state. `idle`: no request is here."""
        return math.inf

    def run(self, now: float, idle: bool) -> None:
        """Do what is due at `now`."""

    def observe(self, step: Step) -> None:
        """Called when the result of a step is here, before it is processed."""

    def stop(self) -> None:
        """Finish before the engine ends in order."""


def run_due(chores: Sequence[Chore], idle: bool) -> None:
    """Run the chores that are due."""
    now = time.monotonic()
    for chore in chores:
        if chore.due(idle) <= now:
            chore.run(now, idle)


def seconds_until_due(chores: Sequence[Chore], idle: bool) -> float | None:
    """Return the time until the first chore is due; None if none is in this state."""
    due = min(chore.due(idle) for chore in chores)
    return None if due == math.inf else max(due - time.monotonic(), 0.0)
