"""The tier of llama.cpp's slots: one conversation's blocks in a file that a client named, written and read on request.

A file has the format of the disk tier (`segments.py`). Its first entry, with an empty key, is the engine's note about
the blocks. Each rank has a file of its own: NAME, NAME.rank1 ...

The engine begins one action at a time and polls between steps: a poll copies some MiB out of blocks, and a thread uses
the disk, so that running requests are not held up.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from quire.checkpoints.files import folder_obstacle
from quire.configs.config import Config
from quire.worker.cache.tiers.base import Agree, Content, Rank, Tier, alone
from quire.worker.cache.tiers.segments import Place, encode, read_block, read_places
from quire.worker.messages import SLOTS, SlotReport

if TYPE_CHECKING:
    from quire.worker.platforms.base import Platform

logger = logging.getLogger(__name__)

COPY_BYTES = 8 << 20  # bytes that one poll copies
FAILED = SlotReport(-1)


class SlotTier(Tier):
    """Takes no blocks that leave the KV cache, and no lookup finds its blocks: `save` exports given ones to a file, and
    `read` returns those of the file that was opened last.
    """

    name, medium, where, saves = SLOTS, "STORAGE", "in slot files", False

    def __init__(
        self,
        folder: Path,
        fingerprint: bytes,
        gather: Callable[[int], bytes],
        rank: int = 0,
        agree: Agree = alone,
    ):
        self.folder, self.fingerprint, self.gather, self._agree = folder, fingerprint, gather, agree
        self._suffix = f".rank{rank}" if rank else ""
        self._places: dict[bytes, Place] = {}  # in the file that was opened last
        self._left: deque[tuple[int, bytes]] = deque()  # (block, key) to copy for the file to write
        self._entries: list[tuple[bytes, bytes]] = []  # (key, content) that were copied
        self._work: Callable[[], SlotReport] | None = None  # for a thread, after the copies
        self._result: SlotReport | None = None
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    @classmethod
    def plan(cls, config: Config, platform: Platform) -> int | None:
        """Raise ValueError for a folder that cannot be made, but make none: `quire check` calls this, too."""
        if not config.cache.slot_save_path:
            return None
        folder = Path(config.cache.slot_save_path).expanduser()
        if (why := folder_obstacle(folder)) is not None:
            raise ValueError(f"--slot-save-path {folder}: {why}")
        return 0

    @classmethod
    def open(cls, limit: int, rank: Rank) -> SlotTier:
        folder = Path(rank.config.cache.slot_save_path).expanduser()
        try:
            return cls(folder, rank.fingerprint(), rank.gather, rank.number, rank.agree)
        except OSError as error:
            raise ValueError(f"--slot-save-path {folder}: {error.strerror}") from None

    # ---- actions, see `SlotCalls`

    def save(self, name: str, note: bytes, blocks: list[tuple[int, bytes]]) -> None:
        self._entries, self._left = [(b"", note)], deque(blocks)
        self._work = functools.partial(self._write, self.folder / (name + self._suffix), self._entries)

    def restore(self, name: str) -> None:
        self._places = {}
        self._work = functools.partial(self._read, self.folder / (name + self._suffix))

    def poll(self) -> SlotReport | None:
        copied = 0
        while self._left and copied < COPY_BYTES:
            block_id, key = self._left.popleft()
            self._entries.append((key, self.gather(block_id)))
            copied += len(self._entries[-1][1])
        if not self._left and self._work is not None:
            work, self._work = self._work, None
            threading.Thread(target=self._run, args=(work,), name="kv-slot-file", daemon=True).start()
        if not self._agree([int(self._result is not None)])[0]:
            return None
        result, self._result, self._entries = self._result, None, []
        return result if self._agree([result.size])[0] >= 0 else FAILED

    # ---- the thread

    def _run(self, work: Callable[[], SlotReport]) -> None:
        try:
            self._result = work()
        except Exception:
            logger.exception("a slot file could not be used")
            self._result = FAILED

    def _write(self, path: Path, entries: list[tuple[bytes, bytes]]) -> SlotReport:
        unfinished = self.folder / f".{secrets.token_hex(8)}.tmp"
        parts = encode(self.fingerprint, entries)
        try:
            with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
                file.writelines(parts)
            unfinished.rename(path)
        except OSError as error:
            logger.warning("slot file %s cannot be written: %s", path, error)
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
            return FAILED
        return SlotReport(sum(map(len, parts)))

    def _read(self, path: Path) -> SlotReport:
        """Check a whole file before any block is filled from it."""
        try:
            places = read_places(path, self.fingerprint)
            size, note = path.stat().st_size, read_block(places.pop(b""))
            for place in places.values():
                read_block(place)
        except (OSError, ValueError, KeyError) as error:
            logger.warning("slot file %s cannot be used: %s", path, error)
            return FAILED
        self._places = places
        return SlotReport(size, note, list(places))

    # ---- a tier

    def contains(self, keys: list[bytes]) -> list[bool]:
        return [False] * len(keys)

    def read(self, key: bytes) -> bytes | None:
        place = self._places.get(key)
        try:
            return read_block(place) if place is not None else None
        except (OSError, ValueError) as error:
            logger.warning("slot file %s cannot be used: %s", place.path, error)
            return None

    def offer(self, key: bytes, content: Content, used: int = 0) -> None:
        return None

    def remove(self, keys: list[bytes]) -> None:
        for key in keys:
            self._places.pop(key, None)

    def clear(self) -> None:
        self._places = {}
