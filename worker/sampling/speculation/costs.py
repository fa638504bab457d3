"""The best number of drafts, by their costs, from the times of steps, and their gains, from earlier drafts.

A step of m tokens takes about a + b m: a is reading the weights, b the arithmetic of one more token. With R requests a
step without drafts makes R tokens in a + b R. A draft that is right with probability p pays if p / b exceeds that rate.
"""

from __future__ import annotations

from dataclasses import dataclass

_RATIO = 1 / 24  # b / a before it is known
_LEAST, _MOST = 1 / 256, 1 / 4  # of what is measured, which is noisy
_DECAY = 0.98  # of the weight of a step, per step
_LONG = 3.0  # times what was expected: steps that something else delayed do not count more
_HOPE = 2.0  # tokens that count as right before any was tried
_ENOUGH = 1.0  # variance of m from which b can be told


class StepCosts:
    """A line through the times of the last steps of decoding requests."""

    def __init__(self) -> None:
        self._n = self._m = self._mm = self._t = self._mt = 0.0  # weighted sums

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step of `num_tokens` tokens, drafts included, took so long."""
        if self._n > 1:
            seconds = min(seconds, _LONG * self._t / self._n)
        for name, value in zip(
            ("_n", "_m", "_mm", "_t", "_mt"), (1.0, num_tokens, num_tokens**2, seconds, num_tokens * seconds)
        ):
            setattr(self, name, _DECAY * getattr(self, name) + value)

    @property
    def ratio(self) -> float:
        """b / a."""
        if not self._n:
            return _RATIO
        mean, time = self._m / self._n, self._t / self._n
        variance = self._mm / self._n - mean**2
        if variance < _ENOUGH:
            return _RATIO
        b = (self._mt / self._n - mean * time) / variance
        a = time - b * mean
        return _MOST if a <= 0 < b else min(max(b / a, _LEAST), _MOST)

    def threshold(self, num_rows: int) -> float:
        """The probability from which a draft pays in a step of so many requests."""
        cost = self.ratio * num_rows
        return cost / (1 + cost)


@dataclass(slots=True)
class Odds:
    """How often the drafts of one source were right for a request, tokens after a wrong one aside."""

    right: float = 0.0
    tried: float = 0.0

    def learn(self, num_draft: int, num_accepted: int) -> None:
        self.right = 0.8 * self.right + num_accepted
        self.tried = 0.8 * self.tried + min(num_accepted + 1, num_draft)

    def forget(self) -> None:
        """A step passed without a draft: after many it is tried again."""
        self.right, self.tried = 0.95 * self.right, 0.95 * self.tried

    @property
    def probability(self) -> float:
        return (self.right + _HOPE) / (self.tried + _HOPE + 0.25)

    def paying(self, threshold: float, limit: int) -> int:
        """How many drafts pay, at most `limit`: the last one is right if all before it are."""
        number, chance = 0, self.probability
        while number < limit and chance >= threshold:
            number, chance = number + 1, chance * self.probability
        return number
