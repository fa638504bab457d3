"""The disk tier: blocks in files of a folder, which survive the process and which engines may share.

    DIR/lock                          held while files are added or removed: the limit holds for all engines together
    DIR/v1-FINGERPRINT/NAME.kv        blocks (`segments.py`) of one model, type and layout; others' stay and are no hit

A file's time of modification is that of its last use, so that the least recently used file of all engines goes first.
One thread reads and another writes; the engine never waits for either. If the disk fails, a block is a miss at worst.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from quire.configs.config import Config
from quire.worker.cache.tiers.base import GIB, Content, Rank, Tier, content_of
from quire.worker.cache.tiers.segments import Place, encode, read_block, read_places
from quire.worker.cache.tiers.unusable import Unusable

if TYPE_CHECKING:
    from quire.worker.platforms.base import Platform

logger = logging.getLogger(__name__)

FORMAT = "v1"
SEGMENT_BYTES = 4 << 20  # bytes of blocks in a file, roughly
QUEUE_BYTES = 256 << 20  # blocks that wait for the writer
GATHER = 0.05  # seconds that the writer waits for more blocks of a file
PAUSE = 30.0  # seconds without writes after an error
REFRESH = 5.0  # seconds between looks for other engines' files
_PAGE = 4096  # files take whole pages of the disk
_OURS = (".kv", ".tmp")


class DiskTier(Tier):
    """Blocks by key. `limit` bounds the bytes of all files in `folder`, of all engines that use it."""

    name, medium, where, saves = "disk", "STORAGE", "on disk", True

    def __init__(self, folder: Path, limit: int, fingerprint: bytes):
        self.root, self.limit, self.fingerprint = folder, limit, fingerprint
        self.folder = folder / f"{FORMAT}-{fingerprint.hex()[:32]}"
        self.segment_bytes = max(min(SEGMENT_BYTES, limit // 8), 1)
        self.queue_bytes = QUEUE_BYTES
        self.writable = True
        self.used = 0  # bytes of all files when they were last counted
        self.written = self.num_evicted = 0  # bytes, files
        self.unusable = Unusable(folder)
        self.seconds_writing = 0.0
        self._index: dict[bytes, Place] = {}
        self._known: dict[str, list[bytes]] = {}  # keys by file name, also of files that are not ours
        self._queue: dict[bytes, tuple[bytes, int]] = {}  # blocks that wait for the writer, their time of use in ns
        self._queued_bytes = self._writing = 0
        self._batch: set[bytes] = set()  # blocks of the file that is being written
        self._doomed: set[bytes] = set()  # blocks that were removed and that a file may still have
        self._num_cleared = 0  # times that all blocks were removed
        self._foreign: set[Path] = set()  # files of others that were logged
        self._paused_until = self._refreshed = 0.0
        self._stopped = False
        self._changed = threading.Condition()
        self._open_folder()
        self._refresh()
        self._writer = threading.Thread(target=self._write_queued, name="kv-disk-writer", daemon=True)
        self._writer.start()

    @classmethod
    def plan(cls, config: Config, platform: Platform) -> int | None:
        """Return the limit of the files."""
        return max(int(config.cache.kv_disk_gib * GIB), 1) if config.cache.kv_disk else None

    @classmethod
    def open(cls, limit: int, rank: Rank) -> DiskTier:
        return cls(Path(rank.config.cache.kv_disk).expanduser(), limit, rank.fingerprint())

    # ---- lookups; any thread

    def __contains__(self, key: bytes) -> bool:
        return (key in self._index or key in self._queue) and key not in self._doomed

    def contains(self, keys: list[bytes]) -> list[bool]:
        """Return for each block whether it is here. Other engines' new files are found seconds later."""
        found = [key in self for key in keys]
        if not all(found) and time.monotonic() - self._refreshed > REFRESH:
            self._refreshed = time.monotonic()
            threading.Thread(target=self._refresh, name="kv-disk-index", daemon=True).start()
        return found

    def read(self, key: bytes) -> bytes | None:
        if key in self._doomed:
            return None
        if (queued := self._queue.get(key)) is not None:
            return queued[0]
        if (place := self._index.get(key)) is None:
            return None
        try:
            return read_block(place)
        except (OSError, ValueError) as error:
            self._drop_file(place.path, error)
            return None

    def touch(self, keys: list[bytes]) -> None:
        paths = dict.fromkeys(place.path for key in reversed(keys) if (place := self._index.get(key)) is not None)
        for path in paths if self.writable else ():
            with contextlib.suppress(OSError):  # gone, or not ours to change: then its time stays
                os.utime(path)

    # ---- writes

    def offer(self, key: bytes, content: Content, used: int = 0) -> list[tuple[bytes, bytes]] | None:
        """Queue a block for the writer. Files that make room for it leave no contents for the next tier."""
        if key in self:
            return []
        if key in self._doomed or not self.accepts:  # doomed until the writer has erased the block
            return None
        content = content_of(content)
        with self._changed:
            if key not in self._queue:
                self._queue[key] = content, used or time.time_ns()
                self._queued_bytes += len(content)
            self._changed.notify_all()
        return []

    @property
    def accepts(self) -> bool:
        """Return whether a block may be offered now."""
        return self.writable and time.monotonic() >= self._paused_until and self._queued_bytes < self.queue_bytes

    def flush(self, timeout: float) -> bool:
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._queue and not self._writing and not self._must_erase(), timeout
            )

    def remove(self, keys: list[bytes]) -> None:
        """Forget these blocks at once; the writer erases them from all files, of other engines, too."""
        with self._changed:
            self._doomed.update(keys)
            for key in keys:
                if key not in self._batch and (queued := self._queue.pop(key, None)) is not None:
                    self._queued_bytes -= len(queued[0])
                self._leave(key)
            self._changed.notify_all()

    def clear(self) -> None:
        with self._changed:
            self._num_cleared += 1
            self._queue.clear()
            self._queued_bytes = 0
            self._changed.notify_all()
        with self._locked() as locked:
            names = list(self._files(self.folder)) if locked else []
            for path, _, _ in names:
                self._remove(path)
        self._index.clear()
        self._known.clear()

    def stop(self) -> None:
        """End the writer once it has finished its file and erased removed blocks."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._writer.join(timeout=1.0)

    def counts(self) -> dict[str, float]:
        written = {"written_bytes": self.written, "written_seconds": self.seconds_writing}
        return written | {"evicted": self.num_evicted, "damaged": self.unusable.count}

    # ---- the folder

    def _open_folder(self) -> None:
        """Create the folders for this user alone, and keep the limit if it was lowered."""
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.folder.mkdir(mode=0o700, exist_ok=True)
            self.folder.chmod(0o700)
            with self._locked(), (self.folder / "probe.tmp").open("wb") as probe:
                os.fchmod(probe.fileno(), 0o600)
            (self.folder / "probe.tmp").unlink()
            with self._locked():
                self._make_room(0)
        except OSError as error:
            self.writable = False
            logger.warning("--kv-disk %s: cannot write (%s); blocks are only read from it", self.root, error)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[bool]:
        """Hold the folder's lock. Yields False in a read-only folder."""
        if not self.writable:
            yield False
            return
        descriptor = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield True
        finally:
            os.close(descriptor)

    def _files(self, folder: Path) -> Iterator[tuple[Path, int, int]]:
        """Yield (path, bytes on disk, time of last use in ns) of our files in a folder."""
        for entry in _entries(folder):
            if entry.name.endswith(_OURS) and entry.is_file(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    yield Path(entry.path), -(-status.st_size // _PAGE) * _PAGE, status.st_mtime_ns

    def _record_foreign(self) -> None:
        """Note foreign files in our folders; folders next to ours are left alone."""
        found = [entry for entry in _entries(self.root) if entry.name != "lock" and not entry.is_dir()]
        found += [
            entry
            for entry in _entries(self.folder)
            if not (entry.name.endswith(_OURS) and entry.is_file(follow_symlinks=False))
        ]
        paths = {Path(entry.path) for entry in found} - {self.folder / "probe.tmp"}
        for path in paths - self._foreign:
            self.unusable.note(path, "it is not a file of this format")
        self._foreign = paths

    def _make_room(self, size: int, before: float = float("inf")) -> bool:
        """Remove the least recently used files last used up to `before` ns, until `size` more bytes fit into the limit.
        Returns whether they fit. The lock is held, so an unfinished file is that of an engine that died.
        """
        files = []
        for folder in self.root.glob("v*-*"):
            for path, count, used in self._files(folder):
                if path.suffix == ".tmp":
                    self._remove(path)
                else:
                    files.append((used, count, path))
        total = sum(count for _, count, _ in files)
        for used, count, path in sorted(files):
            if total + size <= self.limit or used > before:
                break
            self._remove(path)
            self.num_evicted += 1
            total -= count
        self.used = total
        return total + size <= self.limit

    def _remove(self, path: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        if path.parent == self.folder:
            self._forget(path.name)

    def _forget(self, name: str) -> None:
        for key in self._known.pop(name, ()):
            if (place := self._index.get(key)) and place.path.name == name:
                self._leave(key)

    def _leave(self, key: bytes) -> Place | None:
        place = self._index.pop(key, None)
        if place is not None and self.changes is not None:
            self.changes.append((key, False))
        return place

    def _drop_file(self, path: Path, error: Exception) -> None:
        """Forget a file that cannot be read."""
        self._forget(path.name)
        if isinstance(error, FileNotFoundError):  # another engine needed the room
            return
        self.unusable.note(path, _reason(error))
        self.unusable.report()
        if self.writable and isinstance(error, ValueError):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def _refresh(self) -> None:
        """Read the headers of files that are new, and forget those that are gone."""
        self._refreshed, known = time.monotonic(), set(self._known)  # before listing files: the writer adds meanwhile
        names = {path.name: path for path, _, _ in self._files(self.folder) if path.suffix == ".kv"}
        for name in known - names.keys():
            self._forget(name)
        for name in names.keys() - known:
            try:
                places = read_places(names[name], self.fingerprint)
            except (OSError, ValueError) as error:
                if not isinstance(error, FileNotFoundError):
                    self.unusable.note(names[name], _reason(error))
                    self._known[name] = []
                continue
            self._add(name, places)
        self._record_foreign()
        self.unusable.report()

    def _add(self, name: str, places: dict[bytes, Place]) -> None:
        self._known[name] = list(places)
        found = {key: place for key, place in places.items() if key not in self._doomed}
        self._index.update(found)
        if self.changes is not None:
            self.changes.extend((key, True) for key in found)

    # ---- the writer's thread

    def _write_queued(self) -> None:
        while True:
            with self._changed:
                # an erasure that failed is tried again after the pause
                self._changed.wait_for(lambda: self._queue or self._must_erase() or self._stopped, PAUSE)
                if not self._must_erase() and not self._stopped:  # blocks come in groups: fewer, larger files
                    self._changed.wait_for(lambda: self._stopped or self._queued_bytes >= self.segment_bytes, GATHER)
                doomed = set(self._doomed) if self._must_erase() else set()
                if self._stopped and not doomed:
                    return
                batch, used = self._next_batch() if not doomed else ([], 0)
                num_cleared = self._num_cleared
                self._writing = len(batch) + len(doomed)
                self._batch = {key for key, _ in batch}
            start = time.monotonic()
            try:
                self._erase(doomed)
                if batch:
                    self._write(batch, used, num_cleared)
                self.seconds_writing += time.monotonic() - start
            except OSError as error:
                doomed = set()
                self._paused_until = time.monotonic() + PAUSE
                self._drop_queue()
                logger.warning(
                    "kv cache: cannot write to %s (%s); going on without it for %.0f s", self.folder, error, PAUSE
                )
            with self._changed:
                for key, content in batch:
                    if self._queue.pop(key, None) is not None:
                        self._queued_bytes -= len(content)
                self._doomed -= doomed
                self._writing, self._batch = 0, set()
                self._changed.notify_all()

    def _must_erase(self) -> bool:
        return bool(self._doomed) and self.writable and time.monotonic() >= self._paused_until

    def _erase(self, keys: set[bytes]) -> None:
        """Remove these blocks from all files."""
        if keys:
            self._refresh()
            for name, known in list(self._known.items()):
                if not keys.isdisjoint(known):
                    self._shrink(name)

    def _shrink(self, name: str) -> None:
        """Remove a file. Its blocks that were not removed, and that no other file has, are written to another one."""
        num_cleared = self._num_cleared
        places = [(key, place) for key in self._known.get(name, ()) if (place := self._index.get(key)) is not None]
        contents = [(key, self.read(key)) for key, place in places if place.path.name == name]
        with self._locked():
            used = next((used for path, _, used in self._files(self.folder) if path.name == name), 0)
            self._remove(self.folder / name)
        if rest := [(key, content) for key, content in contents if content is not None]:
            self._write(rest, used, num_cleared)

    def _next_batch(self) -> tuple[list[tuple[bytes, bytes]], int]:
        """Return the blocks of the next file, which stay in the queue until it is written, and their time of
        last use.
        """
        batch, size, last = [], 0, 0
        for key, (content, used) in self._queue.items():
            if batch and size + len(content) > self.segment_bytes:
                break
            batch.append((key, content))
            size += len(content)
            last = max(last, used)
        return batch, last

    def _drop_queue(self) -> None:
        with self._changed:
            self._queue.clear()
            self._queued_bytes = 0

    def _write(self, batch: list[tuple[bytes, bytes]], used: int, num_cleared: int) -> None:
        """Write a file that was last used at `used` ns, unless all blocks were removed more than `num_cleared`
        times so far.
        """
        parts = encode(self.fingerprint, batch)
        size = -(-sum(map(len, parts)) // _PAGE) * _PAGE
        if size > self.limit:
            return
        name = secrets.token_hex(12)
        with self._locked():
            if not self.folder.exists():  # someone cleared the folder
                self.folder.mkdir(mode=0o700, parents=True)
            if not self._make_room(size, used):
                return
            if self._num_cleared != num_cleared:
                return
            path, final = self.folder / f"{name}.tmp", self.folder / f"{name}.kv"
            try:
                with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
                    file.writelines(parts)
                os.utime(path, ns=(used, used))
                path.rename(final)
            except OSError:
                path.unlink(missing_ok=True)
                raise
            self.used += size
            self.written += size
            self._add(name + ".kv", read_places(final, self.fingerprint))


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """Return the entries of a folder; none if it cannot be read."""
    try:
        return list(os.scandir(folder))
    except OSError:
        return []


def _reason(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
