"""Transfers between the pool and the tiers below it, RAM and disk. Workers move the contents
(`worker/cache/tiers/`); here are block ids, keys and counts.

Save: copy a hot block, hit by a second request, when the pool reuses it, and in quiet moments, so that a restart finds
it. A block that was never hit is not saved. Blocks that a step in flight fills wait until it succeeded.

Fetch: load blocks that extend a waiting request's prefix. The request leaves the queue meanwhile, so that others are
scheduled; the blocks are taken from the pool, filled by the workers and published, and then the request is admitted
like any other. Where computing is measured to be faster, or the tier does not answer, it returns to the queue. A
slot file is restored by a fetch for which no request waits.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

from quire.engine.kv.events import KVEventLog
from quire.engine.kv.hot import HotPages
from quire.engine.kv.manager import KVCacheManager
from quire.engine.messages import TierStats
from quire.engine.request import Request
from quire.worker.messages import REMOTE, TierCalls, TierInfo, WorkerReady

logger = logging.getLogger(__name__)

SILENCE = 2.0  # seconds without a loaded block after which a fetch is given up
LONGEST = 30.0  # seconds that a fetch from another server may take if computing was not measured
PAUSE = 30.0  # seconds without fetches after that
MEASURED_TOKENS = 128  # a step with as many tokens measures how fast prompts are computed
WORTHWHILE = 0.05  # seconds: a fetch that takes less is not compared with computing
MEASURE_INTERVAL = 1.0  # seconds between looks at the workers' counts while requests run
SAVED_AT_ONCE = 64  # blocks of one call to the workers


@dataclass(slots=True, eq=False)
class Fetch:
    keys: list[bytes]
    block_ids: list[int]
    owner: Request  # whose prefix the blocks are
    requests: list[Request]  # that wait for them
    started: float
    last_arrival: float  # when the last block arrived
    num_done: int = 0
    num_tokens: int = 0
    of_slot: bool = False  # goes on without a request, as long as it takes
    remote: bool = False  # blocks of another server
    loaded: list[bool] | None = None  # whether each block holds its key's content; None: not known yet


@dataclass(slots=True)
class TierCounts:
    """Totals of blocks in lower tiers since the start."""

    queries: int = 0  # tokens that the pool did not have
    hits: int = 0  # tokens among these that were fetched
    num_fetches: int = 0
    num_failed: int = 0  # blocks that were there and could not be read
    num_recomputed: int = 0  # fetches that were left out because computing is faster
    seconds_fetching: float = 0.0
    reported: tuple[int, int] = (0, 0)  # queries and hits at the last report

    def since_last(self) -> tuple[int, int]:
        """Return queries and hits since the last call."""
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
    """Return the workers' tiers below the pool, if there are any."""
    return Tiers(kv, calls, ready.tiers) if kv.enable_prefix_caching and ready.tiers else None


