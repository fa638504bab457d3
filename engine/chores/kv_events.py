"""KV events for routers, sent after each turn that has some."""

from __future__ import annotations

import math

from quire.configs.config import CacheConfig
from quire.configs.kv_events import read_kv_events
from quire.engine.chores.base import Chore
from quire.engine.kv.events import KVEventLog
from quire.engine.kv.manager import KVCacheManager
from quire.engine.kv.publisher import KVEventPublisher
from quire.engine.kv.tiers import Tiers

LEFT_POOLS = 4  # departed blocks whose tokens stay known, in multiples of the pool's size


class PublishKVEvents(Chore):
    def __init__(self, log: KVEventLog, publisher: KVEventPublisher):
        self._log, self._publisher = log, publisher

    @property
    def source(self) -> dict[str, object]:
        """Return where events are published, with vLLM's keys."""
        return self._publisher.source

    def due(self, idle: bool) -> float:
        return 0.0 if self._log.has_events else math.inf

    def run(self, now: float, idle: bool) -> None:
        self._publisher.publish(self._log.take())

    def stop(self) -> None:
        self._publisher.stop()


def publish_kv_events(
    config: CacheConfig, kv: KVCacheManager, tiers: Tiers | None, index: int
) -> PublishKVEvents | None:
    """Begin to log the events of engine `index`, if the settings ask for it. Raises ValueError for an address that
    cannot be used.
    """
    settings = read_kv_events(config.kv_events_config) if config.kv_events_config else None
    if settings is None or not kv.enable_prefix_caching:
        return None
    num_left = LEFT_POOLS * (kv.pool.num_usable + kv.pool.num_states) if tiers is not None else 0
    log = KVEventLog(kv.block_size, kv.groups, num_left)
    kv.pool.observe(log)
    if tiers is not None:
        tiers.events = log
        tiers.calls.watch()
    return PublishKVEvents(log, KVEventPublisher(settings, index))
