"""A chore: work of the engine in addition to its steps, with its own schedule. A feature that is off has none."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from quire.engine.step import Step


class Chore:
    def due(self, idle: bool) -> float:
        """Return the time.monotonic() at which to run next; math.inf: not in this state. `idle`: no request is here."""
        return math.inf

    def run(self, now: float, idle: bool) -> None:
        """Do what is due at `now`."""

    def observe(self, step: Step) -> None:
        """Take note of a step whose result has arrived, before the result is processed."""

    def stop(self) -> None:
        """Finish before an orderly exit of the engine."""


def run_due(chores: Sequence[Chore], idle: bool) -> None:
    """Run the chores that are due."""
    now = time.monotonic()
    for chore in chores:
        if chore.due(idle) <= now:
            chore.run(now, idle)


def seconds_until_due(chores: Sequence[Chore], idle: bool) -> float | None:
    """Return the seconds until the first chore is due; None if no chore is due in this state."""
    due = min(chore.due(idle) for chore in chores)
    return None if due == math.inf else max(due - time.monotonic(), 0.0)
