"""Drafts through scheduler and cache: whatever they are, each request gets the tokens that it gets without."""

from __future__ import annotations

import os
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.worker.messages import SamplingParams, longest_request
from tests.engine.test_scheduler_properties import EOS_CHANCE, MAX_MODEL_LEN, check_outputs, drive, workload
from tests.helpers.engine.fake_executor import expected_tokens
from tests.helpers.engine.harness import CLIENT, VOCAB, Engine, fake_config

configurations = st.fixed_dictionaries(
    {
        "scheduling_policy": st.sampled_from(["fcfs", "priority"]),
        "num_gpu_blocks_override": st.integers(18, 60),
        "block_size": st.sampled_from([1, 2, 4]),
        "max_num_seqs": st.integers(1, 8),
        "max_num_batched_tokens": st.integers(1, 40),
        "long_prefill_token_threshold": st.sampled_from([0, 0, 5]),
        "enable_prefix_caching": st.booleans(),
        "steps_in_flight": st.integers(1, 3),
        "pipeline_parallel_size": st.sampled_from([1, 1, 2]),
    }
)
group_mixes = st.sampled_from(
    ["full", "full", "window:5", "full+window:9", "full+chunk:6", "chunk:4+window:5", "full+state", "state+window:7"]
)


def fake_engine(options: str, **configuration) -> Engine:
    with mock.patch.dict(os.environ, {"FAKE_EXECUTOR": options}):
        engine = Engine(fake_config(**configuration))
    engine.scheduler.flush_stats = engine.scheduler.stats  # keep all counts
    return engine


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [0, 0.2, 1])
@settings(max_examples=25, deadline=None)
@given(configurations, group_mixes, st.integers(1, 7), workload())
def test_any_drafts_give_what_each_request_gets_alone(wrong, configuration, mix, drafts, requests):
    configuration["num_gpu_blocks_override"] *= 1 + mix.count("+")
    options = f"eos_chance={EOS_CHANCE},groups={mix},drafts={drafts},wrong_drafts={wrong}"
    engine = fake_engine(options, max_model_len=str(MAX_MODEL_LEN), **configuration)
    drive(engine, requests)
    num_usable, block_size = configuration["num_gpu_blocks_override"] - 1, configuration["block_size"]
    chunk = configuration["max_num_batched_tokens"]
    limit = longest_request(engine.core.ready.worker.groups, num_usable, block_size, chunk, MAX_MODEL_LEN)
    for i, (_, prompt, sampling, *_, aborted) in enumerate(requests):
        outputs = engine.outputs.get((CLIENT, str(i)), [])
        if aborted is None or (outputs and outputs[-1].finish_reason):
            check_outputs(prompt, sampling, outputs, limit)
        else:
            tokens = [t for output in outputs for t in output.new_token_ids]
            assert tokens == expected_tokens(prompt, sampling, limit, VOCAB, EOS_CHANCE)[: len(tokens)]
    engine.assert_at_rest()


def test_drafts_of_a_step_in_flight_end_with_a_preemption():
    """A request is preempted while a step is in flight that proposes drafts for it. Computed again in chunks of 8, with
    one token left for the last of them, it must not verify the drafts of its former row.
    """
    for turn in range(4, 24):
        engine = fake_engine(
            "drafts=3,wrong_drafts=0.2",
            steps_in_flight=2,
            scheduling_policy="priority",
            max_num_seqs=1,
            max_num_batched_tokens=8,
            enable_prefix_caching=False,
        )
        messages = {"a": engine.add("a", [1, 2, 3], priority=1, max_tokens=60)}
        for _ in range(turn):
            engine.turn()
        messages["b"] = engine.add("b", [4, 5, 6], max_tokens=2)
        engine.run()
        assert engine.last("a").timing.num_preemptions == 1
        for name, message in messages.items():
            assert engine.tokens(name) == expected_tokens(message.prompt_token_ids, message.sampling, 4096, VOCAB)
        engine.assert_at_rest()


