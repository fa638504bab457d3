"""Finds the request that kills engines, so that all other requests finish.

After a death every request in the batch is a suspect. The next engine first gets all suspects that made progress in the
last one together; then the others, in at most `MAX_TRIALS` groups, one after the other. A group is cleared when each of
its requests has ended or received `PROGRESS` tokens. If the engine dies during a trial, only the group's uncleared
requests stay suspects, and are tried in smaller groups; if a request was tried alone, it killed the engine. All other
open requests wait until every suspect is cleared, so that only the trial can be the cause. A request that kills the
engine in its first step thus costs two engines, and a crash for another reason one extra pause.

Several frontends share the engine, and each knows only its own requests: a request tried alone may have died with
another frontend's. With several frontends a second such death is therefore required. Frontends take turns with these
confirmations (`until_turn`), so that no two run at the same time unless one takes longer than half a turn.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

PROGRESS = 4  # tokens after the resubmission that clear a suspect: more than the steps in flight
MAX_TRIALS = 16
TURN = 2.0  # seconds


class Suspect(Protocol):
    is_open: bool
    num_received: int  # tokens from the engine that it was last sent to
    num_solo_deaths: int  # deaths of engines that ran only this request of ours


class Quarantine:
    """Call `on_death`, then `next_trial` after every output, until `active` is False.

    `num_needed` is the number of deaths during a trial alone that identify the culprit. `culprit` is the request that
    killed the last engine.
    """

    def __init__(self, num_needed: int = 1) -> None:
        self.num_needed = num_needed
        self.culprit: Suspect | None = None
        self._groups: deque[list[Suspect]] = deque()
        self._trial: list[Suspect] = []

    @property
    def active(self) -> bool:
        """Whether suspects are on trial or wait for a trial."""
        return bool(self._trial or self._groups)

    def on_death(self, batch: list[Suspect]) -> tuple[list[Suspect], bool]:
        """Called after the death of an engine that ran `batch`.

        Returns the suspects, and whether they were on trial.
        """
        self.culprit = None
        suspects = [one for one in self._trial if _is_on_trial(one)]
        on_trial, self._trial = bool(suspects), []
        if on_trial and len(suspects) == 1:
            groups = []
            self._count_solo_death(suspects[0])
        elif on_trial:
            groups = _split(suspects)
        else:
            suspects = batch
            for one in batch:
                one.num_solo_deaths = 0
            far = [one for one in batch if one.num_received >= PROGRESS]
            groups = [far] * bool(far) + _split([one for one in batch if one.num_received < PROGRESS])
        self._groups.extendleft(reversed(groups))
        return suspects, on_trial

    def _count_solo_death(self, suspect: Suspect) -> None:
        suspect.num_solo_deaths += 1
        if suspect.num_solo_deaths >= self.num_needed:
            self.culprit = suspect
        else:
            self._groups.append([suspect])

    @property
    def confirms_next(self) -> bool:
        """Whether the next trial repeats that of a request that was tried alone when an engine died."""
        for group in self._groups:
            if alive := [one for one in group if one.is_open]:
                return any(one.num_solo_deaths for one in alive)
        return False

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


def until_turn(elapsed: float, index: int, count: int) -> float:
    """Seconds until frontend `index` of `count` may begin to confirm, `elapsed` seconds after the engine's start. For
    example, of 2 frontends with 2 s turns, frontend 0 may start in seconds 0-1, 4-5, ...; frontend 1 in 2-3, 6-7, ...
    """
    into_own = (elapsed - index * TURN) % (count * TURN)
    return 0.0 if into_own < TURN / 2 else count * TURN - into_own
