"""Random requests through the real engine loop at several depths: each request gets exactly the outputs that it would
get alone, and no block or row leaks.
"""

from __future__ import annotations

import os
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.messages import SamplingParams
from quire.worker.messages import longest_request
from tests.helpers.engine.fake_executor import expected_tokens
from tests.helpers.engine.harness import CLIENT, VOCAB, Engine, Idle, assert_invariants, fake_config

EOS_CHANCE = 0.05
MAX_MODEL_LEN = 64


@st.composite
def workload(draw):
    """Generate requests as (turn of arrival, prompt, sampling, priority, salt, turn of the abort or None)."""
    stems = draw(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=30), min_size=1, max_size=3))
    requests = []
    for _ in range(draw(st.integers(1, 14))):
        prompt = (draw(st.sampled_from(stems)) + draw(st.lists(st.integers(0, VOCAB - 1), max_size=12)))[
            : MAX_MODEL_LEN - 1
        ]
        sampling = SamplingParams(
            max_tokens=draw(st.integers(0, 40)),
            min_tokens=draw(st.sampled_from([0, 0, 3])),
            seed=draw(st.integers(0, 3)),
            stop_token_ids=draw(st.sampled_from([[], [], list(range(30))])),
            eos_token_ids=[7, 8],
            ignore_eos=draw(st.booleans()),
            logprobs=draw(st.sampled_from([None, None, 2])),
            prompt_logprobs=draw(st.sampled_from([None, None, None, 1])),
        )
        requests.append(
            (
                draw(st.integers(0, 30)),
                prompt,
                sampling,
                draw(st.integers(-1, 1)),
                draw(st.sampled_from([None, "a"])),
                draw(st.one_of(st.none(), st.none(), st.integers(0, 60))),
            )
        )
    return requests


engine_settings = st.fixed_dictionaries(
    {
        "steps_in_flight": st.integers(1, 3),
        "pipeline_parallel_size": st.sampled_from([1, 1, 2, 3]),
        "scheduling_policy": st.sampled_from(["fcfs", "priority"]),
        "num_gpu_blocks_override": st.integers(18, 60),
        "block_size": st.sampled_from([1, 2, 4]),
        "max_num_seqs": st.integers(1, 8),
        "max_num_batched_tokens": st.integers(1, 40),
        "long_prefill_token_threshold": st.sampled_from([0, 0, 5]),
        "enable_prefix_caching": st.booleans(),
    }
)


# The cache groups of the pretended model. The fake executor checks that every position and state that a step reads was
# written, by the same request or with the same tokens.
group_mixes = st.sampled_from(
    [
        "full",
        "full",
        "window:5",
        "full+window:9",
        "full+state",
        "window:3+window:20+full",
        "state",
        "state+window:7+full",
        "full+chunk:6",
        "chunk:4+window:5",
    ]
)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(engine_settings, group_mixes, workload(), st.booleans())
def test_any_schedule_gives_what_each_request_gets_alone(configuration, mix, requests, short_of_memory):
    configuration["num_gpu_blocks_override"] *= 1 + mix.count("+")
    with mock.patch.dict(os.environ, {"FAKE_EXECUTOR": f"eos_chance={EOS_CHANCE},groups={mix}"}):
        engine = Engine(fake_config(max_model_len=str(MAX_MODEL_LEN), **configuration))
    if short_of_memory:
        engine.give_back_in_every_turn(3)
    with mock.patch("quire.engine.chores.give_back.INTERVAL", 0.0):
        messages = drive(engine, requests)
    num_usable, block_size = configuration["num_gpu_blocks_override"] - 1, configuration["block_size"]
    chunk = configuration["max_num_batched_tokens"]
    limit = longest_request(engine.core.ready.worker.groups, num_usable, block_size, chunk, MAX_MODEL_LEN)
    assert mix != "full" or limit == min(MAX_MODEL_LEN, num_usable * block_size)
    for i, (_, prompt, sampling, *_, aborted) in enumerate(requests):
        outputs = engine.outputs.get((CLIENT, str(i)), [])
        if aborted is None or (outputs and outputs[-1].finish_reason):
            check_outputs(prompt, sampling, outputs, limit)
        else:
            tokens = [t for output in outputs for t in output.new_token_ids]
            assert tokens == expected_tokens(prompt, sampling, limit, VOCAB, EOS_CHANCE)[: len(tokens)]
    assert len(messages) == len(requests)
    engine.assert_at_rest()


