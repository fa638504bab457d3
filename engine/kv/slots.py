"""llama.cpp's slots: the cache contents of the last request in a row, saved to a file, restored and erased.

Requests get the lowest free row, so that a client that sends one request at a time always finds its conversation in
slot 0. Only full blocks are saved. A file is a tier: its blocks are fetched into the pool as those of other tiers. Then
a request finds them by its tokens, in whichever row it runs.

Saving and restoring take as long as the disk does. They are generators, which the engine resumes between steps, one
after the other; the blocks they read or fill are held meanwhile.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

import msgspec

from quire.engine.kv.manager import KVCacheManager
from quire.engine.kv.tiers import Tiers
from quire.engine.messages import AddRequest, Choice, LoraUse, MediaItem, SamplingParams
from quire.engine.request import Request
from quire.worker.messages import SlotCalls, SlotReport


@dataclass(slots=True)
class Slot:
    """The prompt and the outputs of a request, and the other values on which its blocks depend."""

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


Counts = dict[str, int]  # of llama.cpp's answer; {}: it was not possible
Later = Generator[None, None, Counts]


class Slots:
    """Slots are numbered over all engines: those of engine `index` begin at `index` times `num_rows`; an action on
    another engine's returns None. Files are read by `tiers`. `unsettled` returns the blocks that steps in flight fill.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        files: SlotCalls,
        tiers: Tiers | None,
        num_rows: int,
        index: int,
        unsettled: Callable[[], set[int]],
    ):
        self.kv, self._files, self._tiers, self._unsettled = kv, files, tiers, unsettled
        self._first = index * num_rows
        self._slots = [Slot() for _ in range(num_rows)]

    def note(self, request: Request) -> None:
        """Note the blocks of a request that is about to leave its row."""
        ids = array("I", request.token_ids)
        self._slots[request.row] = Slot(ids, request.cache_salt, request.adapters, request.media)

    def save(self, number: int, name: str) -> Later | None:
        """Save the blocks of a slot to a file."""
        return self._save(number - self._first, name) if self._is_own(number) else None

    def restore(self, number: int, name: str) -> Later | None:
        """Fill blocks from a file, as those of the slot."""
        return self._restore(number - self._first, name) if self._is_own(number) else None

    def erase(self, number: int) -> Later | None:
        """Forget the blocks of a slot that no request holds."""
        return self._erase(number - self._first) if self._is_own(number) else None

    def _is_own(self, number: int) -> bool:
        return 0 <= number - self._first < len(self._slots)

    def _finished(self) -> Generator[None, None, SlotReport]:
        """Wait for the end of the action that was begun in the workers."""
        while (report := self._files.poll()) is None:
            yield
        return report

    @staticmethod
    def _request(slot: Slot) -> Request:
        """Return a request that would find the slot's blocks: a hit excludes its last token."""
        message = AddRequest("", [*slot.token_ids, 0], SamplingParams(), cache_salt=slot.cache_salt)
        message = msgspec.structs.replace(message, adapters=slot.adapters, media=slot.media)
        return Request(message, Choice("", 0), b"", 0, -1, 0.0, 1 << 30, False)

    def _cached(self, slot: Slot) -> tuple[int, list[tuple[int, bytes]]]:
        """Return the number of cached tokens of a slot, and their (block, key)s."""
        request = self._request(slot)
        num_blocks = self.kv.match(request).num_blocks
        return num_blocks * self.kv.block_size, self.kv.cached_blocks(request, num_blocks)

    def _save(self, row: int, name: str) -> Later:
        slot = self._slots[row]
        num_tokens, blocks = self._cached(slot)
        ids = slot.token_ids[:num_tokens].tobytes()
        note = msgspec.msgpack.encode(_Note(ids, slot.cache_salt, slot.adapters, slot.media))
        held = [block_id for block_id, _ in blocks]
        self.kv.pool.share(held)
        try:
            self._files.save(name, note, blocks)
            size = (yield from self._finished()).size
        finally:
            self.kv.pool.release(held)
        return {"n_saved": num_tokens, "n_written": size} if size >= 0 else {}

    def _restore(self, row: int, name: str) -> Later:
        self._files.restore(name)
        file = yield from self._finished()
        if file.size < 0:
            return {}
        note = msgspec.msgpack.decode(file.note, type=_Note)
        tokens = array("I")
        tokens.frombytes(note.token_ids)
        slot = Slot(tokens, note.cache_salt, note.adapters, note.media)
        missing = [key for key in file.keys if self.kv.pool.find(key) is None]
        states = sum(map(self.kv.is_state_key, missing))
        if len(missing) - states > self.kv.pool.num_free or states > self.kv.pool.num_free_states:
            return {}
        fetch = self._tiers.fetch(self._request(slot), missing, self._unsettled(), of_slot=True)
        while fetch.loaded is None:
            yield
        if not all(fetch.loaded):
            return {}
        self._slots[row] = slot
        return {"n_restored": len(tokens), "n_read": file.size}

    def _erase(self, row: int) -> Later:
        num_tokens, blocks = self._cached(self._slots[row])
        for block_id, _ in reversed(blocks):
            if not self.kv.pool.is_held(block_id):
                self.kv.pool.forget([block_id])
        self._slots[row] = Slot()
        return {"n_erased": num_tokens}
        yield
