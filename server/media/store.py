"""Preprocessed images and videos as files in shared memory, from which the workers read them: the most recently used,
and those of running requests.

The files lie in a folder of this process, which a lock marks as in use: the folders of processes that were killed are
removed by the next one. Every method may be called in any thread.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quire.checkpoints.sizes import format_bytes, format_each
from quire.configs import platforms
from quire.server.errors import Unavailable
from quire.server.media.inputs import Lease, PreparedMedium, PreparedPart
from quire.server.private_folder import make_folder, remove_abandoned

if TYPE_CHECKING:
    from quire.server.media.processor import ProcessedImage, ProcessedVideo

logger = logging.getLogger("quire.images")

PREFIX = "quire-images-"


@dataclass(slots=True)
class _Entry:
    medium: PreparedMedium
    num_leases: int = 0


class MediaStore:
    """The store; its folder is created with the first medium. `keeps`: unleased ones stay."""

    def __init__(self, max_bytes: int, base: Path | None = None, keeps: bool = True):
        self.max_bytes, self.keeps = max_bytes, keeps
        self.num_bytes = 0
        self._base = base
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # most recently used last
        self._mutex = threading.RLock()  # a lease may end by garbage collection within our own code
        self._folder: Path | None = None
        self._mark: int | None = None  # descriptor of the lock
        self._closed = False

    def lease(self, key: str) -> Lease | None:
        """Return a lease of the medium `key`; None if it is not stored."""
        with self._mutex:
            entry = self._entries.get(key)
            if entry is None:
                return None
            entry.num_leases += 1
            self._entries.move_to_end(key)
            return Lease(entry.medium, self._release)

    def add(self, key: str, processed: ProcessedImage | ProcessedVideo) -> Lease:
        """Write the features of a medium, a file for each part. Raises ValueError, for the client, if the store is
        smaller than they are, Unavailable if running requests leave no room for them.
        """
        from safetensors.numpy import save

        files = [save(part.features) for part in processed.parts]
        num_bytes = sum(map(len, files))
        if num_bytes > self.max_bytes:
            taken, most = format_each(num_bytes, self.max_bytes)
            raise ValueError(f"its features take {taken}, and the limit is {most} (--mm-processor-cache-gb)")
        with self._mutex:
            if (known := self.lease(key)) is not None:
                return known
            self._make_room(num_bytes)
            parts = self._write(key, processed, files)
            self._entries[key] = _Entry(PreparedMedium(key, num_bytes, processed.text, parts))
            self.num_bytes += num_bytes
            return self.lease(key)

    def _write(self, key: str, processed: ProcessedImage | ProcessedVideo, files: list[bytes]) -> list[PreparedPart]:
        several, folder = len(files) > 1, self._own_folder()
        parts: list[PreparedPart] = []
        try:
            for i, (part, data) in enumerate(zip(processed.parts, files, strict=True)):
                name = _key_of_part(key, i) if several else key
                path = folder / f"{name}.safetensors"
                parts.append(PreparedPart(name, str(path), list(part.counts), part.grid, part.time))
                path.write_bytes(data)
        except OSError as error:
            _unlink(parts)
            raise Unavailable(f"An image cannot be kept: {error.strerror}.", retry_after=1) from None
        return parts

    def _release(self, key: str) -> None:
        with self._mutex:
            if (entry := self._entries.get(key)) is not None:
                entry.num_leases -= 1
                if not entry.num_leases and not self.keeps:
                    self._remove(key)

    def _make_room(self, num_bytes: int) -> None:
        """Remove the least recently used images that no request holds."""
        excess = self.num_bytes + num_bytes - self.max_bytes
        for key in [key for key, entry in self._entries.items() if not entry.num_leases]:
            if excess <= 0:
                break
            excess -= self._entries[key].medium.num_bytes
            self._remove(key)
        if excess > 0:
            taken, most = format_each(self.max_bytes + excess, self.max_bytes)
            raise Unavailable(
                f"The images of running requests, with this one, take {taken}, and the limit is {most} "
                "(--mm-processor-cache-gb).",
                retry_after=1,
            )

    def _remove(self, key: str) -> None:
        medium = self._entries.pop(key).medium
        self.num_bytes -= medium.num_bytes
        _unlink(medium.parts)

    # ---- the folder

    def _own_folder(self) -> Path:
        if self._closed:
            raise Unavailable("The server is shutting down.", code="shutting_down", retry_after=5)
        if self._folder is None:
            base = self._base or _roomy(self.max_bytes)
            remove_abandoned(base, PREFIX)
            self._folder, self._mark = make_folder(base, PREFIX)
            logger.info("preprocessed images are kept in %s, at most %s", base, format_bytes(self.max_bytes))
        return self._folder

    def close(self) -> None:
        """Remove everything. Idempotent."""
        with self._mutex:
            self._closed = True
            folder, self._folder = self._folder, None
            self._entries.clear()
            self.num_bytes = 0
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(self._mark)


def _key_of_part(key: str, i: int) -> str:
    return hashlib.blake2b(f"{key}/{i}".encode(), digest_size=16).hexdigest()


def _unlink(parts: list[PreparedPart]) -> None:
    for part in parts:
        Path(part.path).unlink(missing_ok=True)


def _roomy(num_bytes: int) -> Path:
    """Return shared memory, or the folder of temporary files if that is too small, as in containers by default."""
    return platforms.shared_memory(num_bytes) or Path(tempfile.gettempdir())
