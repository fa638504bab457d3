"""Slot files: one conversation's blocks in a file that a client named, written and read when it asks.

A file is as those of the disk tier (`segments.py`). Its first entry, with an empty key, is the engine's note about the
blocks. Each rank has a file of its own: NAME, NAME.rank1 ...

The engine begins one thing at a time and polls between steps: a poll copies some MiB out of blocks or into them, and a
thread uses the disk meanwhile, so that requests that run are not held up.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from quire.worker.cache.tiers.segments import encode, read_block, read_places

logger = logging.getLogger(__name__)

COPY_BYTES = 8 << 20  # that one poll copies


class SlotFiles:
    """`agree` reduces numbers to the least of all ranks. `save`, `read` and `fill` begin; `poll` answers, with numbers
    below 0, the same on all ranks, if one of them fails: DAMAGED or FAILED.
    """

    DAMAGED, FAILED = -1, -2

    def __init__(
        self,
        folder: Path,
        fingerprint: bytes,
        gather: Callable[[int], bytes],
        scatter: Callable[[int, bytes], None],
        rank: int = 0,
        agree: Callable[[list[int]], list[int]] = lambda numbers: numbers,
    ):
        self.folder, self.fingerprint, self.gather, self.scatter = folder, fingerprint, gather, scatter
        self._suffix, self._agree = f".rank{rank}" if rank else "", agree
        self._contents: list[bytes] = []  # of blocks that were read and not copied yet
        self._copies: deque[Callable[[], int]] = deque()  # left for polls; each returns its bytes
        self._work: Callable[[], Any] | None = None  # for a thread, after the copies
        self._result: Any = None
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def poll(self) -> Any:
        """Go on with what was begun. Returns its result once every rank has one, None until then."""
        copied = 0
        while self._copies and copied < COPY_BYTES:
            copied += self._copies.popleft()()
        if not self._copies and self._work is not None:
            work, self._work = self._work, None
            threading.Thread(target=self._run, args=(work,), name="kv-slot-file", daemon=True).start()
        if not self._agree([int(self._result is not None)])[0]:
            return None
        (size, *rest), self._result = self._result, None
        (least,) = self._agree([size])
        if least < 0:
            self._contents = []
        return (least if least < 0 else size, *rest)

    def _run(self, work: Callable[[], tuple]) -> None:
        try:
            self._result = work()
        except Exception:
            logger.exception("a slot file could not be used")
            self._result = (self.FAILED, b"", [])

    def save(self, name: str, note: bytes, blocks: Sequence[tuple[int, bytes]]) -> None:
        """Begin to write `note` and these (block, key)s, which stay as they are until the end. The result is (bytes of
        this rank's file or FAILED,).
        """
        entries = [(b"", note)]

        def copy(block_id: int, key: bytes) -> int:
            entries.append((key, self.gather(block_id)))
            return len(entries[-1][1])

        self._copies = deque(functools.partial(copy, *block) for block in blocks)
        self._work = lambda: (self._write(name, entries),)

    def _write(self, name: str, entries: list[tuple[bytes, bytes]]) -> int:
        path = self.folder / f".{secrets.token_hex(8)}.tmp"
        parts = encode(self.fingerprint, entries)
        try:
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
                file.writelines(parts)
            path.rename(self.folder / (name + self._suffix))
        except OSError as error:
            logger.warning("slot file %s cannot be written: %s", self.folder / name, error)
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            return self.FAILED
        return sum(map(len, parts))

    def read(self, name: str) -> None:
        """Begin to read a file. The result is (its bytes or DAMAGED, its note, the keys of its blocks for `fill`)."""
        self._contents = []
        self._work = lambda: self._read(self.folder / (name + self._suffix))

    def _read(self, path: Path) -> tuple[int, bytes, list[bytes]]:
        note, keys, contents = b"", [], []
        try:
            places = read_places(path, self.fingerprint)
            size = path.stat().st_size
            for key, place in places.items():
                content = read_block(place)
                if key:
                    keys.append(key)
                    contents.append(content)
                else:
                    note = content
        except (OSError, ValueError) as error:
            logger.warning("slot file %s cannot be used: %s", path, error)
            return self.DAMAGED, b"", []
        self._contents = contents
        return size, note, keys

    def fill(self, block_ids: Sequence[int]) -> None:
        """Begin to copy the blocks that were read last, in order, to these; 0: not needed. The result is (0,)."""
        contents, self._contents = self._contents, []

        def copy(block_id: int, content: bytes) -> int:
            self.scatter(block_id, content)
            return len(content)

        pairs = zip(block_ids, contents, strict=True)
        self._copies = deque(functools.partial(copy, *pair) for pair in pairs if pair[0])
        self._work = lambda: (0,)
