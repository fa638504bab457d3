"""The RAM tier: contents of blocks in the worker's memory, with LRU eviction."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from quire.checkpoints.sizes import format_each
from quire.configs.config import Config
from quire.worker.cache.tiers.base import GIB, Content, Rank, Tier, content_of

if TYPE_CHECKING:
    from quire.worker.platforms.base import Platform


class RamTier(Tier):
    """Blocks by key, at most `limit` bytes."""

    name, medium, where, saves = "ram", "CPU", "in RAM", False

    def __init__(self, limit: int):
        self.limit, self.used = limit, 0
        self.added = self.num_evicted = 0  # bytes, blocks since the start
        self._blocks: OrderedDict[bytes, bytes] = OrderedDict()

    @classmethod
    def plan(cls, config: Config, platform: Platform) -> int | None:
        """Return the requested bytes, or a quarter of the free RAM, unless the cache is RAM itself. Raises ValueError
        if less is free.
        """
        asked, engines = config.cache.kv_offload_gib, config.parallel.data_parallel_size
        if asked == 0 or (asked is None and platform.shares_ram):
            return None
        free = platform.free_ram()
        if asked is None:
            return free // 4 // engines or None
        if asked * GIB * engines > free:
            wanted, found = format_each(int(asked * GIB * engines), free)
            most = free * 1000 // (GIB * engines) / 1000  # rounded down, so that the value is accepted
            raise ValueError(
                f"--kv-offload-gib {asked:g}{f' for each of {engines} engines' if engines > 1 else ''}: {wanted} are "
                f"more than the {found} of RAM that are free, less what other servers on this machine planned: set it "
                f"to at most {most:g}"
            )
        return int(asked * GIB)

    @classmethod
    def open(cls, limit: int, rank: Rank) -> RamTier:
        return cls(limit // rank.num_ranks)

    def contains(self, keys: list[bytes]) -> list[bool]:
        return [key in self._blocks for key in keys]

    def read(self, key: bytes) -> bytes | None:
        return self._blocks.get(key)

    def touch(self, keys: list[bytes]) -> None:
        for key in reversed(keys):
            if key in self._blocks:
                self._blocks.move_to_end(key)

    def offer(self, key: bytes, content: Content, used: int = 0) -> list[tuple[bytes, bytes]]:
        if key in self._blocks:
            self._blocks.move_to_end(key)
            return []
        self._blocks[key] = content = content_of(content)
        self._note(key, True)
        self.used += len(content)
        self.added += len(content)
        left = []
        while self.used > self.limit:
            left.append(self._blocks.popitem(last=False))
            self.used -= len(left[-1][1])
            self._note(left[-1][0], False)
        self.num_evicted += len(left)
        return left

    def remove(self, keys: list[bytes]) -> None:
        for key in keys:
            if (content := self._blocks.pop(key, None)) is not None:
                self.used -= len(content)
                self._note(key, False)

    def _note(self, key: bytes, here: bool) -> None:
        if self.changes is not None:
            self.changes.append((key, here))

    def clear(self) -> None:
        self._blocks.clear()
        self.used = 0

    def counts(self) -> dict[str, float]:
        return {"written_bytes": self.added, "evicted": self.num_evicted}
