"""A chore: work of the engine besides its steps, with a schedule of its own. A feature that is off has no chore."""

from __future__ import annotations

from typing import Protocol


class Chore(Protocol):
    def due(self, idle: bool) -> float:
        """When to run next, by time.monotonic(); math.inf: not in this state. `idle`: no request is here."""

    def run(self, now: float, idle: bool) -> None:
        """Do what is due at `now`."""
