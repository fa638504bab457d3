"""Writes hot blocks to disk, so that a restart finds them: some at intervals while requests run, and all while none
runs or when the engine ends.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

from quire.engine.chores.base import Chore
from quire.engine.kv.contents import Contents
from quire.engine.kv.tiers import SAVED_AT_ONCE, Tiers

logger = logging.getLogger(__name__)

INTERVAL, IDLE_INTERVAL = 1.0, 0.01  # seconds between writes while requests run, and while none runs
RETRY = 5.0  # seconds after a write that was not possible
BUSY_BYTES = 8 << 20  # per write while requests run
WRITTEN_AFTER = 1.0  # seconds until blocks that were given to the disk are written, unless it is slow
END_TIMEOUT = 15.0  # seconds of writing before the engine ends


class SaveHot(Chore):
    """Saves hot blocks. `report` is called when statistics can include the blocks written."""

    def __init__(self, contents: Contents, tiers: Tiers, bytes_per_block: int, report: Callable[[], None]):
        self._contents, self._tiers, self._report = contents, tiers, report
        self._busy_blocks = min(max(BUSY_BYTES // max(bytes_per_block, 1), 1), SAVED_AT_ONCE)
        self._next, self._report_due = 0.0, math.inf

    def due(self, idle: bool) -> float:
        return min(self._next if self._tiers.num_unsaved else math.inf, self._report_due)

    def run(self, now: float, idle: bool) -> None:
        if now >= self._report_due:
            self._report_due = math.inf
            self._report()
        if self._tiers.num_unsaved and now >= self._next:
            given = self._contents.save(SAVED_AT_ONCE if idle else self._busy_blocks)
            self._next = now + (RETRY if not given else IDLE_INTERVAL if idle else INTERVAL)
            self._report_due = now + WRITTEN_AFTER

    def stop(self) -> None:
        """Write the hot blocks that no request holds. An error ends the writing and is logged."""
        deadline = time.monotonic() + END_TIMEOUT
        try:
            while time.monotonic() < deadline:
                given = self._contents.save(SAVED_AT_ONCE, only_free=True)
                self._tiers.calls.flush(max(deadline - time.monotonic(), 0.0))
                if not given:
                    break
        except Exception:
            logger.exception("could not write all of the KV cache to disk")
