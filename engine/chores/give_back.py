"""Returns KV cache memory to the system: that of free blocks while the machine is short of memory, that of all blocks
after a long time without a request.
"""

from __future__ import annotations

import logging
import math

from quire.engine.chores.base import Chore
from quire.engine.kv.manager import KVCacheManager
from quire.worker.messages import WorkerCalls, WorkerReady

logger = logging.getLogger(__name__)

INTERVAL, IDLE_INTERVAL = 1.0, 5.0  # seconds between looks at the machine's memory, with requests and without


class GiveBack(Chore):
    def __init__(self, kv: KVCacheManager, workers: WorkerCalls, ready: WorkerReady):
        self._kv, self._workers = kv, workers
        self._bytes_per_block = max(ready.plan.bytes_per_block, 1)
        self._spare = -(-ready.max_num_batched_tokens // ready.block_size)  # blocks that the next step may take
        self._looked = -math.inf  # time.monotonic()
        self._used_at: float | None = None  # when requests last ran; None: the memory is given back
        self._was_short = False

    def due(self, idle: bool) -> float:
        if idle:
            return math.inf if self._used_at is None else self._looked + IDLE_INTERVAL
        return self._looked + INTERVAL

    def run(self, now: float, idle: bool) -> None:
        self._looked = now
        if idle:
            self._give_all(now - self._used_at)
        else:
            self._used_at = now
            self._give_some()

    def _give_all(self, seconds: float) -> None:
        """Forget cached prefixes and return all memory, if the workers find that it is time after these `seconds`
        without a request.
        """
        if self._workers.wants_memory_back(seconds) and self._kv.reset_prefix_cache():
            self._workers.forget_texts()
            self._workers.give_back()
            self._kv.pool.give_back_all()
            self._used_at = None
            logger.info("idle for %.0f s: gave the memory of the KV cache back", seconds)

    def _give_some(self) -> None:
        """Return the memory of as many free blocks as the machine is short of, that of cached prefixes
        last.
        """
        short = self._workers.memory_short()
        was_short, self._was_short = self._was_short, short > 0
        if short <= 0:
            return
        given = self._kv.pool.give_back(-(-short // self._bytes_per_block), self._spare)
        self._workers.give_back_blocks(given)
        if given and not was_short:
            logger.info("the machine is short of memory: gave back that of %d free blocks of the KV cache", len(given))
