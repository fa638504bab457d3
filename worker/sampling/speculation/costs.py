"""The best number of drafts, by their costs, from the times of steps, and their gains, from earlier drafts.

The time of a step is not linear in its number of tokens: kernels for few rows read weights as fast as for one, and the
next kind of kernel may take twice as long for three rows as for two and hardly longer for eight. So the times are a
table, measured while the engine is idle after its start (`measurement.py`) and corrected by each step.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

KNOTS = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512])  # numbers of tokens in the table
_SLOPE = 1 / 24  # of the table before anything is measured
UNKNOWN_SLOPE = 1.0  # at which no draft pays
_RATE, _SPEED_RATE = 0.05, 0.1  # weights of a step in the table, and in how fast the machine is now
_MOST = 3.0  # times the expected time: a longer step counts as this, something else delayed it
_HOPE = 2.0  # prior: tokens counted as right before any was tried
_FIRST = 8.0  # tokens that drafts of earlier requests count at most
_GAIN = 1.02  # least gain in tokens per second for drafts
_RENEWED = 16  # steps after which `StepCosts.least_odds` is computed again
_ODDS = np.linspace(0, 1, 65)  # probabilities that `Plan.least_odds` distinguishes


class StepCosts:
    """Times of steps of decoding requests, relative to a step of one token."""

    def __init__(self, slope: float = _SLOPE) -> None:
        self.table = self.plain = 1 + (KNOTS - 1) * slope
        self._unit = 0.0  # recent seconds of a step of one token
        self._least: dict[tuple[int, int, float], float] = {}  # of `least_odds`, for some steps
        self._num_observed = 0

    def measured(self, seconds: dict[int, float], plain: dict[int, float] | None = None) -> None:
        """Take times of steps by number of tokens, measured one after another. `plain`: of those that verify no drafts,
        where these run otherwise (CUDA graphs of one token per request).
        """
        plain = plain or seconds
        self._unit = float(plain[min(plain)])
        self.table = self._extended(seconds) / self._unit
        self.plain = self._extended(plain) / self._unit
        self._least.clear()

    @staticmethod
    def _extended(seconds: dict[int, float]) -> np.ndarray:
        """Return the times at `KNOTS`, along a line behind the largest size."""
        sizes = sorted(seconds)
        times = np.maximum.accumulate([seconds[size] for size in sizes])
        slope = (times[-1] - times[0]) / max(sizes[-1] - sizes[0], 1)
        beyond = times[-1] + slope * np.maximum(KNOTS - sizes[-1], 0)
        return np.where(sizes[-1] >= KNOTS, np.interp(KNOTS, sizes, times), beyond)

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Record the seconds of a step of `num_tokens` tokens, drafts included."""
        expected = self.relative_time(num_tokens)
        self._unit = self._unit or seconds / expected
        ratio = min(max(seconds / (expected * self._unit), 1 / _MOST), _MOST)
        self._unit *= ratio**_SPEED_RATE
        weights = np.maximum(1 - np.abs(np.interp(num_tokens, KNOTS, np.arange(len(KNOTS))) - np.arange(len(KNOTS))), 0)
        self.table = np.maximum.accumulate(self.table * ratio ** (_RATE * weights))
        self.table /= self.table[0]
        self.plain = self.table
        self._num_observed += 1
        if self._num_observed % _RENEWED == 0:
            self._least.clear()

    def relative_time(self, num_tokens: int) -> float:
        """Return the time of a step that verifies drafts, relative to one of one token."""
        return float(np.interp(num_tokens, KNOTS, self.table))

    def without_drafts(self, num_rows: int) -> float:
        """Return the relative time of a step with one token per request."""
        return float(np.interp(num_rows, KNOTS, self.plain))

    def least_odds(self, num_rows: int, limit: int, cost: float) -> float:
        """Return `Plan.least_odds` of a step without drafts so far. It may be some steps old: it only decides which
        searches are left out.
        """
        key = num_rows, limit, cost
        if key not in self._least:
            rate = num_rows / self.without_drafts(num_rows)
            self._least[key] = least_odds(self, num_rows, num_rows, rate, limit, cost)
        return self._least[key]


def least_odds(costs: StepCosts, tokens: int, expected: float, rate: float, limit: int, cost: float) -> float:
    """Return a probability up to which no draft is added to a step of `tokens` tokens at the cost of its rate."""
    numbers, gains = _gains(limit)
    times = np.interp(tokens + numbers, KNOTS, costs.table) + cost * numbers
    pays = ((expected + gains) / times).max(axis=1) >= _GAIN * rate
    return float(_ODDS[max(int(pays.argmax()) - 1, 0)]) if pays.any() else 1.0


class Plan:
    """The drafts of a step while they are chosen, request by request."""

    def __init__(self, costs: StepCosts, num_rows: int) -> None:
        self.costs, self.tokens, self.expected = costs, num_rows, float(num_rows)
        self.num_drafts = 0
        self.rate = num_rows / costs.without_drafts(num_rows)
        self._least: dict[tuple[int, float], float] = {}  # `least_odds` since the last draft was added

    def least_odds(self, limit: int, cost: float = 0.0) -> float:
        """Return a probability up to which `take` returns 0: asking for it is cheaper than looking for drafts."""
        if not self.num_drafts:
            return self.costs.least_odds(self.tokens, limit, cost)
        if (limit, cost) not in self._least:
            self._least[limit, cost] = least_odds(self.costs, self.tokens, self.expected, self.rate, limit, cost)
        return self._least[limit, cost]

    def take(self, probability: float, limit: int, cost: float = 0.0) -> int:
        """Return how many drafts, at most `limit`, a request adds to the step. The first is right with `probability`,
        each further one if those before it are. Making one costs `cost` steps of one token.
        """
        if limit <= 0:
            return 0
        numbers = np.arange(1, limit + 1)
        gains = np.cumsum(probability**numbers)
        times = np.interp(self.tokens + numbers, KNOTS, self.costs.table) + cost * numbers
        rates = (self.expected + gains) / times
        best = int(rates.argmax())
        if rates[best] < _GAIN * self.rate:
            return 0
        self.tokens, self.expected, self.rate = self.tokens + best + 1, self.expected + float(gains[best]), rates[best]
        self.num_drafts += best + 1
        self._least.clear()
        return best + 1


@functools.cache
def _gains(limit: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of drafts `[limit]`, and how many of them are expected to be right `[odds, limit]`."""
    numbers = np.arange(1, limit + 1)
    return numbers, np.cumsum(_ODDS[:, None] ** numbers, axis=1)


@dataclass(slots=True)
class Odds:
    """The acceptance rate of one source's drafts for a request, not counting tokens after a wrong one."""

    right: float = 0.0
    tried: float = 0.0

    def learn(self, num_draft: int, num_accepted: int, memory: float = 0.8) -> None:
        self.right = memory * self.right + num_accepted
        self.tried = memory * self.tried + min(num_accepted + 1, num_draft)

    def beginning(self) -> Odds:
        """Return the odds of another request's first draft, if these are those of requests like it."""
        weight = min(_FIRST / self.tried, 1.0) if self.tried else 1.0
        return Odds(weight * self.right, weight * self.tried)

    def forget(self) -> None:
        """Record a step without a draft: after many, drafts are tried again."""
        self.right, self.tried = 0.95 * self.right, 0.95 * self.tried

    @property
    def probability(self) -> float:
        return (self.right + _HOPE) / (self.tried + _HOPE + 0.25)
