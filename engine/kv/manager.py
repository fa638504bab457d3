"""Blocks of the paged KV cache as numbers: who holds which, which are free, and which full blocks can be reused.

A block holds the keys and values of `block_size` consecutive tokens. A *full* block whose tokens are known has a hash that covers every token before it
(its parent's hash, its ids, and at the root of the chain whatever else the values depend on), so equal hashes mean equal contents. Such a block is
*published* in a hash map as soon as it is scheduled: steps run in order, and a layer writes all keys and values of a step before it attends, so even a
request of the same step may read it. Should that step fail, the scheduler computes again whatever was built on the block (`Scheduler._recompute_dependents`).

    ref_count > 0              held by that many requests
    ref_count = 0, published   free, but still found by its hash until it is taken for something else (least recently used first)
    ref_count = 0              free
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from hashlib import sha256

import msgspec

from quire.engine.request import Request

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
        """Drop a holder. The last block is taken again first, because a prefix is worth more than its continuation; unpublished blocks before all others."""
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


class KVCacheManager:
    """The blocks of every request: match, allocate, publish, free."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True):
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks)
        self._asked: Request | None = None  # whom `match` was for last

    @property
    def usage(self) -> float:
        """Fraction of the blocks that requests hold."""
        return 1 - self.pool.num_free / self.pool.num_usable

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match(self, request: Request) -> list[int]:
        """The published blocks of its longest known prefix. At least the last token is left out: its logits have to be computed.

        Who waits for room is asked about in every step: what was found is looked up again only after one of these blocks was taken for something else.
        """
        if not request.reads_cache:
            return []
        num_full = (request.num_tokens - 1) // self.block_size
        self._extend_hashes(request, num_full)
        if request is not self._asked or not self.pool.watched:
            self._asked, self._matched, self.pool.watched = request, [], set()
        while len(self._matched) < num_full and (block_id := self.pool.find(request.block_hashes[len(self._matched)])) is not None:
            self._matched.append(block_id)
            self.pool.watched.add(block_id)
        return self._matched[:num_full]

    def num_missing(self, request: Request, matched: list[int]) -> int:
        """Free blocks that a request without blocks would use up until all its known tokens are computed."""
        return self.num_blocks(request.num_tokens) - len(matched) + self.pool.num_free_among(matched)

    def attach(self, request: Request, matched: list[int]) -> None:
        """Give a request without blocks those that `match` found."""
        assert not request.block_ids
        self.pool.share(matched)
        request.block_ids = matched
        request.num_published = len(matched)
        request.num_computed_tokens = len(matched) * self.block_size

    def allocate(self, request: Request, num_tokens: int) -> list[int] | None:
        """Make room for its first `num_tokens` tokens. The blocks added, or None, and nothing done, if too few are free."""
        count = self.num_blocks(num_tokens) - len(request.block_ids)
        if count > self.pool.num_free:
            return None
        block_ids = self.pool.take(count)
        request.block_ids += block_ids
        return block_ids

    def publish(self, request: Request) -> list[int]:
        """Publish its full blocks that are scheduled (`num_computed_tokens` says so) and whose token ids are known. Returns those that are new."""
        first, num_full = request.num_published, min(request.num_computed_tokens, request.num_tokens) // self.block_size
        if num_full <= first:
            return []
        self._extend_hashes(request, num_full)
        for i in range(first, num_full):
            self.pool.publish(request.block_ids[i], request.block_hashes[i])
        request.num_published = num_full
        return request.block_ids[first:num_full]

    def free(self, request: Request, discard: bool = False) -> list[int]:
        """Release its blocks. They stay findable unless `discard`: after an error nobody knows what they hold. Returns the blocks that this publishes."""
        published = []
        if discard:
            self.pool.forget(request.block_ids)
        else:
            published = self.publish(request)  # ids that came back since its last step may have completed a block
        self.release(request)
        return published

    def release(self, request: Request) -> None:
        """Release its blocks. What is not published by now will not be."""
        self.pool.release(request.block_ids)
        request.block_ids = []
        request.num_published = 0
        request.num_computed_tokens = 0

    def reset_prefix_cache(self) -> bool:
        """Forget all published blocks; False, and nothing done, while requests hold any."""
        return self.pool.forget_all()

    def _extend_hashes(self, request: Request, num_full: int) -> None:
        """Hash each full block once, chained to the one before. sha256 of 16 ids takes 0.5 us, no slower than blake2b here, and of long blocks less."""
        hashes, size = request.block_hashes, self.block_size
        for i in range(len(hashes), num_full):
            parent = hashes[i - 1] if i else self._root(request)
            hashes.append(sha256(parent + array("I", request.token_ids[i * size : (i + 1) * size]).tobytes()).digest())

    def _root(self, request: Request) -> bytes:
        """The start of the chain: what the values depend on besides tokens. Without prefix caching that includes the group, so nobody else can match."""
        group = None if self.enable_prefix_caching else request.group
        return sha256(msgspec.msgpack.encode((request.cache_salt, group))).digest()
