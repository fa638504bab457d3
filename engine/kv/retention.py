"""Conversations whose blocks are kept longer than others', because their clients asked for it or are running tools: for
a limited time, and within a quota per conversation.

    level 0   no such conversation
          1   the last answer called tools: its client comes back with the results
          2   the client asked for it
          3   both
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, field

from quire.engine.kv.eviction import MAX_LEVEL
from quire.engine.kv.pages import NULL_BLOCK
from quire.engine.kv.pool import BlockPool
from quire.engine.request import Request

MAX_KEYS = 10_000  # beyond that the first to expire is dropped
MAX_ENDED = 1000  # ended requests that may turn out to have called tools
QUOTA = 4  # a key keeps at most 1 / QUOTA of the pool
TOOLS, ASKED = 1, 2  # levels
TOOLS_SECONDS = 600.0


@dataclass(slots=True)
class _Kept:
    until: float  # time.monotonic()
    level: int
    hashes: dict[bytes, None] = field(default_factory=dict)  # for the conversation's blocks, from its beginning
    rest: dict[bytes, None] = field(default_factory=dict)  # beyond the quota: freed with the others, and not kept


@dataclass(slots=True)
class _Ended:
    """A request whose answer may have called tools."""

    key: str | None
    hashes: list[bytes]


class Retention:
    """The only caller of `BlockPool.keep`."""

    def __init__(self, pool: BlockPool):
        self._pool = pool
        self._keys: dict[str, _Kept] = {}
        self._due = float("inf")
        self._holders: dict[bytes, list[int]] = {}  # per block: how many keys keep it, by level - 1
        self._num_unnamed = 0  # keys of conversations whose clients gave no hint
        self._ended: OrderedDict[tuple[bytes, str], _Ended] = OrderedDict()

    def note(self, request: Request) -> None:
        """Keep the blocks of a request's conversation. Called before the request releases its blocks."""
        if request.cache_key is None and not request.may_call_tools:
            return
        ids = [i for row in request.block_ids for i in row if i != NULL_BLOCK and not self._pool.is_state(i)]
        hashes = [one for i in ids if (one := self._pool.hash_of(i)) is not None]
        key = self._name(request)
        for name in [f"\0{one.hex()}" for one in hashes] if self._num_unnamed else ():
            if name in self._keys:  # the client came back with the results of tools
                self._drop(name)
        if key is not None:
            self._keep(key, hashes, ASKED, request.cache_seconds)
        if request.may_call_tools:
            self._ended[request.client, request.request_id] = _Ended(key, hashes)
            while len(self._ended) > MAX_ENDED:
                self._ended.popitem(last=False)

    @staticmethod
    def _name(request: Request) -> str | None:
        """Return the conversation's name. Without one, the beginning of the prompt identifies it."""
        key = request.cache_key
        if key is None or not key.endswith("/") or key.count("/") > 1:
            return key
        return f"{key}\0{request.block_hashes[0].hex()}" if request.block_hashes else None

    def called_tools(self, client: bytes, request_ids: list[str]) -> None:
        """Keep the blocks of these requests for a while: their answers called tools."""
        for request_id in request_ids:
            if (ended := self._ended.pop((client, request_id), None)) is not None and ended.hashes:
                level = TOOLS | ASKED if ended.key is not None else TOOLS
                self._keep(ended.key or f"\0{ended.hashes[-1].hex()}", ended.hashes, level, TOOLS_SECONDS)

    def _keep(self, key: str, hashes: list[bytes], level: int, seconds: float) -> None:
        until = time.monotonic() + seconds
        self._num_unnamed += key not in self._keys and key.startswith("\0")
        entry = self._keys.setdefault(key, _Kept(until, level))
        entry.until = max(until, entry.until)
        self._due = min(self._due, entry.until)
        if level != entry.level:
            for one in entry.hashes:
                self._count(one, entry.level, -1)
                self._count(one, level, 1)
            entry.level = level
        quota = self._pool.num_usable // QUOTA
        for one in hashes:
            if one in entry.hashes:
                continue
            if len(entry.hashes) < quota:
                entry.hashes[one] = None
                self._count(one, level, 1)
            elif len(entry.rest) < self._pool.num_usable:
                entry.rest[one] = None
        self._apply(list(entry.hashes))
        while len(self._keys) > MAX_KEYS:
            self._drop(min(self._keys, key=lambda key: self._keys[key].until))

    def _count(self, block_hash: bytes, level: int, change: int) -> None:
        counts = self._holders.setdefault(block_hash, [0] * MAX_LEVEL)
        counts[level - 1] += change
        if not any(counts):
            del self._holders[block_hash]

    def _apply(self, hashes: list[bytes]) -> None:
        """Tell the pool the levels of these blocks, which are in the order of a prefix."""
        for one in reversed(hashes):  # the end of a prefix is reused first
            if (block_id := self._pool.find(one)) is not None:
                counts = self._holders.get(one, ())
                level = max((i for i, count in enumerate(counts, 1) if count), default=0)
                self._pool.keep(block_id, level)

    def expire(self) -> None:
        """Stop keeping the blocks of conversations whose time is over."""
        now = time.monotonic()
        if now >= self._due:
            for key in [key for key, entry in self._keys.items() if entry.until <= now]:
                self._drop(key)
            self._due = min((entry.until for entry in self._keys.values()), default=float("inf"))

    def free(self, key: str) -> list[bytes] | None:
        """Forget a conversation: unpublish its blocks without other holders. Returns
        their hashes, or None if it was not known.
        """
        if key not in self._keys:
            return None
        hashes = [*self._keys[key].hashes, *self._keys[key].rest]
        self._drop(key)
        for one in reversed(hashes):
            block_id = self._pool.find(one)
            if block_id is not None and one not in self._holders and not self._pool.is_held(block_id):
                self._pool.forget([block_id])
        return [one for one in hashes if one not in self._holders and self._pool.find(one) is None]

    def clear(self) -> None:
        self._keys.clear()
        self._num_unnamed = 0
        self._holders.clear()
        self._ended.clear()

    def _drop(self, key: str) -> None:
        """Remove a key. Its blocks are reused like others, unless another key keeps them, too."""
        removed = self._keys.pop(key)
        self._num_unnamed -= key.startswith("\0")
        for one in removed.hashes:
            self._count(one, removed.level, -1)
        self._apply(list(removed.hashes))
