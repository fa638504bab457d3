"""Finds the request that kills engines, so that all other requests finish.

After a death every request that ran is a suspect. The next engine first gets together all suspects that made progress
in the last one; then the others, in at most `MAX_TRIALS` groups, one after the other. A group is cleared when each of
its requests has ended or received `PROGRESS` tokens; it then pauses, so that only the trial can cause a death.
A request that was cleared and runs when an engine dies again is tried to its end, in at most `MAX_LONG_TRIALS` groups:
it may kill at any later token. If the engine dies during a trial, the group is tried in smaller groups; if a request
was tried alone, it is the culprit, and all others are released. A request that kills the engine in its first step
thus costs two engines, one that kills later a few more, and a crash for another reason one extra pause.

Several frontends share the engine, and each knows only its own requests. Their parent lets one at a time try its
suspects, while the others send nothing new (`turns.py`). A frontend that learns of it late may have sent requests
meanwhile: with several frontends a second death of a request alone is therefore required.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

PROGRESS = 4  # tokens after the resubmission that clear a suspect: more than the steps in flight
MAX_TRIALS = 16
MAX_LONG_TRIALS = 4  # each may take as long as its longest request; fewer groups are fewer pauses but more deaths


class Suspect(Protocol):
    is_open: bool
    num_received: int  # tokens from the engine to which it was last sent
    num_crashes: int  # deaths of engines that ran it
    num_solo_deaths: int  # deaths of engines that ran only this one of our requests
    runs_to_end: bool  # only its end clears it


class Quarantine:
    """The trials of the suspects. Call `on_death`, then `next_trial` after every output, until `active` is False.

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
        """Return whether suspects are on trial or wait for a trial."""
        return bool(self._trial or self._groups)

    def on_death(self, batch: list[Suspect]) -> None:
        """Make suspects of `batch`, which ran on the engine that died."""
        on_trial = [one for one in batch if one in self._trial and _is_on_trial(one)]
        self._trial, self.culprit = [], None
        others = [one for one in batch if one not in on_trial]
        for one in others:
            one.runs_to_end = one.num_crashes > 0
            one.num_solo_deaths = 0
        for one in batch:
            one.num_crashes += 1
        if len(on_trial) == 1 and not others:
            self._record_solo_death(on_trial[0])
        else:
            self._groups.extendleft(reversed(_split(on_trial) + _first_trials(others)))

    def _record_solo_death(self, suspect: Suspect) -> None:
        suspect.num_solo_deaths += 1
        if suspect.num_solo_deaths < self.num_needed:
            self._groups.appendleft([suspect])
            return
        self.culprit = suspect  # also for the earlier deaths
        for group in self._groups:
            for one in group:
                one.num_crashes = one.num_solo_deaths = 0
        self._groups.clear()

    def cleared(self, last: bool = False) -> list[Suspect]:
        """Return the requests of a trial that has just succeeded, to be paused during the next trial; with `last`, also
        if no trial follows.
        """
        more = last or any(one.is_open for group in self._groups for one in group)
        if not more or any(map(_is_on_trial, self._trial)):
            return []
        cleared, self._trial = [one for one in self._trial if one.is_open], []
        return cleared

    def next_trial(self) -> list[Suspect]:
        """Return the suspects to send now; [] during a trial, and when none are left."""
        if any(map(_is_on_trial, self._trial)):
            return []
        self._trial = []
        while self._groups and not self._trial:
            self._trial = [one for one in self._groups.popleft() if one.is_open]
        return self._trial


def _is_on_trial(suspect: Suspect) -> bool:
    return suspect.is_open and (suspect.runs_to_end or suspect.num_received < PROGRESS)


def _first_trials(suspects: list[Suspect]) -> list[list[Suspect]]:
    """Return the groups of requests that were not on trial when the engine died: short trials first."""
    short = [one for one in suspects if not one.runs_to_end]
    far = [one for one in short if one.num_received >= PROGRESS]
    near = [one for one in short if one.num_received < PROGRESS]
    return [far] * bool(far) + _split(near) + _split([one for one in suspects if one.runs_to_end])


def _split(suspects: list[Suspect]) -> list[list[Suspect]]:
    """Return at most the maximum number of trials as groups of equal size, each smaller than `suspects` if there are at
    least two.
    """
    max_trials = MAX_LONG_TRIALS if any(one.runs_to_end for one in suspects) else MAX_TRIALS
    size = max(-(-len(suspects) // max_trials), 1)
    return [suspects[i : i + size] for i in range(0, len(suspects), size)]
