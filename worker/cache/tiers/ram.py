"""The RAM tier: contents of blocks in the worker's memory, least recently used first out."""

from __future__ import annotations

from collections import OrderedDict, deque


class RamTier:
    """Blocks by key, `limit` bytes at most."""

    def __init__(self, limit: int):
        self.limit, self.used = limit, 0
        self.added = self.num_evicted = 0  # bytes, blocks since the start
        self._blocks: OrderedDict[bytes, bytes] = OrderedDict()
        self.changes: deque[tuple[bytes, bool]] | None = None  # (block, whether it is here now); None: nobody asks

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    def read(self, key: bytes) -> bytes | None:
        return self._blocks.get(key)

    def touch(self, keys: list[bytes]) -> None:
        """Note a use of these blocks, which are in the order of a prefix: its beginning counts as used last."""
        for key in reversed(keys):
            if key in self._blocks:
                self._blocks.move_to_end(key)

    def add(self, key: bytes, content: bytes) -> list[tuple[bytes, bytes]]:
        """Keep a block. Returns the (key, content) of those that had to leave, which may be this one."""
        if key in self._blocks:
            self._blocks.move_to_end(key)
            return []
        self._blocks[key] = content
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
        """Forget these blocks."""
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
