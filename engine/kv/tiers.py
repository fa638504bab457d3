"""Transfers between the pool and the tiers below it, RAM and disk. Workers move the contents
(`worker/cache/tiers/`); here are block ids, keys and counts.

Down goes a hot block, one that another request than its own found: when the pool reuses it, and in quiet moments, so
that a restart finds it. A block that was seen once and never hit goes nowhere. Blocks that a step in flight fills wait
until it succeeded.

Up comes what makes the cached prefix of a waiting request longer. The request leaves the queue meanwhile, so that
others are scheduled; the blocks are taken from the pool, filled by the workers and published, and then the request is
admitted like any other. Where computing is measured to be faster, or the disk does not answer, it just returns to the
queue.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

from quire.engine.kv.manager import KVCacheManager
from quire.engine.messages import TierStats
from quire.engine.request import Request
from quire.worker.messages import TierCalls, WorkerReady

logger = logging.getLogger(__name__)

_NAMES = {1: "disk", 2: "ram"}  # of the numbers that `lookup` returns
SILENCE = 2.0  # seconds without a loaded block after which a fetch is given up
PAUSE = 30.0  # seconds without fetches after that
MEASURED_TOKENS = 128  # a step with as many tokens measures how fast prompts are computed
WORTHWHILE = 0.05  # seconds: a fetch that takes less is not compared with computing
MEASURE_INTERVAL = 1.0  # seconds between looks at the workers' counts while requests run
SAVED_AT_ONCE = 64  # blocks of one call to the workers


@dataclass(slots=True, eq=False)
class _Fetch:
    keys: list[bytes]
    block_ids: list[int]
    owner: Request  # whose prefix the blocks are
    requests: list[Request]  # that wait for them
    started: float
    heard: float  # when the last block arrived
    num_done: int = 0
    num_tokens: int = 0


@dataclass(slots=True)
class TierCounts:
    """Totals since the start."""

    queries: int = 0  # tokens that the pool did not have
    hits: int = 0  # tokens of them that were fetched
    num_fetches: int = 0
    num_failed: int = 0  # blocks that were there and could not be read
    num_recomputed: int = 0  # fetches that were left out because computing is faster
    seconds_fetching: float = 0.0
    reported: tuple[int, int] = (0, 0)  # queries and hits

    def since_last(self) -> tuple[int, int]:
        """Queries and hits since the last call."""
        before, self.reported = self.reported, (self.queries, self.hits)
        return self.queries - before[0], self.hits - before[1]


@dataclass(slots=True)
class _Rates:
    """Measured seconds per block fetched, and per token computed; 0: unknown."""

    fetched: float = 0.0
    computed: float = 0.0

    @staticmethod
    def mix(old: float, new: float) -> float:
        return new if not old else 0.8 * old + 0.2 * new


def tiers_below(kv: KVCacheManager, ready: WorkerReady, calls: TierCalls) -> Tiers | None:
    """The workers' tiers below the pool, if there are any."""
    if not kv.enable_prefix_caching or not (ready.offload_bytes or ready.disk_bytes):
        return None
    return Tiers(kv, calls, bool(ready.disk_bytes))


