"""The cache's contents between steps: forgetting, saving and naming them."""

from __future__ import annotations

from collections import deque

from quire.engine.kv.manager import KVCacheManager
from quire.engine.kv.slots import Slots
from quire.engine.kv.tiers import Tiers
from quire.engine.step import Step
from quire.worker.messages import SlotCalls


class Contents:
    """The contents of a cache. `in_flight`: steps whose results the scheduler has not processed yet."""

    def __init__(self, kv: KVCacheManager, tiers: Tiers | None, in_flight: deque[Step], num_rows: int):
        self.kv, self.tiers, self.num_rows = kv, tiers, num_rows
        self._in_flight = in_flight
        self.slots: Slots | None = None  # the contents that each row's last request left; None: not tracked

    def unsettled(self) -> set[int]:
        """Return the blocks that steps in flight fill, which may still fail."""
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
        """Give the disk tier up to `most` hot blocks, with `only_free` those that no request holds. Returns the
        number taken.
        """
        return self.tiers.save(most, self.unsettled(), only_free) if self.tiers is not None else 0

    def open_slots(self, files: SlotCalls, index: int) -> None:
        """Track the contents that requests leave in their rows, for llama.cpp's slot files."""
        self.slots = Slots(self.kv, files, self.tiers, self.num_rows, index, self.unsettled)
