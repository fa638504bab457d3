"""The metrics of the last hour, which the page at `/` draws: readings of those that its plots need."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import zlib
from collections import deque
from collections.abc import Awaitable, Callable

import msgspec

logger = logging.getLogger(__name__)

PERIOD, NUM_READINGS = 20.0, 180  # seconds between readings; an hour
_NAMES = (
    "num_requests_running num_requests_waiting generation_tokens_total prompt_tokens_total kv_cache_usage_perc "
    "prefix_cache_queries_total prefix_cache_hits_total spec_decode_num_draft_tokens_total "
    "spec_decode_num_accepted_tokens_total time_to_first_token_seconds_bucket inter_token_latency_seconds_bucket"
)
_LINE = re.compile(rb"^quire:(?:%b)[{ ].*$" % "|".join(_NAMES.split()).encode(), re.MULTILINE)


class Reading(msgspec.Struct):
    time: float  # seconds since the epoch
    metrics: str  # lines in Prometheus' text format


class History:
    """The readings, compressed: a few kilobytes each."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, bytes]] = deque(maxlen=NUM_READINGS)

    async def run(self, scrape: Callable[[], Awaitable[bytes | None]]) -> None:
        """Read until cancelled. `scrape` returns the metrics, None while there are none; raises TimeoutError."""
        while True:
            try:
                if (text := await scrape()) is not None:
                    self.add(text)
            except TimeoutError:
                logger.debug("the metrics were not read in time")
            await asyncio.sleep(PERIOD)

    def add(self, text: bytes) -> None:
        """Keep what the plots need of the metrics."""
        self._readings.append((time.time(), zlib.compress(b"\n".join(_LINE.findall(text)), 1)))

    def readings(self) -> list[Reading]:
        """Return the oldest first."""
        return [Reading(when, zlib.decompress(packed).decode()) for when, packed in self._readings]
