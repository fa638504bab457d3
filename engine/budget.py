"""The token budget of a step, and its division among tenants."""

from __future__ import annotations

import math
import time

from quire.engine.background import BACKGROUND_SHARE, Background
from quire.engine.request import Request, RequestQueue
from quire.engine.shares import LEAD, Shares, parts_of_prompts
from quire.engine.step import Step

STEP_SECONDS = 0.12  # target duration of a step while several tenants send requests
LEAST_TOKENS = 96  # minimum prompt tokens in such a step: with fewer, a CPU computes much less per second
MIXED_SECONDS = 60.0  # seconds after a change of tenant between requests, when the next change is likely
STRETCH = 1.7  # of a decode step by prompts: below the allowed factor of 2, as a margin for estimation errors
LEAST_CHUNK = 128  # minimum prompt tokens in a step: fewer take as long
LATE_SECONDS = 2.0  # waiting time after which a request justifies longer steps
_NEW = 0.3  # weight of the newest step in the measured speed


class StepBudget:
    """The token budget of a step. `most`: tokens of the largest step. `whole_prompts`: each prompt runs in one step.
    `follows_decodes`: prompts are cut so that running requests have their next tokens soon.
    """

    def __init__(self, most: int, whole_prompts: bool, shares: Shares, follows_decodes: bool = False):
        self.most, self.whole_prompts, self._shares = most, whole_prompts, shares
        self.background, self._follows_decodes = Background(), follows_decodes and not whole_prompts
        self.forget_measured()
        self.tokens = most  # budget of the step being scheduled
        self._parts: dict[str, int] = {}  # prompt tokens left for each tenant in a short step

    def forget_measured(self) -> None:
        """Forget the durations of steps and the tenants of recent requests."""
        self.pace, self.tempo = Pace(), Tempo() if self._follows_decodes else None

    def start_step(self, running: RequestQueue, num_decodes: int, num_waiting: int, longest_wait: float) -> None:
        """Set the budget of the next step. `num_decodes` foreground requests decode and `num_waiting` wait, the first
        of them for `longest_wait` seconds.
        """
        limit = self.most if self.whole_prompts else self.pace.limit(self.most)
        if self.tempo is not None and num_waiting < num_decodes and longest_wait < LATE_SECONDS:
            limit = min(limit, self.tempo.limit(num_decodes, self.most))
        num_tokens = len(running)
        if limit < self.most:
            num_tokens += sum(request.num_draft for request in running)
        self.tokens, self._parts = min(limit + num_tokens, self.most), {}

    def record_end(self, step: Step) -> None:
        """Record the end of a step."""
        seconds = self.pace.record_end(step)
        if self.tempo is not None and not step.input.encode:
            num_others = len(step.requests) + sum(step.input.num_draft.values())  # the last token of each, and drafts
            self.tempo.record_step(len(step.requests), step.num_tokens - num_others, seconds)

    def divide(self, prefills: list[Request], admitted: Request | None, budget: int) -> dict[str, int]:
        """Return each tenant's part of `budget` for its prompts (`parts_of_prompts`). The caller subtracts the tokens
        that it schedules.
        """
        is_short = self.tokens < self.most
        parts = parts_of_prompts(prefills, admitted, budget, LEAD * self.most, self._shares, is_short)
        if is_short:
            self._parts = self._parts or parts
        return parts

    def limit_of_waiting(self, request: Request, num_scheduled: int) -> int:
        """Return the maximum number of tokens of a waiting request in a step that has `num_scheduled` so far; 0 if the
        request must wait.
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
        """Deduct the tokens of a waiting request that was admitted."""
        if request.background:
            self.background.budget -= num_tokens
        if request.tenant in self._parts:
            self._parts[request.tenant] -= num_tokens


class Tempo:
    """Limits the prompt tokens of a step so that it takes at most `STRETCH` times as long as a step of the running
    requests alone. Both durations are measured.
    """

    def __init__(self) -> None:
        self._alone: dict[int, float] = {}  # seconds of a step without prompts, by bit length of its requests' number
        self._per_token = 0.0  # seconds that a prompt token adds; 0: unknown

    def record_step(self, num_requests: int, num_prompt: int, seconds: float) -> None:
        """Record the duration of a step with `num_prompt` prompt tokens. A few do not count: while background requests
        run, every step has some.
        """
        if BACKGROUND_SHARE * num_prompt <= num_requests:
            size = num_requests.bit_length()
            self._alone[size] = _newer(self._alone.get(size, 0.0), seconds)
        elif num_prompt >= LEAST_CHUNK:
            added = max(seconds - self._seconds_alone(num_requests), 0.1 * seconds)
            self._per_token = _newer(self._per_token, added / num_prompt)

    def limit(self, num_running: int, most: int) -> int:
        """Return the maximum number of prompt tokens in a step of `num_running` requests."""
        alone = self._seconds_alone(num_running)
        if not num_running or not alone or not self._per_token:
            return most
        return min(max(int((STRETCH - 1) * alone / self._per_token), LEAST_CHUNK), most)

    def _seconds_alone(self, num_requests: int) -> float:
        """Return the seconds of a step of about `num_requests` requests without prompts; 0: none was measured."""
        size = num_requests.bit_length()
        nearest = min(self._alone, key=lambda one: abs(one - size), default=0)
        return self._alone.get(nearest, 0.0)


def _newer(known: float, new: float) -> float:
    return new if not known else (1 - _NEW) * known + _NEW * new


class Pace:
    """Shortens the steps of slow devices while several tenants send requests: an arriving request waits for the step
    in flight, which may be full of another tenant's long prompt.
    """

    def __init__(self) -> None:
        self._last_end = 0.0  # time.monotonic() of the last results
        self._seconds = 0.0  # measured, per prompt token; 0: unknown
        self._tenant: str | None = None  # of the last request
        self._mixed_at = -math.inf  # time.monotonic() of the last change of tenant between requests

    def record_request(self, tenant: str) -> None:
        """Record the arrival of a request."""
        if self._tenant not in (None, tenant):
            self._mixed_at = time.monotonic()
        self._tenant = tenant

    def record_end(self, step: Step) -> float:
        """Record the end of a step. Returns its duration."""
        ended = time.monotonic()
        seconds, self._last_end = ended - max(step.scheduled, self._last_end), ended
        if not step.input.encode:
            self.record_step(step.num_tokens, len(step.requests), seconds)
        return seconds

    def record_step(self, num_tokens: int, num_requests: int, seconds: float) -> None:
        """Record the duration of a step without images."""
        if num_tokens >= max(LEAST_TOKENS // 2, 2 * num_requests):  # most of it was prompts
            new = seconds / num_tokens
            self._seconds = new if not self._seconds else (1 - _NEW) * self._seconds + _NEW * new

    def limit(self, token_budget: int) -> int:
        """Return the maximum number of prompt tokens in the next step."""
        if not self._seconds or time.monotonic() - self._mixed_at > MIXED_SECONDS:
            return token_budget
        return min(max(int(STEP_SECONDS / self._seconds), LEAST_TOKENS), token_budget)
