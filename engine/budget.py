"""The token budget of a step, and its division among tenants."""

from __future__ import annotations

import math
import time

from quire.engine.background import Background
from quire.engine.request import Request
from quire.engine.shares import LEAD, Shares, parts_of_prompts
from quire.engine.step import Step

STEP_SECONDS = 0.12  # that a step should take while several tenants send requests
LEAST_TOKENS = 96  # for prompts in such a step: with fewer, a CPU computes much less per second
MIXED_SECONDS = 60.0  # after a request of another tenant than the one before, when the next one is likely
_NEW = 0.3  # weight of the newest step in the measured speed


class StepBudget:
    """`most`: tokens of the largest step. `whole_prompts`: each prompt runs in one step, so that none is shortened."""

    def __init__(self, most: int, whole_prompts: bool, shares: Shares):
        self.most, self.whole_prompts, self._shares = most, whole_prompts, shares
        self.pace, self.background = Pace(), Background()
        self.tokens = most  # for the step being scheduled
        self._parts: dict[str, int] = {}  # for a short step, for prompts of each tenant

    def start_step(self, num_running: int) -> None:
        limit = self.most if self.whole_prompts else self.pace.limit(self.most)
        self.tokens, self._parts = min(limit + num_running, self.most), {}

    def divide(self, prefills: list[Request], admitted: Request | None, budget: int) -> dict[str, int]:
        """Return tokens of `budget` for the prompts of each tenant (`parts_of_prompts`), from which the caller
        subtracts.
        """
        is_short = self.tokens < self.most
        parts = parts_of_prompts(prefills, admitted, budget, LEAD * self.most, self._shares, is_short)
        if is_short:
            self._parts = self._parts or parts
        return parts

    def of_waiting(self, request: Request, num_scheduled: int) -> int:
        """Return the most tokens of a waiting request in the step, which has `num_scheduled` so far. 0: it must
        wait.
        """
        budget = self.tokens - num_scheduled
        budget = min(budget, self._parts.get(request.tenant, budget))
        if request.background:
            budget = min(budget, self.background.budget)
        if budget > 0 and self.whole_prompts:  # for a background request, too, which would starve otherwise
            budget = self.most - num_scheduled
            return budget if request.num_tokens <= budget else 0
        return max(budget, 0)

    def charge(self, request: Request, num_tokens: int) -> None:
        """Count the tokens of a waiting request that was admitted."""
        if request.background:
            self.background.budget -= num_tokens
        if request.tenant in self._parts:
            self._parts[request.tenant] -= num_tokens


class Pace:
    """Shortens the steps of slow devices while several tenants send requests: one that arrives waits for the step in
    flight, which may be full of another's long prompt.
    """

    def __init__(self) -> None:
        self._last_end = 0.0  # time.monotonic() of the last results
        self._seconds = 0.0  # measured, per token of a prompt; 0: unknown
        self._tenant: str | None = None  # for the last request
        self._mixed_at = -math.inf  # time.monotonic() of the last request of another tenant than the one before

    def record_request(self, tenant: str) -> None:
        """Record the arrival of a request."""
        if self._tenant not in (None, tenant):
            self._mixed_at = time.monotonic()
        self._tenant = tenant

    def record_end(self, step: Step) -> None:
        """Record the end of a step."""
        ended = time.monotonic()
        if not step.input.encode:
            self.record_step(step.num_tokens, len(step.requests), ended - max(step.scheduled, self._last_end))
        self._last_end = ended

    def record_step(self, num_tokens: int, num_requests: int, seconds: float) -> None:
        """Record the duration of a step without images."""
        if num_tokens >= max(LEAST_TOKENS // 2, 2 * num_requests):  # most of it was prompts
            new = seconds / num_tokens
            self._seconds = new if not self._seconds else (1 - _NEW) * self._seconds + _NEW * new

    def limit(self, token_budget: int) -> int:
        """Return the most tokens of prompts in the next step."""
        if not self._seconds or time.monotonic() - self._mixed_at > MIXED_SECONDS:
            return token_budget
        return min(max(int(STEP_SECONDS / self._seconds), LEAST_TOKENS), token_budget)
