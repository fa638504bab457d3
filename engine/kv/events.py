"""Log the blocks that enter and leave the pool as vLLM's KV cache events, from which routers learn where a prefix
is cached. `publisher.py` sends them.

A block's hash on the wire is a number, the last 8 bytes of its hash. `BlockStored` has the tokens of its blocks and the
hash of the block before them, so that a router can compute hashes of its own.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from quire.engine.kv.pool import PoolObserver
from quire.engine.request import Request
from quire.worker.messages import CacheGroup

MEDIUM = "GPU"  # vLLM's name of the pool, on every device
_KINDS = {
    "full": "full_attention",
    "window": "sliding_window",
    "chunk": "chunked_local_attention",
    "state": "mamba",
}


class _Event(msgspec.Struct, array_like=True, tag=True):
    pass


class BlockStored(_Event):
    """Consecutive blocks of one group that requests can now find. vLLM's fields, in its order."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[list[Any] | None]  # per block: inputs of its values besides tokens
    group_idx: int
    kv_cache_spec_kind: str
    kv_cache_spec_sliding_window: int | None


class BlockRemoved(_Event):
    block_hashes: list[int]
    medium: str
    group_idx: int


class AllBlocksCleared(_Event):
    pass


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


def wire_hash(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[-8:], "big")


class _Facts(msgspec.Struct, frozen=True, gc=False):
    """The part of a `BlockStored` about one block."""

    parent: int | None
    token_ids: array
    lora_name: str | None
    extra_keys: list[Any] | None


class KVEventLog(PoolObserver):
    """The events since the last `take`, in order. Keys are a group's tag, one byte, and a block's hash.

    Lower tiers name blocks by key alone. A block is announced there if its tokens are known: while the pool has it, and
    for the last `num_left` blocks that left the pool; 0 if there are no lower tiers.
    """

    def __init__(self, block_size: int, groups: Sequence[CacheGroup], num_left: int = 0):
        self.block_size, self.groups, self._num_left = block_size, tuple(groups), num_left
        self._events: list[KVEvent] = [AllBlocksCleared()]  # nothing is left of an earlier run of this engine
        self._facts: dict[bytes, _Facts] = {}  # of blocks in the pool
        self._left: OrderedDict[bytes, _Facts] = OrderedDict()
        self._below: defaultdict[str, set[bytes]] = defaultdict(set)  # keys announced in lower tiers, by medium

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    def take(self) -> list[KVEvent]:
        events, self._events = self._events, []
        return events

    def published(self, page: int, key: bytes, request: Request, i: int | None) -> None:
        if i is not None:
            self._stored(key[0], request, i)

    def _stored(self, g: int, request: Request, i: int) -> None:
        size, hashes = self.block_size, request.block_hashes
        name = ",".join(use.name for use in request.adapters) or None
        tokens = array("I", request.token_ids[i * size : (i + 1) * size])
        facts = _Facts(wire_hash(hashes[i - 1]) if i else None, tokens, name, _extra_keys(request, i, size))
        if self._num_left:
            key = bytes([g]) + hashes[i]
            self._facts[key] = facts
            self._left.pop(key, None)
        self._store(g, wire_hash(hashes[i]), facts, MEDIUM)

    def _store(self, g: int, this: int, facts: _Facts, medium: str) -> None:
        last = self._events[-1] if self._events else None
        same = isinstance(last, BlockStored) and (last.medium, last.group_idx) == (medium, g)
        if same and last.block_hashes[-1] == facts.parent:
            last.block_hashes.append(this)
            last.token_ids += facts.token_ids
            last.extra_keys.append(facts.extra_keys)
            return
        group = self.groups[g]
        window = group.window if group.kind in ("window", "chunk") else None
        kind, tokens, extra = _KINDS.get(group.kind, group.kind), list(facts.token_ids), [facts.extra_keys]
        self._events.append(
            BlockStored(
                [this], facts.parent, tokens, self.block_size, None, medium, facts.lora_name, extra, g, kind, window
            )
        )

    def unpublished(self, page: int, key: bytes) -> None:
        self._left_pool(key)

    def _left_pool(self, key: bytes) -> None:
        if (facts := self._facts.pop(key, None)) is not None:
            self._left[key] = facts
            if len(self._left) > self._num_left:
                self._left.popitem(last=False)
        self._remove(key, MEDIUM)

    def _remove(self, key: bytes, medium: str) -> None:
        g, this = key[0], wire_hash(key)
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved) and (last.medium, last.group_idx) == (medium, g):
            last.block_hashes.append(this)
        else:
            self._events.append(BlockRemoved([this], medium, g))

    def changed_below(self, changes: Iterable[tuple[str, bytes, bool]]) -> None:
        """Record blocks that entered or left lower tiers: (medium, key, whether it is there now), in order."""
        for medium, key, here in changes:
            if not here:
                if key in self._below[medium]:
                    self._below[medium].remove(key)
                    self._remove(key, medium)
            elif key not in self._below[medium] and (facts := self._facts.get(key) or self._left.get(key)):
                self._below[medium].add(key)
                self._store(key[0], wire_hash(key), facts, medium)

    def unpublished_all(self) -> None:
        """Record that the pool has no blocks any more; lower tiers keep theirs."""
        if not any(self._below.values()):
            self.cleared()
            return
        for key in list(self._facts):
            self._left_pool(key)

    def cleared(self) -> None:
        """Record that no block is cached; drop events that were not taken yet."""
        self._events = [AllBlocksCleared()]
        for known in (self._facts, self._left, *self._below.values()):
            known.clear()


def _extra_keys(request: Request, i: int, size: int) -> list[Any] | None:
    """Return the inputs of block `i` besides tokens, in vLLM's order: adapters, images with the number of tokens from
    the block's first one to their own (below 0: it lies before the block), and in the first block the salt.
    """
    keys: list[Any] = [use.name for use in request.adapters]
    if request.media:
        keys += [(item.key, item.offset - i * size) for item in request.images(i * size, (i + 1) * size)]
    if not i and request.cache_salt is not None:
        keys.append(request.cache_salt)
    return keys or None
