"""Preprocessed images as files in shared memory, from which the workers read them: the most recently used, and those
of running requests.

The files lie in a folder of this process, which a lock marks as in use: the folders of processes that were killed are
removed by the next one. Every method may be called in any thread.
"""

from __future__ import annotations

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
from quire.server.media.inputs import Lease, PreparedImage
from quire.server.private_folder import make_folder, remove_abandoned

if TYPE_CHECKING:
    from quire.server.media.processor import ProcessedImage

logger = logging.getLogger("quire.images")

PREFIX = "quire-images-"


@dataclass(slots=True)
class _Entry:
    image: PreparedImage
    num_leases: int = 0


class ImageStore:
    """Creates its folder with the first image. `keeps`: images stay when no request holds them."""

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
        """Return a lease of the image `key`; None if it is not there."""
        with self._mutex:
            entry = self._entries.get(key)
            if entry is None:
                return None
            entry.num_leases += 1
            self._entries.move_to_end(key)
            return Lease(entry.image, self._release)

    def add(self, key: str, processed: ProcessedImage) -> Lease:
        """Write the features of an image. Raises Unavailable if running requests leave no room for it."""
        from safetensors.numpy import save

        data = save(processed.features)
        with self._mutex:
            if (known := self.lease(key)) is not None:
                return known
            self._make_room(len(data))
            path = self._own_folder() / f"{key}.safetensors"
            try:
                path.write_bytes(data)
            except OSError as error:
                path.unlink(missing_ok=True)
                raise Unavailable(f"An image cannot be kept: {error.strerror}.", retry_after=1) from None
            image = PreparedImage(key, str(path), len(data), processed.text, list(processed.counts), processed.grid)
            self._entries[key] = _Entry(image)
            self.num_bytes += image.num_bytes
            return self.lease(key)

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
            excess -= self._entries[key].image.num_bytes
            self._remove(key)
        if excess > 0:
            taken, most = format_each(self.max_bytes + excess, self.max_bytes)
            raise Unavailable(
                f"The images of running requests, with this one, take {taken}, and the limit is {most} "
                "(--mm-processor-cache-gb).",
                retry_after=1,
            )

    def _remove(self, key: str) -> None:
        image = self._entries.pop(key).image
        self.num_bytes -= image.num_bytes
        Path(image.path).unlink(missing_ok=True)

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


def _roomy(num_bytes: int) -> Path:
    """Shared memory, or the folder of temporary files if that is too small, as it is by default in a container."""
    return platforms.shared_memory(num_bytes) or Path(tempfile.gettempdir())
