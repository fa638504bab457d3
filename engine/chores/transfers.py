"""Copies blocks for other servers between steps."""

from __future__ import annotations

import math

from quire.engine.chores.base import Chore
from quire.engine.kv.transfers import Transfers


class CopyBlocks(Chore):
    def __init__(self, transfers: Transfers):
        self._transfers = transfers

    def due(self, idle: bool) -> float:
        return 0.0 if self._transfers.busy else math.inf

    def run(self, now: float, idle: bool) -> None:
        self._transfers.poll()
