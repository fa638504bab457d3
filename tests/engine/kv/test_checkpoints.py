"""Checkpoints of recurrent states: where a prompt leaves them, in how many steps, and which are reused first."""

from __future__ import annotations

import os
import random
from unittest import mock

import pytest

from tests.engine.test_images import IMAGE, item
from tests.helpers.engine.harness import VOCAB, Engine, fake_config

SIZES = {"max_num_seqs": 2, "max_num_batched_tokens": 8192, "max_model_len": "8192", "num_gpu_blocks_override": 2000}


def engine_with(fake: str = "groups=full+state", **settings) -> Engine:
    with mock.patch.dict(os.environ, {"FAKE_EXECUTOR": fake}):
        return Engine(fake_config(**SIZES | {"block_size": 16} | settings))


def words(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(100, VOCAB), k=count)


def ask(engine: Engine, prompt: list[int], **fields) -> tuple[int, int]:
    """(cached tokens, steps) of a request for one token."""
    name, before = str(len(engine.outputs)), engine.scheduler._num_steps
    engine.add(name, prompt, max_tokens=1, **fields)
    engine.run()
    assert engine.last(name).finish_reason == "length"
    return engine.last(name).counts.cached, engine.scheduler._num_steps - before


def test_a_prompt_is_one_step_and_leaves_a_checkpoint_at_its_end():
    engine, prompt = engine_with(), words(0, 101)
    assert ask(engine, prompt) == (0, 1)
    assert ask(engine, prompt + words(1, 50)) == (96, 1)
    assert ask(engine, prompt + words(1, 50)) == (144, 1)  # and the other prompt's
    assert ask(engine, words(2, 97)) == (0, 1)
    assert ask(engine, words(2, 97)) == (96, 1)  # a checkpoint before the last token only
    engine.assert_at_rest()


@pytest.mark.parametrize(("turn_start", "cached"), [(0, 1024), (1500, 1488), (1504, 1504)])
def test_a_prompt_leaves_checkpoints_before_the_last_turn_and_every_1024_tokens(turn_start, cached):
    engine, prompt = engine_with(), words(0, 2000)
    assert ask(engine, prompt, turn_start=turn_start) == (0, 1)
    assert ask(engine, prompt[:1510] + words(1, 100)) == (cached, 1)
    engine.assert_at_rest()


@pytest.mark.parametrize("groups", ["full+state", "state"])
def test_a_prefix_that_was_seen_twice_is_a_checkpoint(groups):
    engine, system = engine_with(f"groups={groups}"), words(0, 500)
    assert [ask(engine, system + words(seed, 40)) for seed in range(1, 4)] == [(0, 1), (0, 1), (496, 1)]
    engine.assert_at_rest()


def test_a_chunk_leaves_a_checkpoint_at_its_last_block():
    engine, prompt = engine_with(max_num_batched_tokens=203), words(0, 500)
    assert ask(engine, prompt)[0] == 0
    assert ask(engine, prompt[:300] + words(1, 30))[0] == 192
    engine.assert_at_rest()


def test_chunks_that_end_before_images_leave_checkpoints():
    """Of two images only one is encoded in a step."""
    engine = engine_with("images=9:100:20,groups=full+state")
    prompt = words(0, 30) + [IMAGE] * 20 + words(1, 30) + [IMAGE] * 20 + words(2, 30)
    media = [item("a", 30, 20), item("b", 80, 20)]
    assert ask(engine, prompt, media=media) == (0, 2)
    assert ask(engine, prompt[:110] + words(3, 20), media=media)[0] == 80
    assert ask(engine, prompt + words(3, 20), media=media)[0] == 128
    engine.assert_at_rest()


def test_sparse_checkpoints_are_reused_before_others():
    """7 pages: those of five turns survive a long prompt, which keeps one of its own."""
    engine, turns = engine_with(), [words(seed, 100) for seed in range(4)]
    for turn in turns:
        ask(engine, turn)
    long = words(9, 8000)
    assert ask(engine, long) == (0, 1)
    assert [ask(engine, turn + words(8, 9))[0] for turn in turns] == [96] * 4
    engine.assert_at_rest()


def test_two_requests_in_one_step_share_a_prefix():
    engine, prompt = engine_with(), words(0, 200)
    for name in "ab":
        engine.add(name, prompt, max_tokens=1)
    engine.run()
    assert sorted(engine.last(name).counts.cached for name in "ab") == [0, 192]
    engine.assert_at_rest()


def test_a_preempted_request_resumes_from_its_newest_checkpoint():
    engine, prompt = engine_with(), words(0, 100)
    engine.add("a", prompt, max_tokens=80)
    while not engine.scheduler.requests or engine.scheduler.running.first.num_output_tokens < 50:
        engine.turn()
    request, resumed = engine.scheduler.running.first, []
    attach = engine.scheduler.kv.attach
    engine.scheduler.kv.attach = lambda request, match: (attach(request, match), resumed.append(match.num_blocks * 16))
    engine.scheduler._preempt(request)
    engine.run()
    assert resumed == [144] and engine.last("a").timing.num_preemptions == 1
    engine.assert_at_rest()


@pytest.mark.slow
@pytest.mark.parametrize("length", [512, 500])
@pytest.mark.parametrize("most", [1, 2])
def test_two_pages_for_each_request_are_enough(length, most):
    """Prompts of several chunks, at block boundaries, and outputs that pass them."""
    engine = engine_with(max_num_batched_tokens=160, max_num_seqs=most)
    pool = engine.scheduler.kv.pool
    taken = pool.take(pool.num_states - 2 * engine.scheduler.max_running, state=True)
    for turn in range(3):
        for i in range(3):
            engine.add(f"{turn}.{i}", words(i, length), max_tokens=40)
        engine.run()
    last = [engine.last(f"{turn}.{i}") for turn in range(3) for i in range(3)]
    assert {(one.finish_reason, one.timing.num_preemptions) for one in last} == {("length", 0)}
    pool.release(taken)
    engine.assert_at_rest()