class Tiers:
    """Owns the blocks of fetches; `Scheduler` owns the requests. `calls` are those of the workers' `TierStore`s."""

    def __init__(self, kv: KVCacheManager, calls: TierCalls, has_disk: bool):
        self.kv, self.calls, self.has_disk = kv, calls, has_disk
        self.counts = TierCounts()
        self.rates = _Rates()
        self._fetches: dict[int, _Fetch] = {}
        self._number = 0
        self._paused_until = 0.0
        self._measured = 0.0  # time.monotonic() of the last look at the workers' counts
        self._totals: dict[str, float] = {}
        kv.pool.evicted = []

    @property
    def busy(self) -> bool:
        """Whether blocks are being fetched."""
        return bool(self._fetches)

    @property
    def num_unsaved(self) -> int:
        """Number of hot blocks in the pool of which the disk has no copy."""
        return len(self.kv.pool.unsaved) if self.has_disk else 0

    # ---- seen

    def stats(self, now: bool) -> TierStats | None:
        """Contents and traffic of the workers' tiers since the last call; None shortly after it unless `now`."""
        if not now and time.monotonic() - self._measured < MEASURE_INTERVAL:
            return None
        self._measured = time.monotonic()
        found = self.calls.stats()
        if self.kv.pool.events is not None:
            self.kv.pool.events.changed_below(found.changes)
        totals, before = found.counts, self._totals
        self._totals = totals
        counts = {name: value - before.get(name, 0) for name, value in totals.items() if value != before.get(name, 0)}
        return TierStats(found.used, counts, found.store_sizes, found.load_sizes)

    def describe(self) -> dict[str, Any]:
        """The totals since the start, for a person."""
        found, counts = self.calls.stats(False), self.counts
        fetches = {
            "queried_tokens": counts.queries,
            "hit_tokens": counts.hits,
            "fetches": counts.num_fetches,
            "failed_blocks": counts.num_failed,
            "recomputed": counts.num_recomputed,
            "fetch_seconds": counts.seconds_fetching,
            "seconds_per_block_fetched": self.rates.fetched,
            "seconds_per_token_computed": self.rates.computed,
        }
        return {"used_bytes": found.used} | found.counts | fetches

    # ---- up

    def begin(self, request: Request, num_free: int, num_free_states: int, unsettled: set[int]) -> bool:
        """Start to fetch what lengthens the cached prefix of a waiting request, with at most so many free blocks.
        Returns whether the request has to wait for it.
        """
        if time.monotonic() < self._paused_until:
            return False
        keys, num_tokens = self.kv.to_fetch(request, self.calls.lookup)
        self.counts.queries += max(request.num_tokens - self.kv.match(request).num_blocks * self.kv.block_size, 0)
        if not keys or self._is_faster_to_compute(len(keys), num_tokens):
            return False
        wanted = set(keys)
        for fetch in self._fetches.values():
            if not wanted.isdisjoint(fetch.keys):  # another request's, which shares the prefix
                fetch.requests.append(request)
                return True
        states = sum(map(self.kv.is_state_key, keys))
        if len(keys) - states > num_free or (states and states > num_free_states):
            return False
        ids = list(self.kv.take_for(keys).values())
        self.store_evicted(unsettled)  # before these blocks are filled
        self._number += 1
        self.calls.load(self._number, keys, ids)
        now = time.monotonic()
        self._fetches[self._number] = _Fetch(keys, ids, request, [request], now, now, num_tokens=num_tokens)
        return True

    def _is_faster_to_compute(self, num_blocks: int, num_tokens: int) -> bool:
        fetching, computing = num_blocks * self.rates.fetched, num_tokens * self.rates.computed
        faster = bool(fetching > WORTHWHILE and computing and fetching > 2 * computing)
        self.counts.num_recomputed += faster
        return faster

    def poll(self) -> list[Request]:
        """Requests whose fetches ended since the last call, well or not."""
        if not self._fetches:
            return []
        ended: list[Request] = []
        now = time.monotonic()
        for number, report in self.calls.poll():
            if (fetch := self._fetches.get(number)) is None:
                continue
            if isinstance(report, int):
                if report > fetch.num_done:
                    fetch.num_done, fetch.heard = report, now
                continue
            del self._fetches[number]
            self._publish(fetch, report, now)
            ended += fetch.requests
        for number, fetch in list(self._fetches.items()):
            if now - fetch.heard > SILENCE:
                logger.warning("kv cache: no block came for %.0f s; going on without lower tiers for a while", SILENCE)
                self._paused_until = now + PAUSE
                ended += fetch.requests
                self._end(number)
        return ended

    def _publish(self, fetch: _Fetch, ok: list[bool], now: float) -> None:
        pool = self.kv.pool
        filled = {key: block_id for key, block_id, good in zip(fetch.keys, fetch.block_ids, ok) if good}
        self.kv.publish_filled(fetch.owner, filled)
        if pool.events is not None:  # what an earlier run or another engine stored becomes known by its use
            tiers = zip(filled, self.calls.lookup(list(filled)))
            pool.events.changed_below([(_NAMES[tier], key, True) for key, tier in tiers if tier])
        pool.note_hits([i for i, good in zip(fetch.block_ids, ok) if good and pool.is_published(i)], 0)
        pool.release(fetch.block_ids)
        self.rates.fetched = _Rates.mix(self.rates.fetched, (now - fetch.started) / len(fetch.keys))
        self.counts.num_fetches += 1
        self.counts.num_failed += ok.count(False)
        self.counts.hits += fetch.num_tokens if all(ok) else 0
        self.counts.seconds_fetching += now - fetch.started

    def cancel(self, request: Request) -> None:
        """A request that waits for a fetch is over."""
        for number, fetch in list(self._fetches.items()):
            if request in fetch.requests:
                fetch.requests.remove(request)
                if not fetch.requests:
                    self._end(number)

    def _end(self, number: int) -> None:
        self.calls.cancel(number)  # the workers write nothing to the blocks from here on
        self.kv.pool.release(self._fetches.pop(number).block_ids)

    def note_step(self, num_tokens: int, seconds: float) -> None:
        """Measure how fast prompts are computed."""
        if num_tokens >= MEASURED_TOKENS:
            self.rates.computed = _Rates.mix(self.rates.computed, seconds / num_tokens)

    # ---- down

    def take_evicted(self, unsettled: set[int]) -> list[tuple[int, bytes]]:
        """Hot blocks that were taken since the last call, whose contents must be stored before they are overwritten."""
        evicted, self.kv.pool.evicted = self.kv.pool.evicted, []
        return [(block_id, key) for block_id, key in evicted if block_id not in unsettled]

    def store_evicted(self, unsettled: set[int]) -> None:
        """Have them stored now, and not with the next step."""
        if evicted := self.take_evicted(unsettled):
            self.calls.store(evicted)

    def save(self, most: int, unsettled: set[int], only_free: bool) -> int:
        """Have the disk tier write up to `most` hot blocks. Returns of how many it has a copy now, or soon."""
        pool = self.kv.pool
        if not self.has_disk or not pool.unsaved:
            return 0
        chosen = []
        for block_id, used in pool.unsaved.items():
            if block_id not in unsettled and not (only_free and pool.is_held(block_id)):
                chosen.append((block_id, pool.hash_of(block_id), used))
                if len(chosen) >= most:
                    break
        done = self.calls.save(chosen) if chosen else 0
        for block_id, *_ in chosen[:done]:
            del pool.unsaved[block_id]
        return done

    def remove(self, keys: list[bytes]) -> None:
        """Have the lower tiers forget these blocks."""
        gone = set(keys)
        if self.kv.pool.evicted:
            self.kv.pool.evicted = [(block_id, key) for block_id, key in self.kv.pool.evicted if key not in gone]
        self.calls.remove(keys)

    def clear(self) -> None:
        """Forget what the lower tiers have. The pool holds no blocks."""
        self.kv.pool.evicted = []
        self.calls.clear()
        if self.kv.pool.events is not None:
            self.kv.pool.events.cleared()
