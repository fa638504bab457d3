"""Conversations that clients asked to keep: reused after all others, within a quota, until their time is over."""

from __future__ import annotations

import pytest

from quire.engine.messages import AddRequest, SamplingParams
from tests.engine.harness import Engine, fake_config


@pytest.fixture
def engine() -> Engine:
    return Engine(fake_config(num_gpu_blocks_override=64, block_size=4, max_num_seqs=4))


def ask(engine: Engine, name: str, prompt: list[int], key: str | None = None, seconds: float = 600.0) -> int:
    message = AddRequest(name, prompt, SamplingParams(max_tokens=2), cache_key=key, cache_seconds=seconds)
    engine.put(message)
    engine.run()
    return next(o.num_cached_tokens for o in engine.outputs[b"server", name] if o.new_token_ids)


def traffic(engine: Engine, name: str) -> None:
    for i in range(5):
        ask(engine, f"{name} {i}", [100 + i] * 80)


@pytest.mark.parametrize("key", [None, "mine"])
def test_other_traffic_evicts_what_nobody_asked_to_keep(engine, key):
    prompt = list(range(1, 42))
    ask(engine, "a", prompt, key)
    traffic(engine, "other")
    assert ask(engine, "b", prompt) == (40 if key else 0)
    engine.assert_at_rest()


def test_time_and_delete_end_it(engine):
    prompt, retention = list(range(1, 42)), engine.scheduler.kv.retention
    ask(engine, "a", prompt, "mine", seconds=0.0)
    traffic(engine, "other")
    assert ask(engine, "b", prompt) == 0
    ask(engine, "c", prompt, "mine")
    assert retention.free("mine") and not retention.free("mine")
    assert ask(engine, "d", prompt) == 0
    engine.assert_at_rest()


def test_a_key_keeps_a_part_of_the_pool_only(engine):
    ask(engine, "a", list(range(1, 160)), "mine")
    assert len(engine.scheduler.kv.pool._kept) == 63 // 4
    traffic(engine, "other")
    assert ask(engine, "b", list(range(1, 160))) == 60
    engine.assert_at_rest()
