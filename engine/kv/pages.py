"""The pages of the KV cache as numbers: who holds which, which are free, and which can be found by a hash of their
contents.

    ref_count > 0              held by that many requests
    ref_count = 0, published   free, but still found by its hash until it is taken for something else (least recently
    used first)
    ref_count = 0              free
"""

from __future__ import annotations

from collections import OrderedDict

NULL_BLOCK = 0  # never handed out: padding rows read and write it


class BlockPool:
    """Ref counts, free order and hash map of the blocks 1 .. num_blocks - 1. All operations are O(1) per block."""

    def __init__(self, num_blocks: int):
        assert num_blocks > 1, "no block besides the null block"
        self.num_usable = num_blocks - 1
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self.watched: set[int] = set()  # published blocks; emptied as soon as one of them no longer is
        # The free queue, next to be taken first. An OrderedDict is a hash map into a doubly linked list, in C.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Hand out `count` free blocks, forgetting what they held. The caller has checked `num_free`."""
        block_ids = []
        for _ in range(count):
            block_id, _ = self._free.popitem(last=False)
            self._unpublish(block_id)
            self._ref_counts[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def share(self, block_ids: list[int]) -> None:
        """Add a holder to published blocks, free or not."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del self._free[block_id]
            self._ref_counts[block_id] += 1

    def release(self, block_ids: list[int]) -> None:
        """Drop a holder.

        The last block is taken again first, because a prefix is worth more than its continuation; unpublished blocks
        before all others.
        """
        for block_id in reversed(block_ids):
            self._ref_counts[block_id] -= 1
            assert self._ref_counts[block_id] >= 0, f"block {block_id} released twice"
            if self._ref_counts[block_id] == 0:
                self._free[block_id] = None
                if self._hashes[block_id] is None:
                    self._free.move_to_end(block_id, last=False)

    def publish(self, block_id: int, block_hash: bytes) -> None:
        """Let the block be found by its hash, unless an equal one already is: the copy then stays private."""
        if block_hash not in self._by_hash:
            self._by_hash[block_hash] = block_id
            self._hashes[block_id] = block_hash

    def is_published(self, block_id: int) -> bool:
        return self._hashes[block_id] is not None

    def find(self, block_hash: bytes) -> int | None:
        return self._by_hash.get(block_hash)

    def num_free_among(self, block_ids: list[int]) -> int:
        """How many of these count as free now, and would not once shared."""
        return list(map(self._ref_counts.__getitem__, block_ids)).count(0)

    def forget(self, block_ids: list[int]) -> None:
        """Make sure that nobody finds these blocks any more."""
        for block_id in block_ids:
            self._unpublish(block_id)

    def forget_all(self) -> bool:
        """Empty the hash map; False, and nothing done, while any block is held."""
        if self.num_free < self.num_usable:
            return False
        self._hashes = [None] * len(self._hashes)
        self._by_hash.clear()
        self.watched.clear()
        return True

    def _unpublish(self, block_id: int) -> None:
        block_hash, self._hashes[block_id] = self._hashes[block_id], None
        if block_hash is not None:
            del self._by_hash[block_hash]
            if block_id in self.watched:
                self.watched.clear()
