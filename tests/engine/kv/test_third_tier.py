"""A third tier is a class and a line in `TIERS`: here one of compressed blocks between RAM and disk."""

from __future__ import annotations

import zlib
from typing import ClassVar

import pytest

from quire.configs.config import Config
from quire.engine.kv.events import BlockRemoved, BlockStored, KVEventLog
from quire.engine.messages import SamplingParams
from quire.server.metrics.metrics import Metrics
from quire.server.metrics.pool import tier_limits
from quire.server.startup.plan_table import plan_table
from quire.worker.cache.tiers import open as open_module
from quire.worker.cache.tiers.base import Content, Rank, Tier, content_of
from quire.worker.cache.tiers.disk import DiskTier
from quire.worker.cache.tiers.ram import RamTier
from quire.worker.platforms.base import Platform
from tests.helpers.engine.fake_executor import expected_tokens
from tests.helpers.engine.harness import VOCAB, Engine, fake_config

GIB = 1 << 30
PROMPT = list(range(1, 42))


class ArchiveTier(Tier):
    """Compressed blocks, which survive the engine; the oldest go first."""

    name, medium, where, saves = "archive", "REMOTE", "in the archive", True
    archives: ClassVar[dict[bytes, dict[bytes, bytes]]] = {}
    size: ClassVar[int | None] = None

    def __init__(self, limit: int, blocks: dict[bytes, bytes]):
        self.limit, self.used, self._blocks, self._num_evicted = limit, sum(map(len, blocks.values())), blocks, 0

    @classmethod
    def plan(cls, config: Config, platform: Platform) -> int | None:
        return cls.size

    @classmethod
    def open(cls, limit: int, rank: Rank) -> ArchiveTier:
        return cls(limit // rank.num_ranks, cls.archives.setdefault(rank.fingerprint(), {}))

    def contains(self, keys: list[bytes]) -> list[bool]:
        return [key in self._blocks for key in keys]

    def read(self, key: bytes) -> bytes | None:
        return zlib.decompress(self._blocks[key]) if key in self._blocks else None

    def offer(self, key: bytes, content: Content, used: int = 0) -> list[tuple[bytes, bytes]]:
        if key in self._blocks:
            return []
        self._blocks[key] = packed = zlib.compress(content_of(content))
        self._note(key, True)
        self.used += len(packed)
        left = []
        while self.used > self.limit:
            oldest = next(iter(self._blocks))
            left.append((oldest, self.read(oldest)))
            self.remove([oldest])
        self._num_evicted += len(left)
        return left

    def remove(self, keys: list[bytes]) -> None:
        for key in keys:
            if key in self._blocks:
                self.used -= len(self._blocks.pop(key))
                self._note(key, False)

    def clear(self) -> None:
        self._blocks.clear()
        self.used = 0

    def counts(self) -> dict[str, float]:
        return {"evicted": self._num_evicted}

    def _note(self, key: bytes, here: bool) -> None:
        if self.changes is not None:
            self.changes.append((key, here))


@pytest.fixture(autouse=True)
def _third_tier(monkeypatch):
    monkeypatch.setattr(open_module, "TIERS", [RamTier, ArchiveTier, DiskTier])
    monkeypatch.setattr(ArchiveTier, "archives", {})


def engine_of(monkeypatch, archive: int, **settings) -> Engine:
    monkeypatch.setattr(ArchiveTier, "size", archive)
    sizes = {"num_gpu_blocks_override": 32, "block_size": 4, "max_num_seqs": 4, "kv_offload_gib": 200 / GIB}
    return Engine(fake_config(**sizes | settings))


def ask(engine: Engine, name: str, prompt: list[int]) -> int:
    """Run a request, check its text, and return the number of its cached tokens."""
    engine.add(name, prompt, max_tokens=5)
    engine.run()
    assert engine.tokens(name) == expected_tokens(prompt, SamplingParams(max_tokens=5), 4096, VOCAB)
    return next(o.counts.cached for o in engine.outputs[b"server", name] if o.new_token_ids)


def evict(engine: Engine) -> None:
    """Other traffic, several times the pool."""
    for i in range(4):
        ask(engine, f"other {i}", [100 + i] * 90)


@pytest.mark.parametrize("depth", [1, 2])
def test_blocks_go_down_and_come_back(monkeypatch, depth):
    engine = engine_of(monkeypatch, 1 << 20, steps_in_flight=depth)
    for name in "ab":
        ask(engine, name, PROMPT)
    evict(engine)
    assert ask(engine, "c", PROMPT) == 40
    totals = engine.call("describe_tiers")
    assert totals["archive_read_blocks"] > 0 and totals["ram_read_blocks"] + totals["archive_read_blocks"] == 10
    assert totals["used_bytes"]["archive"] == engine.tier("archive").used > 0
    engine.assert_at_rest()


def test_it_is_written_for_the_next_start_and_cleared(monkeypatch):
    engine = engine_of(monkeypatch, 1 << 20)
    for name in "ab":
        ask(engine, name, PROMPT)
    engine.core.stop()
    again = engine_of(monkeypatch, 1 << 20)
    assert ask(again, "c", PROMPT) == 40
    assert again.call("reset_prefix_cache") and ask(again, "d", PROMPT) == 0
    assert ask(engine_of(monkeypatch, 1 << 20), "e", PROMPT) == 0


def test_what_it_evicts_goes_to_the_next(monkeypatch, tmp_path):
    engine = engine_of(monkeypatch, 200, kv_disk=str(tmp_path), kv_disk_gib=0.001)
    for name in "ab":
        ask(engine, name, PROMPT)
    evict(engine)
    assert engine.scheduler.tiers.calls.flush(5.0)
    totals = engine.call("describe_tiers")
    assert totals["archive_evicted"] > 0 and totals["disk_written_bytes"] > 0
    assert ask(engine, "c", PROMPT) == 40
    assert engine.call("describe_tiers")["disk_read_blocks"] > 0


def test_metrics_events_and_the_plan_show_it(monkeypatch):
    engine = engine_of(monkeypatch, 300)
    log = KVEventLog(4, engine.scheduler.kv.groups, num_left=1000)
    engine.scheduler.kv.pool.observe(log)
    engine.scheduler.tiers.events = log
    engine.scheduler.tiers.calls.watch()
    metrics = Metrics("m", 4096)
    metrics.tiers.limits = tier_limits(engine.core.ready.worker)
    flush = engine.scheduler.flush_stats
    engine.scheduler.flush_stats = lambda: (metrics.observe_stats(found := flush()), found)[1]
    for name in "ab":
        ask(engine, name, PROMPT)
    evict(engine)
    ask(engine, "c", PROMPT)
    totals, page = engine.call("describe_tiers"), metrics.render().decode()
    assert 'kv_tier_limit_bytes{engine="0",model_name="m",tier="archive"} 300.0' in page
    assert (
        f'kv_tier_used_bytes{{engine="0",model_name="m",tier="archive"}} {float(totals["used_bytes"]["archive"])}'
        in page
    )
    for name in ("read_blocks", "evicted"):
        assert totals[f"archive_{name}"] > 0
        assert f'kv_tier_{name}_total{{engine="0",model_name="m",tier="archive"}} {totals[f"archive_{name}"]}' in page
    kinds = {(type(event), event.medium) for event in log.take() if hasattr(event, "medium")}
    assert kinds >= {(BlockStored, "REMOTE"), (BlockRemoved, "REMOTE")}
    assert "in the archive, at most: 300 B of blocks" in plan_table(engine.core.ready.worker)
