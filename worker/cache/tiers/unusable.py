"""Files of the disk tier that cannot be used: their number, and one line in the log per reason and minute."""

from __future__ import annotations

import logging
import time
from collections import Counter
from pathlib import Path

logger = logging.getLogger(__name__)

INTERVAL = 60.0  # seconds between two lines with the same reason


class Unusable:
    """Counts unusable files and blocks since the start. Every method may be called in any thread."""

    def __init__(self, folder: Path):
        self.folder, self.count = folder, 0
        self._waiting: Counter[str] = Counter()  # by reason, not in the log yet
        self._example: dict[str, Path] = {}  # the last file of each reason
        self._logged: dict[str, float] = {}  # time of the last line of each reason

    def note(self, path: Path, reason: str) -> None:
        """Count a file or one of its blocks, for the next `report`. Reasons are a few constant texts."""
        self.count += 1
        self._waiting[reason] += 1
        self._example[reason] = path

    def report(self) -> None:
        """Log noted files, unless their reason was logged less than INTERVAL ago: then a later call does."""
        now = time.monotonic()
        for reason, number in list(self._waiting.items()):
            if number and now - self._logged.get(reason, -INTERVAL) >= INTERVAL:
                self._waiting[reason], self._logged[reason] = 0, now
                others = f" and {number - 1} more" if number > 1 else ""
                logger.warning(
                    "kv cache: %s%s in --kv-disk %s cannot be used: %s; each is a miss",
                    self._name(self._example[reason]),
                    others,
                    self.folder,
                    reason,
                )

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self.folder)) if path.is_relative_to(self.folder) else str(path)
