"""Groups whose layers attend to all tokens."""

from __future__ import annotations

from quire.engine.kv.groups.base import GroupBlocks, Shared
from quire.engine.kv.pool import PoolObserver
from quire.worker.messages import CacheGroup


class FullBlocks(GroupBlocks):
    """Holds all blocks, from 0 to the last."""

    needs_all = True

    def __init__(self, g: int, group: CacheGroup, shared: Shared):
        super().__init__(g, group, shared)
        self._last = _LastFound()
        self.pool.observe(self._last)

    def first_read(self, num_blocks: int) -> int:
        return 0

    def find(self, hashes: list[bytes]) -> list[int]:
        """Return ids of the published blocks before the first missing one."""
        last = self._last
        ids = last.begin(hashes)
        while len(ids) < len(hashes) and (block_id := self.pool.find(self.tag + hashes[len(ids)])) is not None:
            last.add(hashes[len(ids)], block_id)
        return ids[: len(hashes)]


class _LastFound(PoolObserver):
    """Remembers the blocks found last until one of them is unpublished, because a request that waits for room is
    looked up in every step.
    """

    def __init__(self) -> None:
        self._hashes: list[bytes] = []
        self._ids: list[int] = []
        self._pages: set[int] = set()

    def begin(self, hashes: list[bytes]) -> list[int]:
        """Return the remembered blocks with these hashes, in order; forget them if their hashes differ."""
        if hashes[: len(self._hashes)] != self._hashes[: len(hashes)]:
            self.unpublished_all()
        return self._ids

    def add(self, block_hash: bytes, block_id: int) -> None:
        self._hashes.append(block_hash)
        self._ids.append(block_id)
        self._pages.add(block_id)

    def unpublished(self, page: int, key: bytes) -> None:
        if page in self._pages:
            self.unpublished_all()

    def unpublished_all(self) -> None:
        self._hashes, self._ids, self._pages = [], [], set()
