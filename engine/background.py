"""Background requests: their share of a step."""

from __future__ import annotations

import math
import time

# Background requests get one token per BACKGROUND_SHARE tokens of other requests in a step, and at least one, so that
# they neither slow the others nor starve. When they are alone their steps have this fraction of the budget, because an
# arriving request waits for the steps in flight. For some seconds after the last other request, when the next one is
# likely, their steps are shorter still, and one at a time.
BACKGROUND_SHARE, BACKGROUND_STEP = 4, 8
SHORT_STEP, SHORT_STEP_SECONDS = 256, 5.0


class Background:
    """The tokens that background requests may get in the step being scheduled."""

    def __init__(self) -> None:
        self.budget = 0
        self._last_foreground = -math.inf  # time.monotonic() when another request was last here

    def record_foreground(self) -> None:
        """Record the arrival of a foreground request."""
        self._last_foreground = time.monotonic()

    @property
    def expects_foreground(self) -> bool:
        """Return whether a foreground request was here lately."""
        return time.monotonic() - self._last_foreground < SHORT_STEP_SECONDS

    def start_step(self, are_others: bool, num_tokens: int, token_budget: int) -> None:
        """Set the budget for a step that has `num_tokens` tokens of others. `are_others`: some run or wait."""
        if are_others:
            self.record_foreground()
            budget = max(num_tokens // BACKGROUND_SHARE, 1)
        else:
            fraction = SHORT_STEP if self.expects_foreground else BACKGROUND_STEP
            budget = max(token_budget // fraction, 1)
        self.budget = min(budget, token_budget - num_tokens)
