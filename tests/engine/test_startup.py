"""The warm-up of a device that compiles at first use, over the fake executor."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest

from quire.engine.executor.base import get_executor
from quire.engine.messages import AddRequest, PoolingInfo
from quire.engine.scheduler import Scheduler
from quire.engine.startup import _kinds, make_scheduler, warm_up
from quire.engine.validation import check_request
from tests.helpers.engine.harness import Engine, fake_config

SMALL = dict(max_num_seqs=4, num_gpu_blocks_override=64, max_num_batched_tokens=64)


@pytest.mark.parametrize("max_model_len", [32, 1 << 20, 1 << 30])
@pytest.mark.parametrize("info", [None, PoolingInfo(["embed"], "mean", 8)], ids=["text", "vectors, too"])
def test_requests_of_every_kind_are_valid_whatever_the_context(max_model_len, info):
    for kind in _kinds(info, []):
        check_request(AddRequest("a", [0] * 20, kind.sampling, pooling=kind.pooling), max_model_len, 1000, info)


@pytest.mark.parametrize("max_model_len", [2, 3, 5, 40])
def test_a_short_context_is_warmed_up(max_model_len):
    scheduler, executor = made(max_model_len=str(max_model_len), **SMALL)
    warm_up(scheduler, executor, compiles_at_use=True)
    assert not scheduler.requests and not scheduler.kv.usage


def test_progress_is_reported_between_runs():
    scheduler, executor = made(max_model_len="100", **SMALL)
    reported: list[tuple[int, float]] = []
    warm_up(scheduler, executor, True, lambda fraction: reported.append((executor.num_steps, fraction)))
    steps, fractions = zip(*reported)
    assert list(fractions) == sorted(set(fractions)) and fractions[-1] == 1.0 and len(fractions) > 40
    assert all(0 < b - a < 20 for a, b in pairwise(steps[:-1])), "a run is short"


def test_measured_durations_are_forgotten():
    """The first ones are those of compilers."""
    scheduler, executor = made(max_model_len="600", max_num_batched_tokens=512, num_gpu_blocks_override=400)
    warm_up(scheduler, executor, compiles_at_use=True)
    budget = scheduler.budget
    assert all(budget.tempo.limit(count, 1 << 20) == 1 << 20 for count in (1, 4, 64))
    budget.pace.record_request("a")
    assert budget.pace.limit(1 << 20) == 1 << 20, "the request before was of another tenant"


def test_the_disk_has_nothing_for_the_warm_up_and_gets_nothing_of_it(tmp_path):
    settings = dict(block_size=4, kv_disk=str(tmp_path), kv_disk_gib=0.01, kv_offload_gib=0.01)
    first = Engine(fake_config(max_model_len="200", **SMALL | settings))
    for name in "ab":  # found by another request, hence saved
        first.add(name, [0] * 60, max_tokens=2)
        first.run()
    first.core.stop()
    first.core.executor.shutdown()
    engine = Engine(fake_config(max_model_len="200", **SMALL | settings))
    tiers = engine.scheduler.tiers
    saved = tiers.describe()["used_bytes"]["disk"]
    warm_up(engine.scheduler, engine.core.executor, compiles_at_use=True)
    counts = tiers.describe()
    assert counts["used_bytes"] == {"ram": 0, "disk": saved} and saved > 0
    assert counts["store_bytes"] == counts["stores_skipped"] == counts["load_bytes"] == counts["queried_tokens"] == 0
    engine.core.executor.shutdown()


def test_a_request_that_does_not_end_ends_the_start(monkeypatch):
    scheduler, executor = made(max_model_len="40", **SMALL)
    monkeypatch.setattr(scheduler, "schedule", lambda: None)
    with pytest.raises(RuntimeError, match="a request of the warm-up did not end"):
        warm_up(scheduler, executor)


def made(**settings) -> tuple[Scheduler, object]:
    config = fake_config(**settings)
    executor = get_executor(config)
    ready = msgspec.structs.replace(executor.initialize(lambda phase, fraction: None), overlaps=True)
    return make_scheduler(config, ready, executor), executor