def drive(engine, requests):
    """Submit the requests and the aborts at their turns, and run to the end."""
    todo = sorted(
        [(turn, i, "add") for i, (turn, *_) in enumerate(requests)]
        + [(a, i, "abort") for i, (*_, a) in enumerate(requests) if a is not None]
    )
    messages, turn = [], 0
    while todo or engine.scheduler.requests or engine.core.in_flight or engine.socket.inbox:
        while todo and todo[0][0] <= turn:
            _, i, what = todo.pop(0)
            _, prompt, sampling, priority, salt, _ = requests[i]
            if what == "abort":
                engine.abort(str(i))
            else:
                messages.append(
                    engine.add(
                        str(i),
                        prompt,
                        priority=priority,
                        cache_salt=salt,
                        background=len(prompt) % 3 == 0,
                        tenant="abc"[i % 3 if len(requests) % 2 else 0],
                        weight=(1.0, 0.1, 5.0)[i % 3],
                        turn_start=i * 7 % len(prompt),
                        **{f: getattr(sampling, f) for f in sampling.__struct_fields__},
                    )
                )
        turn += 1
        try:
            engine.turn()
        except Idle:
            engine.collect()
        assert_invariants(engine)
        assert turn < 20_000
    return messages


def check_outputs(prompt, sampling, outputs, limit):
    """Exactly one finish, at the end; tokens, logprobs, prompt logprobs and reasons as for the request alone."""
    assert [bool(output.finish_reason) for output in outputs] == [False] * (len(outputs) - 1) + [True]
    last = outputs[-1]
    if len(prompt) + min(sampling.max_tokens, 1) > limit:
        assert last.finish_reason == "error" and str(limit) in last.error
        return
    tokens = [t for output in outputs for t in output.new_token_ids]
    assert last.error is None
    assert tokens == expected_tokens(prompt, sampling, limit, VOCAB, EOS_CHANCE)
    stopped_by_eos = (
        len(tokens) > sampling.min_tokens and tokens[-1] in sampling.eos_token_ids and not sampling.ignore_eos
    )
    stopped_by_id = len(tokens) > sampling.min_tokens and tokens[-1] in sampling.stop_token_ids and not stopped_by_eos
    assert last.finish_reason == ("stop" if stopped_by_eos or stopped_by_id else "length")
    assert last.stop_reason == (tokens[-1] if stopped_by_id else None)
    if last.finish_reason == "length":
        assert len(tokens) == sampling.max_tokens or len(prompt) + len(tokens) == limit
    if sampling.logprobs is None:
        assert not any(output.logprobs for output in outputs)
    else:
        entries = [entry for output in outputs for entry in output.logprobs or []]
        assert [entry.token_ids[0] for entry in entries] == tokens and all(
            len(entry.token_ids) == 3 for entry in entries
        )
    entries = [entry.token_ids[0] for output in outputs for entry in output.prompt_logprobs or []]
    assert entries == ([] if sampling.prompt_logprobs is None else prompt[1:])
    check_timing(prompt, last)


def check_timing(prompt, last):
    timing = last.timing
    assert timing.queued <= timing.scheduled <= timing.finished
    assert timing.first_token == 0 or timing.scheduled <= timing.first_token <= timing.finished
    assert 0 <= last.counts.cached < len(prompt)
    assert timing.num_prefill_computed == len(prompt) - last.counts.cached
