"""The tiers below the pool of one rank, by block id and key: what the engine asks a worker to do.

A key is the tag of a cache group and the chained hash of a block, so it stands for its contents. The engine never sees
these: it asks which keys are here, has blocks stored before they are reused, and has keys loaded into blocks that it
allocated. Loading has two halves: a thread reads and checks, and `poll`, between two steps, copies what was read into
the blocks, some MiB at a time, so that requests that run are not held up.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from quire.worker.cache.tiers.disk import DiskTier
from quire.worker.cache.tiers.ram import RamTier
from quire.worker.messages import TierReport

COPY_BYTES = 64 << 20  # bytes that one poll copies into blocks
READ_AHEAD_BYTES = 256 << 20  # bytes that were read and not copied yet

MISS, ON_DISK, IN_RAM = 0, 1, 2
TIERS = {IN_RAM: "ram", ON_DISK: "disk"}


@dataclass(slots=True, eq=False)
class _Load:
    keys: list[bytes]
    block_ids: list[int]
    ok: list[bool] = field(default_factory=list)  # of the blocks handled so far
    cancelled: bool = False
    size: int = 0  # bytes copied


@dataclass(slots=True)
class _Counts:
    """Totals of this rank since the start."""

    store_bytes: int = 0  # copied from the pool
    store_time: float = 0.0  # seconds
    load_bytes: int = 0  # copied into the pool
    load_time: float = 0.0  # of reading and copying
    stores_skipped: int = 0  # blocks that no tier had room or time for


class TierStore:
    """`gather` returns the contents of a block, `scatter` writes them, both in the thread that calls the methods here.
    `agree` reduces numbers to the least of all ranks, in the same order on each.
    """

    def __init__(
        self,
        gather: Callable[[int], bytes],
        scatter: Callable[[int, bytes], None],
        ram: RamTier | None,
        disk: DiskTier | None,
        agree: Callable[[list[int]], list[int]] = lambda numbers: numbers,
    ):
        self.gather, self.scatter, self.ram, self.disk, self.agree = gather, scatter, ram, disk, agree
        self.counts = _Counts()
        measured = ("bytes", "blocks", "seconds")
        self.tier_counts = {f"{tier}_read_{what}": 0.0 for tier in TIERS.values() for what in measured}
        # bytes of each transfer since the last `stats`
        self._store_sizes: list[int] = []
        self._load_sizes: list[int] = []
        self._loads: dict[int, _Load] = {}  # by the engine's number
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        self._read: queue.SimpleQueue = queue.SimpleQueue()  # (load, content or None)
        self._ahead = 0  # bytes read and not copied
        self._lock = threading.Condition()
        self._reader: threading.Thread | None = None

    def lookup(self, keys: list[bytes]) -> list[int]:
        """The tier of each key, MISS, ON_DISK or IN_RAM."""
        on_disk = self.disk.contains_all(keys) if self.disk else [False] * len(keys)
        found = [
            IN_RAM if self.ram and key in self.ram else ON_DISK if here else MISS for key, here in zip(keys, on_disk)
        ]
        return self.agree(found)

    # ---- down

    def store(self, blocks: list[tuple[int, bytes]]) -> None:
        """Keep blocks that are about to be reused: in RAM, or else on disk if the writer has room."""
        before = self.counts.store_bytes
        for block_id, key in blocks:
            if self.ram is not None:
                if key not in self.ram:
                    self._demote(self.ram.add(key, self._gather(block_id)))
            elif self.disk is not None:
                self._offer(key, lambda block_id=block_id: self._gather(block_id))
        self._note_store(before)

    def save(self, blocks: list[tuple[int, bytes, int]]) -> int:
        """Write blocks (id, key, time of last use in ns) to disk that stay in the pool. Returns for how many of the
        first ones that was begun, on every rank; 0 without a disk tier that takes any.
        """
        done, before = 0, self.counts.store_bytes
        if self.disk is not None:
            for block_id, key, used in blocks:
                if not self.disk.offer(key, lambda block_id=block_id: self._gather(block_id), used):
                    break
                done += 1
        self._note_store(before)
        return self.agree([done])[0]

    def _demote(self, blocks: list[tuple[bytes, bytes]]) -> None:
        if self.disk is not None:
            for key, content in blocks:
                self._offer(key, content)

    def _offer(self, key: bytes, content: bytes | Callable[[], bytes]) -> None:
        if not self.disk.offer(key, content):
            self.counts.stores_skipped += 1

    def _gather(self, block_id: int) -> bytes:
        start = time.monotonic()
        content = self.gather(block_id)
        self.counts.store_time += time.monotonic() - start
        self.counts.store_bytes += len(content)
        return content

    def _note_store(self, before: int) -> None:
        if size := self.counts.store_bytes - before:
            self._store_sizes.append(size)

    def flush(self, timeout: float) -> bool:
        """Wait until the disk has what it was given."""
        return self.disk is None or self.disk.flush(timeout)

    # ---- up

    def load(self, number: int, keys: list[bytes], block_ids: list[int]) -> None:
        """Begin to read these keys, which `poll` copies into the blocks."""
        load = self._loads[number] = _Load(keys, block_ids)
        for tier in (self.ram, self.disk):
            if tier is not None:
                tier.touch(load.keys)
        if self._reader is None:
            self._reader = threading.Thread(target=self._read_jobs, name="kv-reader", daemon=True)
            self._reader.start()
        self._jobs.put(load)

    def poll(self) -> list[tuple[int, list[bool] | int]]:
        """Copy what was read. Returns per load its number and the number of blocks that were handled, or, once all are,
        whether each holds its key's content on every rank; then the load is over.
        """
        copied = 0
        while copied < COPY_BYTES:
            try:
                load, content = self._read.get_nowait()
            except queue.Empty:
                break
            if content is not None:
                copied += len(content)
                with self._lock:
                    self._ahead -= len(content)
                    self._lock.notify_all()
            if load.cancelled:
                continue
            if content is not None:
                self._copy(load, content)
            load.ok.append(content is not None)
        return self._reports()

    def _copy(self, load: _Load, content: bytes) -> None:
        start = time.monotonic()
        self.scatter(load.block_ids[len(load.ok)], content)
        self.counts.load_time += time.monotonic() - start
        self.counts.load_bytes += len(content)
        load.size += len(content)

    def _reports(self) -> list[tuple[int, list[bool] | int]]:
        numbers = list(self._loads)
        handled = self.agree([len(self._loads[number].ok) for number in numbers]) if numbers else []
        reports: list[tuple[int, list[bool] | int]] = []
        for number, count in zip(numbers, handled):
            load = self._loads[number]
            if count < len(load.keys):
                reports.append((number, count))
                continue
            reports.append((number, [bool(ok) for ok in self.agree([int(ok) for ok in load.ok])]))
            del self._loads[number]
            self._load_sizes.append(load.size)
        return reports

    def cancel(self, number: int) -> None:
        """Stop a load: its blocks are not written from now on."""
        if load := self._loads.pop(number, None):
            load.cancelled = True

    def _read_jobs(self) -> None:
        while (load := self._jobs.get()) is not None:
            for key in load.keys:
                with self._lock:
                    self._lock.wait_for(lambda load=load: self._ahead < READ_AHEAD_BYTES or load.cancelled)
                if load.cancelled:
                    break
                content = self._read_one(key)
                with self._lock:
                    self._ahead += len(content or b"")
                self._read.put((load, content))

    def _read_one(self, key: bytes) -> bytes | None:
        start = time.monotonic()
        if self.ram is not None and (content := self.ram.read(key)) is not None:
            tier = IN_RAM
        else:
            content, tier = self.disk.read(key) if self.disk else None, ON_DISK
        if content is not None:
            seconds, counts = time.monotonic() - start, self.tier_counts
            for what, value in (("bytes", len(content)), ("blocks", 1), ("seconds", seconds)):
                counts[f"{TIERS[tier]}_read_{what}"] += value
        return content

    # ---- both

    def remove(self, keys: list[bytes]) -> None:
        """Forget these blocks in both tiers."""
        for tier in (self.ram, self.disk):
            if tier is not None:
                tier.remove(keys)

    def clear(self) -> None:
        """Forget every block of this model in both tiers."""
        for tier in (self.ram, self.disk):
            if tier is not None:
                tier.clear()
                if tier.changes is not None:
                    tier.changes.clear()

    def watch(self) -> None:
        """From now on `stats` tells which blocks came and left."""
        for tier in (self.ram, self.disk):
            if tier is not None:
                tier.changes = deque()

    def _changes(self) -> list[tuple[str, bytes, bool]]:
        """(tier, key, whether it is there now) since the last call. The writer of the disk adds to them meanwhile."""
        found = []
        for name, tier in (("ram", self.ram), ("disk", self.disk)):
            while tier is not None and tier.changes:
                found.append((name, *tier.changes.popleft()))
        return found

    def stop(self) -> None:
        self._jobs.put(None)
        if self.disk is not None:
            self.disk.stop()

    def stats(self, take: bool = True) -> TierReport:
        """The contents and traffic of this rank. Sizes and changes are those since the last call with `take`."""
        used, counts = {}, asdict(self.counts) | self.tier_counts
        counts["load_time"] += counts["ram_read_seconds"] + counts["disk_read_seconds"]
        if self.ram is not None:
            used["ram"] = self.ram.used
            counts |= {"ram_written_bytes": self.ram.added, "ram_evicted": self.ram.num_evicted}
        if (disk := self.disk) is not None:
            used["disk"] = disk.used
            counts |= {"disk_written_bytes": disk.written, "disk_written_seconds": disk.seconds_writing}
            counts |= {"disk_evicted": disk.num_evicted, "disk_damaged": disk.num_damaged}
        report = TierReport(used, counts, self._store_sizes, self._load_sizes, self._changes() if take else [])
        if take:
            self._store_sizes, self._load_sizes = [], []
        return report
