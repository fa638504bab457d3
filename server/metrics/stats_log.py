"""Logs the engine's throughput every few seconds, in vLLM's format, which people grep for."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque

from quire.engine.messages import EngineStats

logger = logging.getLogger("quire.stats")

_HIT_RATE_WINDOW = 1000  # number of messages with prefix lookups in the hit rate


class StatsLog:
    """Gathers statistics; `run` logs them every `interval` seconds: as info while there is work (and once after), as
    debug while idle.
    """

    def __init__(self, interval: float, device: str = "cpu", engine: int = 0):
        self._engine = engine
        self._interval = interval
        self._device = "GPU" if device.startswith("cuda") else "CPU"
        self._stats = EngineStats()
        self._lookups: deque[tuple[int, int]] = deque(maxlen=_HIT_RATE_WINDOW)
        self._was_idle = True
        self._start(time.monotonic())

    def _start(self, now: float) -> None:
        self._since = now
        self._num_prompt = self._num_generation = self._num_preemptions = 0
        self._num_draft_tokens = self._num_accepted = 0

    def observe(self, stats: EngineStats) -> None:
        self._stats = stats
        self._num_prompt += stats.num_prompt_tokens
        self._num_generation += stats.num_generation_tokens
        self._num_preemptions += stats.num_preemptions
        self._num_draft_tokens += stats.num_draft_tokens
        self._num_accepted += sum(stats.accepted_per_position)
        if stats.prefix_cache_queries:
            self._lookups.append((stats.prefix_cache_queries, stats.prefix_cache_hits))

    async def run(self) -> None:
        """Log until cancelled; return at once if the interval is 0."""
        while self._interval > 0:
            await asyncio.sleep(self._interval)
            self.log(time.monotonic())

    def log(self, now: float) -> None:
        """Log one line about the time since the last one. `now` is time.monotonic()."""
        elapsed = max(now - self._since, 1e-9)
        stats, was_idle = self._stats, self._was_idle
        self._was_idle = not (self._num_prompt or self._num_generation or stats.num_running or stats.num_waiting)
        parts = [
            f"Avg prompt throughput: {self._num_prompt / elapsed:.1f} tokens/s",
            f"Avg generation throughput: {self._num_generation / elapsed:.1f} tokens/s",
            f"Running: {stats.num_running} reqs",
            f"Waiting: {stats.num_waiting} reqs",
        ]
        if self._num_preemptions:
            parts.append(f"Preemptions: {self._num_preemptions}")
        parts.append(f"{self._device} KV cache usage: {100 * stats.kv_cache_usage:.1f}%")
        if self._lookups:
            queries, hits = map(sum, zip(*self._lookups))
            parts.append(f"Prefix cache hit rate: {100 * hits / queries:.1f}%")
        if self._num_draft_tokens:
            rate = 100 * self._num_accepted / self._num_draft_tokens
            parts.append(f"Draft acceptance rate: {rate:.1f}% of {self._num_draft_tokens} tokens")
        logger.log(
            logging.DEBUG if was_idle and self._was_idle else logging.INFO,
            "Engine %03d: %s",
            self._engine,
            ", ".join(parts),
        )
        self._start(now)
