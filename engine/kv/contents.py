"""The cache's contents between steps: forgetting, saving and naming them, and reusing them at other positions."""

from __future__ import annotations

from collections import deque

from quire.engine.kv.manager import KVCacheManager, Match, Plan
from quire.engine.kv.reuse import Reuse
from quire.engine.kv.slots import Slots
from quire.engine.kv.tiers import Tiers
from quire.engine.request import Request
from quire.engine.step import Step
from quire.worker.messages import SlotCalls


class Contents:
    """`in_flight` are the steps whose results the scheduler has not processed yet."""

    def __init__(self, kv: KVCacheManager, tiers: Tiers | None, in_flight: deque[Step], num_rows: int):
        self.kv, self.tiers, self.num_rows = kv, tiers, num_rows
        self._in_flight = in_flight
        self.slots: Slots | None = None  # the contents that each row's last request left; None: not tracked
        self.reuse: Reuse | None = None  # of contents at other positions; None: off

    def unsettled(self) -> set[int]:
        """Blocks that steps in flight fill, which may still fail."""
        return {i for step in self._in_flight for ids in step.published.values() for i in ids}

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes in every tier. Returns False, and does nothing, while requests hold any block."""
        if not self.kv.reset_prefix_cache():
            return False
        if self.tiers is not None:
            self.tiers.clear()
        return True

    def free_key(self, key: str) -> bool:
        """Forget a conversation (`AddRequest.cache_key`) in every tier. Returns whether it was known."""
        keys = self.kv.free_key(key)
        if keys and self.tiers is not None:
            self.tiers.remove(keys)
        return keys is not None

    def save(self, most: int, only_free: bool = False) -> int:
        """Give the disk tier up to `most` hot blocks, with `only_free` of those that no request holds. Returns the
        number that it took.
        """
        return self.tiers.save(most, self.unsettled(), only_free) if self.tiers is not None else 0

    def open_slots(self, files: SlotCalls, index: int, least: int = 0) -> None:
        """Remember what requests leave in their rows: for llama.cpp's slot files, and to reuse runs of at least `least`
        tokens at other positions; 0: not.
        """
        self.slots = Slots(self.kv, files, self.tiers, self.num_rows, index, self.unsettled)
        self.reuse = Reuse(self.kv, self.slots, least) if least else None

    def plan_reuse(self, step: Step, request: Request, matched: Match, start: int, reserve: int) -> Plan | None:
        """The blocks that a request copies from other positions, if it asks for that and they fit next to `reserve`."""
        if self.reuse is None:
            return None
        filled = {i for ids in step.published.values() for i in ids}  # by this step, after its copies
        plan = self.reuse.plan(request, start, self.unsettled() | filled)
        if plan is None:
            return None
        needed = self.kv.num_missing(request, matched) + self.kv.pool.num_free_among(plan.blocks) + reserve
        return plan if needed <= self.kv.pool.num_free else None
