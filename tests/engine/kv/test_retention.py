"""Conversations that clients asked to keep: reused after all others, within a quota, until their time is over."""

from __future__ import annotations

import random

import pytest

from quire.engine.messages import AddRequest, CalledTools, Choice, SamplingParams
from quire.engine.request import Request
from tests.helpers.engine.harness import Engine, fake_config


@pytest.fixture
def engine() -> Engine:
    return Engine(fake_config(num_gpu_blocks_override=64, block_size=4, max_num_seqs=4))


def ask(engine: Engine, name: str, prompt: list[int], key: str | None = None, seconds: float = 600.0) -> int:
    message = AddRequest(name, prompt, SamplingParams(max_tokens=2), cache_key=key, cache_seconds=seconds)
    engine.put(message)
    engine.run()
    return next(o.counts.cached for o in engine.outputs[b"server", name] if o.new_token_ids)


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
    assert retention.free("mine") and retention.free("mine") is None
    assert ask(engine, "d", prompt) == 0
    engine.assert_at_rest()


def test_a_key_keeps_a_part_of_the_pool_only(engine):
    ask(engine, "a", list(range(1, 160)), "mine")
    assert len(engine.scheduler.kv.pool.kept) == 63 // 4
    traffic(engine, "other")
    assert ask(engine, "b", list(range(1, 160))) == 60
    assert engine.scheduler.contents.free_key("mine")  # also what is beyond the quota
    assert ask(engine, "c", list(range(1, 160))) == 0
    engine.assert_at_rest()


def end(engine: Engine, name: str, prompt: list[int], *, tools: bool = False, key: str | None = None) -> None:
    sampling = SamplingParams(max_tokens=2)
    engine.put(AddRequest(name, prompt, sampling, cache_key=key, cache_seconds=600.0, may_call_tools=True))
    engine.run()
    if tools:
        engine.put(CalledTools([name]))
        engine.turn()


@pytest.mark.parametrize("key", [None, "t/mine"])
def test_after_tool_calls_blocks_are_kept_before_those_after_a_stop(engine, key):
    calling, stopping = list(range(1, 34)), list(range(200, 233))
    end(engine, "a", calling, tools=True, key=key)
    end(engine, "b", stopping, key=key and "t/other")
    for i in range(5):
        ask(engine, f"other {i}", [100 + i] * 80, key and f"t/{i}")
    assert (ask(engine, "c", calling), ask(engine, "d", stopping)) == (32, 0)
    engine.assert_at_rest()


def test_the_results_of_tools_end_it_unless_tools_are_called_again(engine):
    prompt, retention, kept = list(range(1, 34)), engine.scheduler.kv.retention, engine.scheduler.kv.pool.kept
    end(engine, "a", prompt, tools=True)
    assert set(kept.values()) == {1} and len(kept) == 8
    end(engine, "b", [*prompt, *range(300, 310)])
    assert not kept and not retention._keys and not retention._holders
    end(engine, "c", prompt, tools=True, key="t/mine")
    assert set(kept.values()) == {3}
    end(engine, "d", prompt, key="t/mine")
    assert set(kept.values()) == {2}
    engine.put(CalledTools(["d", "never seen", "c"]))
    engine.run()
    assert set(kept.values()) == {3}


def test_a_hint_without_a_name_is_of_the_conversations_that_begin_alike(engine):
    begin = list(range(1, 20))
    for i in range(8):
        ask(engine, f"a{i}", [*begin, *[500 + i] * 20], "t/")
    (entry,) = engine.scheduler.kv.retention._keys.values()
    assert len(entry.hashes) == len(engine.scheduler.kv.pool.kept) == 63 // 4
    ask(engine, "other", [700] * 30, "u/")
    assert len(engine.scheduler.kv.retention._keys) == 2


def test_blocks_that_were_found_again_outlive_others_for_one_pool(engine):
    """A prefix that is reused stays while blocks that are seen once pass by, but not for ever."""
    prompt = list(range(1, 42))
    for round_of_pools, expected in ((1.2, 40), (2.5, 0)):
        ask(engine, f"a{expected}", prompt)
        ask(engine, f"b{expected}", prompt)
        for i in range(int(round_of_pools * 3)):
            ask(engine, f"{expected} {i}", [100 + i + expected] * 84)
        assert ask(engine, f"c{expected}", prompt) == expected


@pytest.mark.parametrize("seed", [0, 1, 2, 4])
def test_a_block_is_never_reused_before_those_that_continue_it(engine, seed):
    """Of every conversation what is left is a beginning of it."""
    chance, pool = random.Random(seed), engine.scheduler.kv.pool
    talks = [[chance.randrange(900) for _ in range(60)] for _ in range(8)]
    for i in range(60):
        prompt = chance.choice(talks)[: chance.randrange(8, 60)]
        key = chance.choice([None, None, "t/x", "t/"])
        end(engine, f"r{i}", prompt, tools=chance.random() < 0.3, key=key)
        for talk in talks:
            probe = Request(AddRequest("p", talk, SamplingParams()), Choice("p", 0), b"", 0, 0, 0.0, 4096, False)
            engine.scheduler.kv.hashes.extend(probe, 15)
            found = [pool.find(b"\0" + one) is not None for one in probe.block_hashes]
            assert found == sorted(found, reverse=True)
    engine.assert_at_rest()
