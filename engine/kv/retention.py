"""Conversations whose blocks are kept before others', as their clients asked: for some time, within a quota per key."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from quire.engine.kv.pages import NULL_BLOCK, BlockPool
from quire.engine.request import Request

MAX_KEYS = 10_000  # the first to expire goes
QUOTA = 4  # a key keeps at most this part of the pool


@dataclass(slots=True)
class _Kept:
    until: float  # time.monotonic()
    hashes: list[bytes] = field(default_factory=list)  # of the conversation's blocks, from its beginning


class Retention:
    """The only caller of `BlockPool.keep` and `let_go`."""

    def __init__(self, pool: BlockPool):
        self._pool, self._keys = pool, {}
        self._due = float("inf")

    def note(self, request: Request) -> None:
        """A request is about to release its blocks: those of its key's conversation are kept from now on."""
        if request.cache_key is None:
            return
        until = time.monotonic() + request.cache_seconds
        entry = self._keys.setdefault(request.cache_key, _Kept(until))
        entry.until = max(until, entry.until)
        self._due = min(self._due, entry.until)
        known = set(entry.hashes)
        room = self._pool.num_usable // QUOTA - len(known)
        ids = [i for row in request.block_ids for i in row if i != NULL_BLOCK and not self._pool.is_state(i)]
        for block_id in ids:
            block_hash = self._pool.hash_of(block_id)
            if room > 0 and block_hash is not None and block_hash not in known:
                entry.hashes.append(block_hash)
                known.add(block_hash)
                self._pool.keep(block_id)
                room -= 1
        while len(self._keys) > MAX_KEYS:
            self._drop(min(self._keys, key=lambda key: self._keys[key].until))

    def expire(self) -> None:
        """Let the blocks of conversations go whose time is over."""
        now = time.monotonic()
        if now >= self._due:
            for key in [key for key, entry in self._keys.items() if entry.until <= now]:
                self._drop(key)
            self._due = min((entry.until for entry in self._keys.values()), default=float("inf"))

    def free(self, key: str) -> bool:
        """Forget a conversation: its blocks that nobody holds are found no more. Returns whether it was known."""
        if key not in self._keys:
            return False
        for block_id in self._drop(key):
            if not self._pool.is_held(block_id):
                self._pool.drop(block_id)
        return True

    def clear(self) -> None:
        self._keys.clear()

    def _drop(self, key: str) -> list[int]:
        """Remove a key. Returns its blocks, without those that another key keeps, too."""
        gone = self._keys.pop(key)
        others = {one for entry in self._keys.values() for one in entry.hashes} if self._keys else set()
        ids = [i for one in gone.hashes if one not in others and (i := self._pool.find(one)) is not None]
        for block_id in ids:
            self._pool.let_go(block_id)
        return ids
