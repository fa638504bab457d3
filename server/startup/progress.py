"""Shows the phases of startup: bars on a terminal, log lines elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from typing import TextIO

logger = logging.getLogger(__name__)

LINE_INTERVAL = 5.0  # seconds between log lines of one phase


class StartProgress:
    """Call `update(phase, fraction)` at any rate from one thread, and `close()` after startup succeeds or fails."""

    def __init__(self, stream: TextIO = sys.stderr):
        self.stream = stream
        self.phase: str | None = None
        self.logged = 0.0
        self.bar = None

    def update(self, phase: str, fraction: float) -> None:
        if self.stream.isatty():
            self._draw(phase, fraction)
        else:
            self._log(phase, fraction)
        self.phase = phase

    def _draw(self, phase: str, fraction: float) -> None:
        from huggingface_hub.utils import tqdm

        if phase != self.phase:
            self.close()
            self.bar = tqdm(
                total=100,
                desc=phase,
                file=self.stream,
                bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed}",
                leave=False,
            )
        self.bar.n = 100 * fraction
        self.bar.refresh()

    def _log(self, phase: str, fraction: float) -> None:
        now = time.monotonic()
        if phase != self.phase:
            logger.info("%s", phase)
        elif now - self.logged >= LINE_INTERVAL:
            logger.info("%s: %.0f%%", phase, 100 * fraction)
        else:
            return
        self.logged = now

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None
