"""Who may have killed an engine, and in what order these requests are tried again, so that the others finish whatever
one of them does.

After a death everybody who was in the batch is a suspect. First those go to the next engine that had come far with the
last one, together; then the others, in at most `MAX_TRIALS` groups, one after the other. A group is cleared when each
member got a few tokens further than before, or ended. An engine that dies during a trial makes suspects of that group's
rest alone, which is tried in smaller groups; one that was tried alone has killed the engine. What else is open waits
until all are cleared: nothing but the trial can then be to blame. So a request that kills the engine in its first step
costs two engines in all, and a crash for another reason one pause more.

Several frontends share the engine, and each knows its own requests only: one that was tried alone may have died with
another frontend's. There a second death of this kind is needed. Frontends take turns with such confirmations
(`until_turn`), so that no two run at the same time unless one takes longer than half a turn.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

PROGRESS = 4  # tokens behind those known at the death that clear a suspect: more than the steps in flight
MAX_TRIALS = 16
TURN = 2.0  # seconds


class Suspect(Protocol):
    is_open: bool
    num_received: int  # tokens from the engine that it was last sent to
    num_solo_deaths: int  # of engines that ran nothing else of ours


class Quarantine:
    """`on_death`, then `next_trial` whenever that may have something to send, until `active` is False.

    `num_needed` is the number of deaths alone that convict. `culprit` is the request that the last death convicted.
    """

    def __init__(self, num_needed: int = 1) -> None:
        self.num_needed = num_needed
        self.culprit: Suspect | None = None
        self._groups: deque[list[Suspect]] = deque()
        self._trial: list[Suspect] = []

    @property
    def active(self) -> bool:
        """Whether somebody is tried, or waits for that."""
        return bool(self._trial or self._groups)

    def on_death(self, batch: list[Suspect]) -> tuple[list[Suspect], bool]:
        """An engine has died that ran `batch`.

        Returns the suspects, and whether that was their trial.
        """
        self.culprit = None
        suspects = [one for one in self._trial if _is_on_trial(one)]
        on_trial, self._trial = bool(suspects), []
        if on_trial and len(suspects) == 1:
            groups = []
            self._judge(suspects[0])
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

    def _judge(self, suspect: Suspect) -> None:
        suspect.num_solo_deaths += 1
        if suspect.num_solo_deaths >= self.num_needed:
            self.culprit = suspect
        else:
            self._groups.append([suspect])

    @property
    def confirms_next(self) -> bool:
        """Whether the next trial is that of a request that was alone with an engine that died."""
        for group in self._groups:
            if alive := [one for one in group if one.is_open]:
                return any(one.num_solo_deaths for one in alive)
        return False

    def next_trial(self) -> list[Suspect]:
        """The suspects that are to be sent now; [] while a trial goes on, and when there are none left."""
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
    """Seconds until frontend `index` of `count` may begin to confirm, `elapsed` seconds after the engine's start. E.g.
    of 2 with turns of 2 s, frontend 0 may between 0 and 1, 4 and 5, ... and frontend 1 between 2 and 3, 6 and 7, ...
    """
    into_own = (elapsed - index * TURN) % (count * TURN)
    return 0.0 if into_own < TURN / 2 else count * TURN - into_own
