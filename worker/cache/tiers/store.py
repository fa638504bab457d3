"""The tiers below the pool of one rank, by block id and key: the calls from the engine to a worker.

A key is the tag of a cache group and the chained hash of a block, so it stands for its contents. The engine never sees
contents: it asks which keys are here, has blocks stored before they are reused, and has keys loaded into blocks that it
allocated. Loading has two halves: a thread reads and checks contents, and `poll`, between two steps, copies them into
the blocks, some MiB at a time, so that running requests are not held up.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from quire.worker.cache.tiers.base import Agree, Content, Tier, alone
from quire.worker.messages import TierReport

logger = logging.getLogger(__name__)

COPY_BYTES = 64 << 20  # bytes that one poll copies into blocks
READ_AHEAD_BYTES = 256 << 20  # bytes that were read and not copied yet


@dataclass(slots=True, eq=False)
class _Load:
    keys: list[bytes]
    block_ids: list[int]
    ok: list[bool] = field(default_factory=list)  # for the blocks handled so far
    cancelled: bool = False
    size: int = 0  # bytes copied


@dataclass(slots=True)
class _Counts:
    """Totals of this rank since the start."""

    store_bytes: int = 0  # copied from the pool
    store_time: float = 0.0  # seconds
    load_bytes: int = 0  # copied into the pool
    load_time: float = 0.0  # for reading and copying
    stores_skipped: int = 0  # blocks that no tier had room or time for


class TierStore:
    """Owns `tiers`, in the order of demotion: a block that one evicts is offered to the next. `gather` returns the
    contents of a block, `scatter` writes them, both in the thread that calls this class.
    """

    def __init__(
        self,
        gather: Callable[[int], bytes],
        scatter: Callable[[int, bytes], None],
        tiers: list[Tier],
        agree: Agree = alone,
    ):
        self.gather, self.scatter, self.tiers, self.agree = gather, scatter, tiers, agree
        self.counts = _Counts()
        measured = ("bytes", "blocks", "seconds")
        self.read_counts = {f"{tier.name}_read_{what}": 0.0 for tier in tiers for what in measured}
        # bytes of each transfer since the last `stats`
        self._store_sizes: list[int] = []
        self._load_sizes: list[int] = []
        self._loads: dict[int, _Load] = {}  # by the engine's number
        # queues of loads, one thread each: those that may wait for a slow tier, and the others
        self._jobs: dict[bool, queue.SimpleQueue] = {}
        self._read: queue.SimpleQueue = queue.SimpleQueue()  # (load, content or None)
        self._ahead = 0  # bytes read but not copied
        self._lock = threading.Condition()

    def lookup(self, keys: list[bytes]) -> list[int]:
        """Return the tier of each key: 1 for the last tier, 2 for the one before it ..., 0 for none."""
        found = [0] * len(keys)
        for level, tier in enumerate(reversed(self.tiers), 1):
            found = [level if here else below for here, below in zip(tier.contains(keys), found)]
        return self.agree(found)

    # ---- saving from the pool

    def store(self, blocks: list[tuple[int, bytes]]) -> None:
        """Keep blocks that are about to be reused: in the first tier that takes them."""
        before = self.counts.store_bytes
        for block_id, key in blocks:
            self._offer(key, lambda block_id=block_id: self._gather(block_id))
        self._record_store(before)

    def save(self, blocks: list[tuple[int, bytes, int]]) -> int:
        """Write blocks (id, key, time of last use in ns) that stay in the pool to the first tier that survives the
        process. Returns how many of the first ones every rank has begun to write.
        """
        done, before = 0, self.counts.store_bytes
        first = next(i for i, tier in enumerate(self.tiers) if tier.saves)
        for block_id, key, used in blocks:
            evicted = self.tiers[first].offer(key, lambda block_id=block_id: self._gather(block_id), used)
            if evicted is None:
                break
            self._demote(evicted, first + 1)
            done += 1
        self._record_store(before)
        return self.agree([done])[0]

    def _offer(self, key: bytes, content: Content, first: int = 0) -> None:
        for i, tier in enumerate(self.tiers[first:], first):
            if (evicted := tier.offer(key, content)) is not None:
                self._demote(evicted, i + 1)
                return
        self.counts.stores_skipped += 1

    def _demote(self, blocks: list[tuple[bytes, bytes]], first: int) -> None:
        """Offer blocks that left a tier to those from `first` on."""
        if any(tier.limit for tier in self.tiers[first:]):
            for key, content in blocks:
                self._offer(key, content, first)

    def _gather(self, block_id: int) -> bytes:
        start = time.monotonic()
        content = self.gather(block_id)
        self.counts.store_time += time.monotonic() - start
        self.counts.store_bytes += len(content)
        return content

    def _record_store(self, before: int) -> None:
        if size := self.counts.store_bytes - before:
            self._store_sizes.append(size)

    def flush(self, timeout: float) -> bool:
        """Wait until every tier has kept the blocks that it was given."""
        deadline = time.monotonic() + timeout
        done = [tier.flush(max(deadline - time.monotonic(), 0.0)) for tier in self.tiers]
        return all(done)

    # ---- loading into the pool

    def load(self, number: int, keys: list[bytes], block_ids: list[int]) -> None:
        """Begin to read these keys, which `poll` copies into the blocks."""
        load = self._loads[number] = _Load(keys, block_ids)
        for tier in self.tiers:
            tier.touch(load.keys)
        slow = any(any(tier.contains(keys)) for tier in self.tiers if tier.slow)
        if slow not in self._jobs:
            jobs = self._jobs[slow] = queue.SimpleQueue()
            threading.Thread(target=self._read_jobs, args=(jobs,), name="kv-reader", daemon=True).start()
        self._jobs[slow].put(load)

    def poll(self) -> list[tuple[int, list[bool] | int]]:
        """Copy contents that were read. Returns per load its number and the number of blocks handled or, once all are,
        whether each block holds its key's content on every rank; then the load is over.
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
            load.ok.append(content is not None and self._copy(load, content))
        return self._reports()

    def _copy(self, load: _Load, content: bytes) -> bool:
        """Copy a content into its block. Returns False if its size is not this model's."""
        start = time.monotonic()
        try:
            self.scatter(load.block_ids[len(load.ok)], content)
        except ValueError as error:
            logger.warning("kv cache: a block from lower tiers cannot be used: %s", error)
            return False
        self.counts.load_time += time.monotonic() - start
        self.counts.load_bytes += len(content)
        load.size += len(content)
        return True

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

    def _read_jobs(self, jobs: queue.SimpleQueue) -> None:
        while (load := jobs.get()) is not None:
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
        for tier in self.tiers:
            start = time.monotonic()
            if (content := tier.read(key)) is not None:
                seconds, counts = time.monotonic() - start, self.read_counts
                for what, value in (("bytes", len(content)), ("blocks", 1), ("seconds", seconds)):
                    counts[f"{tier.name}_read_{what}"] += value
                return content
        return None

    # ---- all tiers

    def remove(self, keys: list[bytes]) -> None:
        """Forget these blocks in every tier."""
        for tier in self.tiers:
            tier.remove(keys)

    def clear(self) -> None:
        """Forget every block of this model in every tier."""
        for tier in self.tiers:
            tier.clear()
            if tier.changes is not None:
                tier.changes.clear()

    def watch(self) -> None:
        """Report blocks that enter and leave tiers in later `stats`."""
        for tier in self.tiers:
            tier.changes = deque()

    def _changes(self) -> list[tuple[str, bytes, bool]]:
        """Return (medium, key, whether it is there now) since the last call. The threads of tiers add to them
        meanwhile.
        """
        found = []
        for tier in self.tiers:
            while tier.changes:
                found.append((tier.medium, *tier.changes.popleft()))
        return found

    def stop(self) -> None:
        for jobs in self._jobs.values():
            jobs.put(None)
        for tier in self.tiers:
            tier.stop()

    def stats(self, take: bool = True) -> TierReport:
        """Return the contents and traffic of this rank. Sizes and changes are those since the last call with `take`."""
        used, counts = {}, asdict(self.counts) | self.read_counts
        for tier in self.tiers:
            counts["load_time"] += counts[f"{tier.name}_read_seconds"]
            used[tier.name] = tier.used
            counts |= {f"{tier.name}_{name}": value for name, value in tier.counts().items()}
        report = TierReport(used, counts, self._store_sizes, self._load_sizes, self._changes() if take else [])
        if take:
            self._store_sizes, self._load_sizes = [], []
        return report
