"""The pool of KV cache pages: reference counts, the free queues and the map from content hash to page.

There are two kinds of pages: blocks with the keys and values of some tokens, and pages with a recurrent state. They
differ in size, so each kind has a free queue; ids and hashes are common to both.

ref_count > 0              held by that many requests
ref_count = 0, published   free, but still found by its hash until it is reused
ref_count = 0              free

Free blocks are reused in the order of (what clients asked for: `keep`; whether another request than its own found it;
time of the last use; depth: the end of a prefix before its beginning). So a block is never reused before those that
continue it. Free pages with states: unpublished ones, sparse ones that no request found (`set_sparse`), others; each by
the time of the last use.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.engine.kv.events import KVEventLog
    from quire.engine.request import Request

NULL_BLOCK = 0  # never allocated: padding rows read and write it
MAX_LEVEL = 3  # of `keep`


class PoolObserver:
    """Told of changes in what requests can find in a pool. Each method does nothing unless it is overridden."""

    def unpublished(self, page: int, key: bytes) -> None:
        """Requests do not find `page` any more, which was published under `key`."""

    def cleared(self) -> None:
        """Requests find no page any more."""


class BlockPool:
    """Reference counts, free queues and hash map of blocks 1 .. num_blocks - 1 and of the `num_states` pages that
    follow. All operations are O(1) per block.
    """

    def __init__(self, num_blocks: int, num_states: int = 0):
        assert num_blocks > 1, "the pool needs at least one block in addition to the null block"
        self.num_usable, self.num_states, self._first_state = num_blocks - 1, num_states, num_blocks
        self._ref_counts = [0] * (num_blocks + num_states)
        self._hashes: list[bytes | None] = [None] * (num_blocks + num_states)
        self._by_hash: dict[bytes, int] = {}
        self._publishers: dict[int, int] = {}  # the group of choices that published a block
        # published blocks that another request than their own found, in the order of their first hit
        self.hot: OrderedDict[int, None] = OrderedDict()
        # those of which no lower tier was given a copy; their time of use in ns, for the end of a prefix an earlier one
        self.unsaved: OrderedDict[int, int] = OrderedDict()
        # hot blocks that were taken for others since a caller looked, and their hashes; None: no caller looks
        self.evicted: list[tuple[int, bytes]] | None = None
        self.events: KVEventLog | None = None  # told which published blocks leave
        self.observers: list[PoolObserver] = []
        # The free queues, next block to allocate first. An OrderedDict is a hash map over a doubly linked list, in C.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        # hot ones: reused as if their last use were as many allocations later as the pool has blocks
        self._free_hot: OrderedDict[int, None] = OrderedDict()
        # published blocks to keep, by level - 1: reused after all others, the higher levels last
        self._free_kept: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(MAX_LEVEL)]
        self._levels: dict[int, int] = {}  # of blocks to keep
        self._num_taken = 0  # blocks allocated since the start
        self._released = [0] * (num_blocks + num_states)  # its value when a block became free
        self._free_states: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks, num_blocks + num_states))
        # 1 for blocks that were never taken, or not since their memory was given back
        self._blank = bytearray(b"\1") * (num_blocks + num_states)
        self._free_sparse: OrderedDict[int, None] = OrderedDict()
        self._sparse: set[int] = set()  # pages of `_free_sparse`, or that go there when they are released

    @property
    def num_free(self) -> int:
        """Number of free blocks."""
        return len(self._free) + len(self._free_hot) + (sum(map(len, self._free_kept)) if self._levels else 0)

    @property
    def num_free_states(self) -> int:
        """Number of free pages for states."""
        return len(self._free_states) + len(self._free_sparse)

    @property
    def usage(self) -> float:
        """Fraction of the pages that are held, 0 to 1, of the kind of which more are."""
        blocks = 1 - self.num_free / self.num_usable
        return max(blocks, 1 - self.num_free_states / self.num_states) if self.num_states else blocks

    def take(self, count: int, state: bool = False) -> list[int]:
        """Allocate `count` free blocks, or pages for states, and unpublish them. The caller has checked that they are
        free.
        """
        block_ids = []
        for _ in range(count):
            free = self._next_states() if state else self._next_queue()
            block_id, _ = free.popitem(last=False)
            if self.evicted is not None and block_id in self.hot:
                self.evicted.append((block_id, self._hashes[block_id]))
            self._ref_counts[block_id] = 1
            self._blank[block_id] = 0
            self._sparse.discard(block_id)
            self._unpublish(block_id)
            block_ids.append(block_id)
        self._num_taken += 0 if state else count
        return block_ids

    def _next_queue(self) -> OrderedDict[int, None]:
        """The queue whose first block is reused next."""
        if not self._free_hot:
            return self._free or next(queue for queue in self._free_kept if queue)
        if self._free:
            hot, other = (self._released[next(iter(queue))] for queue in (self._free_hot, self._free))
            return self._free if other <= hot + self.num_usable else self._free_hot
        return self._free_hot

    def _next_states(self) -> OrderedDict[int, None]:
        """The queue whose first page is reused next."""
        unpublished = self._free_states and self._hashes[next(iter(self._free_states))] is None
        return self._free_states if unpublished or not self._free_sparse else self._free_sparse

    def take_mark(self, sparse: bool) -> int | None:
        """Take a page for a state, if there is a free one, for a sparse one: one that others do not need more."""
        if not self.num_free_states:
            return None
        queue = self._next_states()
        if sparse and queue is self._free_states and self._hashes[next(iter(queue))] is not None:
            return None
        (page,) = self.take(1, state=True)
        if sparse:
            self.set_sparse(page)
        return page

    def set_sparse(self, page: int) -> None:
        """Reuse a page that is held before others once it is free, unless a request finds it."""
        self._sparse.add(page)

    def share(self, block_ids: list[int]) -> None:
        """Add a reference to published blocks, free or not."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del self._queue(block_id)[block_id]
            self._ref_counts[block_id] += 1

    def note_hits(self, block_ids: list[int], group: int) -> None:
        """A request of this group of choices found these blocks, which are in the order of a prefix. They are hot if
        another one published them.
        """
        self._sparse.difference_update(block_ids)
        now = time.time_ns()
        for i, block_id in enumerate(block_ids):
            if block_id not in self.hot and self._publishers.get(block_id) != group:
                self.hot[block_id] = None
                self.unsaved[block_id] = now - i * 1000

    def hash_of(self, block_id: int) -> bytes | None:
        """The hash under which a block is published."""
        return self._hashes[block_id]

    def is_held(self, block_id: int) -> bool:
        return self._ref_counts[block_id] > 0

    def release(self, block_ids: list[int]) -> None:
        """Drop a reference to each block.

        The last block is reused first, because a prefix is worth more than its continuation. Unpublished blocks are
        reused before all others.
        """
        for block_id in reversed(block_ids):
            self._ref_counts[block_id] -= 1
            assert self._ref_counts[block_id] >= 0, f"block {block_id} released twice"
            if self._ref_counts[block_id] == 0:
                free = self._queue(block_id)
                free[block_id] = None
                self._released[block_id] = self._num_taken
                if self._hashes[block_id] is None:
                    self._reuse_next(block_id)

    def _queue(self, block_id: int) -> OrderedDict[int, None]:
        if block_id >= self._first_state:
            return self._free_sparse if block_id in self._sparse else self._free_states
        if level := self._levels.get(block_id):
            return self._free_kept[level - 1]
        return self._free_hot if block_id in self.hot else self._free

    def _reuse_next(self, block_id: int) -> None:
        """Reuse a free block before all others in its queue."""
        self._queue(block_id).move_to_end(block_id, last=False)
        self._released[block_id] = 0

    def keep(self, block_id: int, level: int) -> None:
        """Reuse a published block after all of lower levels, up to MAX_LEVEL, and those of its own that are free;
        level 0: like others again.
        """
        if not level and block_id not in self._levels:
            return
        free = self._queue(block_id) if self._ref_counts[block_id] == 0 else None
        if level:
            self._levels[block_id] = level
        else:
            del self._levels[block_id]
        if free is not None:
            del free[block_id]
            self._queue(block_id)[block_id] = None
            self._released[block_id] = self._num_taken

    @property
    def kept(self) -> dict[int, int]:
        """The levels of the blocks that are kept."""
        return self._levels

    def is_state(self, block_id: int) -> bool:
        """Whether this is a page for states."""
        return block_id >= self._first_state

    def publish(self, block_id: int, block_hash: bytes, request: Request, i: int | None) -> bool:
        """Register block `i` of a request, if that is known, under its hash. If another block already has this hash,
        the new one stays private, and the result is False.
        """
        if block_hash in self._by_hash:
            return False
        self._publishers[block_id] = request.group
        self._by_hash[block_hash] = block_id
        self._hashes[block_id] = block_hash
        if block_id >= self._first_state and not self._ref_counts[block_id]:
            self._queue(block_id).move_to_end(block_id)  # after those that were used before
        if self.events is not None and i is not None:
            self.events.stored(block_hash[0], request, i)
        return True

    def is_published(self, block_id: int) -> bool:
        return self._hashes[block_id] is not None

    def find(self, block_hash: bytes) -> int | None:
        return self._by_hash.get(block_hash)

    def num_free_among(self, block_ids: list[int]) -> int:
        """Number of these blocks that are free now and would not be once shared."""
        return list(map(self._ref_counts.__getitem__, block_ids)).count(0)

    def drop(self, block_id: int) -> None:
        """Unpublish a block and, if it is free, reuse it before all others."""
        self._unpublish(block_id)
        if self._ref_counts[block_id] == 0:
            self._reuse_next(block_id)

    def give_back(self, most: int, spare: int) -> list[int]:
        """Unpublish up to `most` free blocks whose memory is then returned to the system, and return them: the next to
        be reused, after `spare` that keep theirs. Hot blocks stay if a caller looks for those that are evicted: it
        copies their contents.
        """
        queues = [self._free, *self._free_kept] if self.evicted is not None else self._queues()
        resident = (block_id for queue in queues for block_id in queue if not self._blank[block_id])
        given = list(islice(resident, spare, spare + most))
        for block_id in given:
            self._blank[block_id] = 1
            self._unpublish(block_id)
        return given

    def give_back_all(self) -> None:
        """The memory of all blocks was returned to the system."""
        self._blank = bytearray(b"\1") * len(self._blank)

    def _queues(self) -> list[OrderedDict[int, None]]:
        """The queues of free blocks, roughly the next to be reused first."""
        return [self._free, self._free_hot, *self._free_kept]

    def forget(self, block_ids: list[int]) -> None:
        """Unpublish these blocks, so that no later request finds them."""
        for block_id in block_ids:
            self._unpublish(block_id)

    def forget_all(self) -> bool:
        """Empty the hash map. Returns False, and does nothing, while any block is held."""
        if self.usage:
            return False
        self._hashes = [None] * len(self._hashes)
        self._by_hash.clear()
        if self.events is not None:
            self.events.pool_cleared()
        self._publishers.clear()
        self.hot.clear()
        self.unsaved.clear()
        for observer in self.observers:
            observer.cleared()
        # in order again: memory that was never written stays so as long as possible
        queues = self._queues()
        self._free = OrderedDict.fromkeys(sorted(block_id for queue in queues for block_id in queue))
        for queue in queues[1:]:
            queue.clear()
        self._free_states.update(self._free_sparse)
        self._free_sparse.clear()
        self._sparse.clear()
        self._levels.clear()
        self._released = [0] * len(self._released)
        return True

    def _unpublish(self, block_id: int) -> None:
        block_hash, self._hashes[block_id] = self._hashes[block_id], None
        if block_hash is not None:
            del self._by_hash[block_hash]
            if self.events is not None:
                self.events.removed(block_hash)
            self._publishers.pop(block_id, None)
            self.keep(block_id, 0)
            if block_id in self._sparse:
                self._sparse.remove(block_id)
                if self._free_sparse.pop(block_id, block_id) is None:
                    self._free_states[block_id] = None
                    self._free_states.move_to_end(block_id, last=False)
            if block_id in self._free_hot:
                del self._free_hot[block_id]
                self._free[block_id] = None
            self.hot.pop(block_id, None)
            self.unsaved.pop(block_id, None)
            for observer in self.observers:
                observer.unpublished(block_id, block_hash)
