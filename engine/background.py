"""The share of a step that background requests get."""

from __future__ import annotations

import math
import time

# Background requests get one token per BACKGROUND_SHARE tokens of other requests in a step, and at least one, so that
# they neither slow the others nor starve. When only they run, a step's budget is divided by BACKGROUND_STEP, because an
# arriving request waits for the steps in flight. For SHORT_STEP_SECONDS after the last foreground request, when the
# next one is likely, the budget is divided by SHORT_STEP, and one step is in flight at a time.
BACKGROUND_SHARE, BACKGROUND_STEP = 4, 8
SHORT_STEP, SHORT_STEP_SECONDS = 256, 5.0


class Background:
    """The tokens that background requests may get in the step being scheduled."""

    def __init__(self) -> None:
        self.budget = 0
        self._last_foreground = -math.inf  # time.monotonic() when a foreground request was last here

    def record_foreground(self) -> None:
        """Record the arrival of a foreground request."""
        self._last_foreground = time.monotonic()

    @property
    def expects_foreground(self) -> bool:
        """Return whether a foreground request was here recently."""
        return time.monotonic() - self._last_foreground < SHORT_STEP_SECONDS

    def start_step(self, are_others: bool, num_tokens: int, token_budget: int) -> None:
        """Set the budget of a step with `num_tokens` foreground tokens. `are_others`: such requests run or wait."""
        if are_others:
            self.record_foreground()
            budget = max(num_tokens // BACKGROUND_SHARE, 1)
        else:
            fraction = SHORT_STEP if self.expects_foreground else BACKGROUND_STEP
            budget = max(token_budget // fraction, 1)
        self.budget = min(budget, token_budget - num_tokens)
