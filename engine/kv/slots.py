"""llama.cpp's slots: the cache contents of the last request in a row, saved to a file, restored and erased.

Requests get the lowest free row, so that a client that asks one thing after another always finds its conversation in
slot 0. Only full blocks are saved. Restored blocks are in the pool as any other prefix: a request finds it by its
tokens, in whichever row it runs.

Saving and restoring take as long as the disk does. They run one after the other, as generators that `poll` resumes
between steps; the blocks they read or fill are held meanwhile.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.engine.kv.manager import KVCacheManager
from quire.engine.messages import AddRequest, Choice, LoraUse, MediaItem, SamplingParams
from quire.engine.request import Request


@dataclass(slots=True)
class Slot:
    """The prompt and the outputs of a request, and what else its blocks depend on."""

    token_ids: array = field(default_factory=lambda: array("I"))
    cache_salt: str | None = None
    adapters: list[LoraUse] = field(default_factory=list)
    media: list[MediaItem] = field(default_factory=list)


class _Note(msgspec.Struct, array_like=True):
    """A slot in a file."""

    token_ids: bytes  # uint32 in the byte order of the machine
    cache_salt: str | None
    adapters: list[LoraUse]
    media: list[MediaItem]


Counts = dict[str, int]
Reply = Callable[[Counts | None, Exception | None], None]


class Slots:
    """`call(method, *args)` calls a method of the workers' `SlotFiles`. Slots are numbered over all engines: those of
    engine `index` begin at `index` times `num_rows`. `store_evicted` is called before blocks that were taken from the
    pool are overwritten.
    """

    def __init__(
        self, kv: KVCacheManager, call: Callable[..., Any], num_rows: int, index: int, store_evicted: Callable[[], None]
    ):
        self.kv, self.call, self._first, self._store_evicted = kv, call, index * num_rows, store_evicted
        self._slots = [Slot() for _ in range(num_rows)]
        self._jobs: deque[tuple[Reply, Generator[None, None, Counts]]] = deque()

    def note(self, request: Request) -> None:
        """A request is about to leave its row."""
        ids = array("I", request.token_ids)
        self._slots[request.row] = Slot(ids, request.cache_salt, request.adapters, request.media)

    def begin(self, reply: Reply, action: str, number: int, name: str = "") -> None:
        """Save, restore or erase a slot. `reply` gets the counts of llama.cpp's answer, {} if it is not possible, or
        None if the slot is another engine's.
        """
        row = number - self._first
        if not 0 <= row < len(self._slots):
            reply(None, None)
            return
        jobs = {"save": self._save, "restore": self._restore, "erase": self._erase}
        self._jobs.append((reply, jobs[action](row, name)))

    @property
    def busy(self) -> bool:
        """Whether `poll` has something to do."""
        return bool(self._jobs)

    def poll(self) -> None:
        """Go on with the first action."""
        reply, job = self._jobs[0]
        try:
            next(job)
        except StopIteration as end:
            self._jobs.popleft()
            reply(end.value, None)
        except Exception as error:
            self._jobs.popleft()
            reply(None, error)

    def _finished(self, method: str, *args: Any) -> Generator[None, None, tuple]:
        """Begin something in the workers and wait for its result."""
        self.call(method, *args)
        while (result := self.call("poll")) is None:
            yield
        return result

    @staticmethod
    def _request(slot: Slot) -> Request:
        """A request that would find the slot's blocks: a hit excludes its last token."""
        message = AddRequest("", [*slot.token_ids, 0], SamplingParams(), cache_salt=slot.cache_salt)
        message = msgspec.structs.replace(message, adapters=slot.adapters, media=slot.media)
        return Request(message, Choice("", 0), b"", 0, -1, 0.0, 1 << 30, False)

    def _cached(self, slot: Slot) -> tuple[int, list[tuple[int, bytes]]]:
        """How many tokens of a slot are cached, and their (block, key)s."""
        request = self._request(slot)
        num_blocks = self.kv.match(request).num_blocks
        return num_blocks * self.kv.block_size, self.kv.cached_blocks(request, num_blocks)

    def _save(self, row: int, name: str) -> Generator[None, None, Counts]:
        slot = self._slots[row]
        num_tokens, blocks = self._cached(slot)
        ids = slot.token_ids[:num_tokens].tobytes()
        note = msgspec.msgpack.encode(_Note(ids, slot.cache_salt, slot.adapters, slot.media))
        held = [block_id for block_id, _ in blocks]
        self.kv.pool.share(held)
        try:
            (size,) = yield from self._finished("save", name, note, blocks)
        finally:
            self.kv.pool.release(held)
        return {"n_saved": num_tokens, "n_written": size} if size >= 0 else {}

    def _restore(self, row: int, name: str) -> Generator[None, None, Counts]:
        size, content, keys = yield from self._finished("read", name)
        if size < 0:
            return {}
        note = msgspec.msgpack.decode(content, type=_Note)
        missing = [key for key in keys if self.kv.pool.find(key) is None]
        states = sum(map(self.kv.is_state_key, missing))
        if len(missing) - states > self.kv.pool.num_free or states > self.kv.pool.num_free_states:
            return {}
        tokens = array("I")
        tokens.frombytes(note.token_ids)
        ids = self.kv.take_for(missing)
        try:
            self._store_evicted()
            yield from self._finished("fill", [ids.get(key, 0) for key in keys])
            self._slots[row] = slot = Slot(tokens, note.cache_salt, note.adapters, note.media)
            self.kv.publish_filled(self._request(slot), ids)
        finally:
            self.kv.pool.release(list(ids.values()))
        return {"n_restored": len(tokens), "n_read": size}

    def _erase(self, row: int, _: str) -> Generator[None, None, Counts]:
        num_tokens, blocks = self._cached(self._slots[row])
        for block_id, _ in reversed(blocks):
            if not self.kv.pool.is_held(block_id):
                self.kv.pool.forget([block_id])
        self._slots[row] = Slot()
        return {"n_erased": num_tokens}
        yield