def run_one(options: str, **sampling):
    engine = fake_engine(options)
    message = engine.add("a", [1, 2, 3], **sampling)
    steps, execute = 0, engine.core.executor.execute

    def counted(step):
        nonlocal steps
        steps += 1
        return execute(step)

    engine.core.executor.execute = counted
    engine.run()
    assert engine.tokens("a") == expected_tokens([1, 2, 3], message.sampling, 4096, VOCAB)
    engine.assert_at_rest()
    return engine, steps


def test_right_drafts_save_steps_and_are_counted():
    engine, steps = run_one("drafts=3", max_tokens=200)
    counts = engine.scheduler.stats()
    assert steps < 120
    assert counts.num_draft_tokens == sum(counts.accepted_per_position) == 200 - steps > 80
    assert counts.num_generation_tokens == 200 and counts.num_drafts == counts.accepted_per_position[0]
    longest = max(len(output.new_token_ids) for output in engine.outputs[CLIENT, "a"])
    assert longest == 4 == len(counts.accepted_per_position) + 1


def test_wrong_drafts_are_rejected_and_counted():
    engine, steps = run_one("drafts=3,wrong_drafts=1", max_tokens=50)
    counts = engine.scheduler.stats()
    assert counts.num_drafts > 20 and counts.num_draft_tokens > counts.num_drafts and not counts.accepted_per_position
    assert steps >= 50


def test_a_request_without_speculation_has_no_drafts():
    engine, _ = run_one("drafts=3", max_tokens=50, speculation=False)
    assert engine.scheduler.stats().num_drafts == 0


def test_drafts_are_counted():
    plain = run_one("validate=1", max_tokens=60)[0].tokens("a")
    wrong = [(token + 1) % VOCAB for token in plain]
    for prediction, counts in ((plain, (44, 0)), ([], (39, 0)), (wrong, (0, 56 * 3 + 2 + 1))):
        engine, _ = run_one("drafts=3", max_tokens=60, prediction=prediction)
        assert (engine.last("a").counts.accepted, engine.last("a").counts.rejected) == counts


@pytest.mark.parametrize("wrong", [0, 1])
def test_with_several_steps_in_flight_requests_with_drafts_wait_for_them(wrong):
    engine = fake_engine(f"drafts=3,wrong_drafts={wrong}", steps_in_flight=3)
    messages = {name: engine.add(name, [1, 2, 3, number], max_tokens=90) for number, name in enumerate("abc")}
    engine.run()
    for name, message in messages.items():
        prompt = message.prompt_token_ids
        assert engine.tokens(name) == expected_tokens(prompt, message.sampling, 4096, VOCAB)
    counts = engine.scheduler.stats()
    assert counts.num_drafts > 30 and bool(counts.accepted_per_position) == (not wrong)
    engine.assert_at_rest()


@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_max_tokens_cuts_inside_drafts(max_tokens):
    engine, _ = run_one("drafts=5", max_tokens=max_tokens)
    assert engine.last("a").finish_reason == "length"


def test_a_stop_token_inside_drafts_ends_the_output():
    plain = run_one("validate=1", max_tokens=60)[0].tokens("a")
    for stop in plain[3:40:5]:
        engine, _ = run_one("drafts=5", max_tokens=60, stop_token_ids=[stop], logprobs=1)
        assert engine.tokens("a") == plain[: plain.index(stop) + 1] and engine.last("a").finish_reason == "stop"
        outputs = engine.outputs[CLIENT, "a"]
        assert all(len(output.logprobs) == len(output.new_token_ids) for output in outputs)


def test_prefixes_of_accepted_tokens_are_shared():
    """A later prompt that repeats prompt and output finds their full blocks, and only right contents: the fake checks
    every slot that it reads.
    """
    for wrong in (0, 0.3, 1):
        engine = fake_engine(f"drafts=5,wrong_drafts={wrong}", block_size=4)
        engine.add("a", [1, 2, 3], max_tokens=40)
        engine.run()
        text = [1, 2, 3, *engine.tokens("a")]
        engine.add("b", text, max_tokens=10)
        engine.run()
        assert engine.last("b").counts.cached == 40
        assert engine.tokens("b") == expected_tokens(text, SamplingParams(max_tokens=10), 4096, VOCAB)