class Tiers:
    """Owns the blocks of fetches; `Scheduler` owns the requests. `calls` are those of the workers' `TierStore`s."""

    def __init__(self, kv: KVCacheManager, calls: TierCalls, infos: list[TierInfo]):
        self.kv, self.calls, self._infos = kv, calls, infos
        self.keep = any(info.limit for info in infos if info.name != REMOTE)  # whether any takes blocks of the pool
        self.save_hot = any(info.saves for info in infos)
        self.counts = TierCounts()
        self.rates = _Rates()
        self._fetches: dict[int, Fetch] = {}
        self._number = 0
        self._paused_until = 0.0
        self._measured = 0.0  # time.monotonic() of the last look at the workers' counts
        self._totals: dict[str, float] = {}
        self.events: KVEventLog | None = None  # told which blocks lower tiers have
        self._hot = HotPages()
        if self.keep:
            kv.pool.observe(self._hot)

    @property
    def busy(self) -> bool:
        """Return whether blocks are being fetched."""
        return bool(self._fetches)

    @property
    def num_unsaved(self) -> int:
        """Return the number of hot blocks in the pool that no tier has for the next start."""
        return len(self._hot.unsaved) if self.save_hot else 0

    def forget_measured(self) -> None:
        """Forget the counts and durations so far."""
        self.counts, self.rates = TierCounts(), _Rates()

    # ---- statistics

    def stats(self, now: bool) -> TierStats | None:
        """Return the contents and traffic of the workers' tiers since the last call; None shortly after it unless
        `now`.
        """
        if not self.keep or (not now and time.monotonic() - self._measured < MEASURE_INTERVAL):
            return None
        self._measured = time.monotonic()
        found = self.calls.stats()
        if self.events is not None:
            self.events.changed_below(found.changes)
        totals, before = found.counts, self._totals
        self._totals = totals
        counts = {name: value - before.get(name, 0) for name, value in totals.items() if value != before.get(name, 0)}
        return TierStats(found.used, counts, found.store_sizes, found.load_sizes)

    def describe(self) -> dict[str, Any] | None:
        """Return the totals since the start, for display; None if no tier takes blocks that leave the pool."""
        if not self.keep:
            return None
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

    # ---- fetching into the pool

    def begin(self, request: Request, num_free: int, num_free_states: int, unsettled: set[int]) -> bool:
        """Start to fetch blocks that extend the cached prefix of a waiting request, within a limit of free blocks.
        Returns whether the request has to wait.
        """
        remote = request.transfer is not None and bool(request.transfer.blocks)
        if not (remote or (self.keep and time.monotonic() >= self._paused_until)):
            return False
        keys, num_tokens = self.kv.to_fetch(request, self.calls.lookup)
        self.counts.queries += max(request.num_tokens - self.kv.match(request).num_blocks * self.kv.block_size, 0)
        if not keys or (not remote and self._is_faster_to_compute(len(keys), num_tokens)):
            return False
        wanted = set(keys)
        for fetch in self._fetches.values():
            if not fetch.of_slot and not wanted.isdisjoint(fetch.keys):  # another request's, which shares the prefix
                fetch.requests.append(request)
                return True
        states = sum(map(self.kv.is_state_key, keys))
        if len(keys) - states > num_free or (states and states > num_free_states):
            return False
        fetch = self.fetch(request, keys, unsettled)
        fetch.requests, fetch.num_tokens, fetch.remote = [request], num_tokens, remote
        return True

    def fetch(self, owner: Request, keys: list[bytes], unsettled: set[int], of_slot: bool = False) -> Fetch:
        """Start to load keys of a request's prefix into free blocks. The caller has checked that there are as many."""
        ids, now = list(self.kv.allocate_for(keys).values()), time.monotonic()
        self.store_evicted(unsettled)  # before these blocks are filled
        self._number += 1
        self.calls.load(self._number, keys, ids)
        fetch = self._fetches[self._number] = Fetch(keys, ids, owner, [], now, now, of_slot=of_slot)
        return fetch

    def _is_faster_to_compute(self, num_blocks: int, num_tokens: int) -> bool:
        fetching, computing = num_blocks * self.rates.fetched, num_tokens * self.rates.computed
        faster = bool(fetching > WORTHWHILE and computing and fetching > 2 * computing)
        self.counts.num_recomputed += faster
        return faster

    def poll(self) -> list[Request]:
        """Return the requests whose fetches ended since the last call, well or not."""
        if not self._fetches:
            return []
        ended: list[Request] = []
        now = time.monotonic()
        for number, report in self.calls.poll():
            if (fetch := self._fetches.get(number)) is None:
                continue
            if isinstance(report, int):
                if report > fetch.num_done:
                    fetch.num_done, fetch.last_arrival = report, now
                continue
            del self._fetches[number]
            self._publish(fetch, report, now)
            ended += fetch.requests
        for number, fetch in list(self._fetches.items()):
            if fetch.remote and self._is_too_slow(fetch, now):
                logger.warning("kv transfer: %d of %d blocks came; computing", fetch.num_done, len(fetch.keys))
                ended += fetch.requests
                self._end(number)
            elif now - fetch.last_arrival > SILENCE and not fetch.of_slot and not fetch.remote:
                logger.warning("kv cache: no block came for %.0f s; going on without lower tiers for a while", SILENCE)
                self._paused_until = now + PAUSE
                ended += fetch.requests
                self._end(number)
        return ended

    def _is_too_slow(self, fetch: Fetch, now: float) -> bool:
        """Return whether the blocks of another server take too long, at their speed so far. The worker notices a server
        that is silent.
        """
        waited, computing = now - fetch.started, 2 * fetch.num_tokens * self.rates.computed
        whole = waited * len(fetch.keys) / fetch.num_done if fetch.num_done else waited
        return now - fetch.last_arrival > LONGEST or (waited > SILENCE and whole > (computing or LONGEST))

    def _publish(self, fetch: Fetch, ok: list[bool], now: float) -> None:
        pool, fetch.loaded = self.kv.pool, ok
        filled = {key: block_id for key, block_id, good in zip(fetch.keys, fetch.block_ids, ok) if good}
        self.kv.publish_filled(fetch.owner, filled)
        if self.events is not None and self.keep:
            # blocks that an earlier run or another engine stored become known by their use
            levels = zip(filled, self.calls.lookup(list(filled)))
            media = [(self._infos[-level].medium, key) for key, level in levels if level]
            self.events.changed_below([(medium, key, True) for medium, key in media if medium])
        if not fetch.of_slot:
            pool.record_hits([i for i, good in zip(fetch.block_ids, ok) if good and pool.is_published(i)], 0)
            self._count(fetch, ok, now)
        pool.release(fetch.block_ids)

    def _count(self, fetch: Fetch, ok: list[bool], now: float) -> None:
        if not fetch.remote:
            self.rates.fetched = _Rates.mix(self.rates.fetched, (now - fetch.started) / len(fetch.keys))
        self.counts.num_fetches += 1
        self.counts.num_failed += ok.count(False)
        self.counts.hits += fetch.num_tokens if all(ok) else 0
        self.counts.seconds_fetching += now - fetch.started

    def cancel(self, request: Request) -> None:
        """Forget a request that waits for a fetch."""
        for number, fetch in list(self._fetches.items()):
            if request in fetch.requests:
                fetch.requests.remove(request)
                if not fetch.requests and not fetch.of_slot:
                    self._end(number)

    def _end(self, number: int) -> None:
        self.calls.cancel(number)  # the workers write nothing to the blocks from here on
        self.kv.pool.release(self._fetches.pop(number).block_ids)

    def record_step(self, num_tokens: int, seconds: float) -> None:
        """Measure how fast prompts are computed."""
        if num_tokens >= MEASURED_TOKENS:
            self.rates.computed = _Rates.mix(self.rates.computed, seconds / num_tokens)

    # ---- saving from the pool

    def take_evicted(self, unsettled: set[int]) -> list[tuple[int, bytes]]:
        """Return hot blocks that were taken since the last call, whose contents must be stored before they are
        overwritten.
        """
        if not self._hot.evicted:
            return []
        evicted, self._hot.evicted = self._hot.evicted, []
        return [(block_id, key) for block_id, key in evicted if block_id not in unsettled]

    def store_evicted(self, unsettled: set[int]) -> None:
        """Have evicted blocks stored now, not with the next step."""
        if evicted := self.take_evicted(unsettled):
            self.calls.store(evicted)

    def save(self, most: int, unsettled: set[int], only_free: bool) -> int:
        """Have up to `most` hot blocks written for the next start. Returns how many have a copy now or soon."""
        pool, unsaved = self.kv.pool, self._hot.unsaved
        if not self.num_unsaved:
            return 0
        chosen = []
        for block_id, used in unsaved.items():
            if block_id not in unsettled and not (only_free and pool.is_held(block_id)):
                chosen.append((block_id, pool.hash_of(block_id), used))
                if len(chosen) >= most:
                    break
        done = self.calls.save(chosen) if chosen else 0
        for block_id, *_ in chosen[:done]:
            del unsaved[block_id]
        return done

    def remove(self, keys: list[bytes]) -> None:
        """Have the lower tiers forget these blocks."""
        lost = set(keys)
        self._hot.evicted = [(block_id, key) for block_id, key in self._hot.evicted if key not in lost]
        self.calls.remove(keys)

    def clear(self) -> None:
        """Forget the contents of the lower tiers. The pool holds no blocks."""
        self._hot.evicted = []
        self.calls.clear()
        if self.events is not None:
            self.events.cleared()
