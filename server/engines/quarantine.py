"""Finds the request that kills engines, so that all others finish.

After a death every request in the batch is a suspect. The next engine first gets, together, those that had made
progress in the last one; then the others, in at most `MAX_TRIALS` groups, one after the other. A group is cleared when
each of its requests has ended or received `PROGRESS` tokens. If the engine dies during a trial, only the group's
uncleared requests stay suspects, and are tried in smaller groups; a request that was tried alone has killed the engine.
All other open requests wait until every suspect is cleared, so that only the trial can be the cause. A request that
kills the engine in its first step thus costs two engines, and a crash for another reason one extra pause.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

PROGRESS = 4  # tokens after the resubmission that clear a suspect: more than the steps in flight
MAX_TRIALS = 16


class Suspect(Protocol):
    is_open: bool
    num_received: int  # tokens from the engine that it was last sent to


class Quarantine:
    """Call `on_death`, then `next_trial` after every output, until `active` is False."""

    def __init__(self) -> None:
        self._groups: deque[list[Suspect]] = deque()
        self._trial: list[Suspect] = []

    @property
    def active(self) -> bool:
        """Whether suspects are on trial or wait for theirs."""
        return bool(self._trial or self._groups)

    def on_death(self, batch: list[Suspect]) -> tuple[list[Suspect], bool]:
        """Called after the death of an engine that ran `batch`.

        Returns the suspects, and whether they were on trial; a single suspect on trial has killed the engine.
        """
        suspects = [one for one in self._trial if _is_on_trial(one)]
        on_trial, self._trial = bool(suspects), []
        if on_trial:
            groups = _split(suspects) if len(suspects) > 1 else []
        else:
            suspects = batch
            far = [one for one in batch if one.num_received >= PROGRESS]
            groups = [far] * bool(far) + _split([one for one in batch if one.num_received < PROGRESS])
        self._groups.extendleft(reversed(groups))
        return suspects, on_trial

    def next_trial(self) -> list[Suspect]:
        """The suspects to send now; [] during a trial, and when none are left."""
        if any(map(_is_on_trial, self._trial)):
            return []
        self._trial = []
        while self._groups and not self._trial:
            self._trial = [one for one in self._groups.popleft() if one.is_open]
        return self._trial


def _is_on_trial(suspect: Suspect) -> bool:
    return suspect.is_open and suspect.num_received < PROGRESS


def _split(suspects: list[Suspect]) -> list[list[Suspect]]:
    size = max(-(-len(suspects) // MAX_TRIALS), 1)
    return [suspects[i : i + size] for i in range(0, len(suspects), size)]
