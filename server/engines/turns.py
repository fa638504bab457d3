"""Coordination of crash trials at an engine that several frontends share (`quarantine.py`)."""

from __future__ import annotations


class Turns:
    """The turns at one engine, kept by the frontends' parent. `holder` is the frontend that may try its suspects; the
    others send nothing new until `holder` is None.
    """

    def __init__(self) -> None:
        self._waiting: list[int] = []

    @property
    def holder(self) -> int | None:
        return self._waiting[0] if self._waiting else None

    def note(self, frontend: int, active: bool) -> bool:
        """Note whether `frontend` has suspects. Return whether the holder changed."""
        before = self.holder
        if active and frontend not in self._waiting:
            self._waiting.append(frontend)
        elif not active and frontend in self._waiting:
            self._waiting.remove(frontend)
        return self.holder != before
