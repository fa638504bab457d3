"""Slot files: one conversation's blocks in a file that a client named, written and read when it asks.

A file is as those of the disk tier (`segments.py`). Its first entry, with an empty key, is the engine's note about the
blocks. Each rank has a file of its own: NAME, NAME.rank1 ...
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

from quire.worker.cache.tiers.segments import encode, read_block, read_places


class SlotFiles:
    """`agree` reduces numbers to the least of all ranks. Methods answer with numbers below 0, the same on all ranks, if
    one of them fails: DAMAGED or FAILED.
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
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def save(self, name: str, note: bytes, blocks: Sequence[tuple[int, bytes]]) -> list[int]:
        """Write `note` and these (block, key)s. Returns the bytes of the file of this rank, or [FAILED]."""
        parts = encode(self.fingerprint, [(b"", note), *((key, self.gather(block_id)) for block_id, key in blocks)])
        path = self.folder / f".{secrets.token_hex(8)}.tmp"
        try:
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
                file.writelines(parts)
            path.rename(self.folder / (name + self._suffix))
            size = sum(map(len, parts))
        except OSError:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            size = self.FAILED
        return self._agree([size])

    def read(self, name: str) -> tuple[int, bytes, list[bytes]]:
        """Read a file. Returns its bytes, or DAMAGED, and its note and the keys of its blocks for `fill`."""
        self._contents, note, keys = [], b"", []
        path = self.folder / (name + self._suffix)
        try:
            if path.is_symlink():
                raise ValueError("a link")
            places = read_places(path, self.fingerprint)
            size = path.stat().st_size
            for key, place in places.items():
                content = read_block(place)
                if key:
                    keys.append(key)
                    self._contents.append(content)
                else:
                    note = content
        except (OSError, ValueError):
            size = self.DAMAGED
        if self._agree([size])[0] < 0:
            size, self._contents = self.DAMAGED, []
        return size, note, keys

    def fill(self, block_ids: Sequence[int]) -> None:
        """Copy the blocks that were read last, in order, to these; 0: not needed."""
        contents, self._contents = self._contents, []
        for block_id, content in zip(block_ids, contents):
            if block_id:
                self.scatter(block_id, content)
