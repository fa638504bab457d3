"""Decisions of the scheduler, case by case."""

from __future__ import annotations

import random

import pytest

from quire.engine.messages import AddRequest, Choice, SamplingParams
from quire.worker.messages import NO_TOKEN_ERROR, NewRequest, StepInput, StepOutput
from tests.helpers.engine.fake_executor import expected_tokens
from tests.helpers.engine.harness import CLIENT, VOCAB, Engine, assert_invariants, fake_config, greedy, make, run_step


def test_the_worked_example():
    """Section 4 of docs/architecture.md: prompts of 3, 2 and 8 tokens, block size 2, context 12, budget 10."""
    scheduler, executor = make(max_model_len="12", block_size=2, num_gpu_blocks_override=32, max_num_batched_tokens=10)
    prompts, sampling = [[11, 12, 13], [21, 22], [31, 32, 33, 34, 35, 36, 37, 38]], greedy()
    for i, prompt in enumerate(prompts):
        scheduler.add(AddRequest(str(i), prompt, sampling))
    first, _ = run_step(scheduler, executor)
    assert first.input == StepInput(
        step=1,
        new=[
            NewRequest(0, prompts[0], 3, [[1, 2]], sampling, scope="\0"),
            NewRequest(1, prompts[1], 2, [[3]], sampling, scope="\0"),
            NewRequest(2, prompts[2], 8, [[4, 5, 6]], sampling, scope="\0"),
        ],
        rows=[0, 1, 2],
        num_computed=[0, 0, 0],
        num_scheduled=[3, 2, 5],
        new_blocks=[[], [], []],
        samples=[0, 1],
    )
    second, _ = run_step(scheduler, executor)
    assert second.input == StepInput(
        step=2,
        new=[],
        rows=[0, 1, 2],
        num_computed=[3, 2, 5],
        num_scheduled=[1, 1, 3],
        new_blocks=[[], [[7]], [[8]]],
        samples=[0, 1, 2],
    )


def test_a_long_prompt_never_stalls_running_requests():
    scheduler, executor = make(max_num_batched_tokens=16, num_gpu_blocks_override=400, max_model_len="2000")
    for name in "abc":
        scheduler.add(AddRequest(name, [ord(name)], greedy(100)))
    run_step(scheduler, executor)
    # the oldest, so it is first among the running requests, yet decodes go first
    scheduler.add(AddRequest("long", list(range(900)), greedy(1), age=1000.0))
    scheduler.add(AddRequest("after", [5], greedy(100)))
    for _ in range(60):
        step, outputs = run_step(scheduler, executor)
        assert {"a", "b", "c"} <= {output.request_id for output in outputs if output.new_token_ids}
        assert step.num_tokens <= 16
        if step.input.num_computed[-1] < 800:
            assert step.num_tokens == 16, "the prompt takes all that is left of the budget"


def test_long_prefill_token_threshold_holds_while_others_run():
    scheduler, executor = make(long_prefill_token_threshold=10, max_num_batched_tokens=100)
    scheduler.add(AddRequest("alone", list(range(60)), greedy(9)))
    step, _ = run_step(scheduler, executor)
    assert step.input.num_scheduled == [60]
    scheduler.add(AddRequest("long", list(range(100, 160)), greedy(9)))
    assert [run_step(scheduler, executor)[0].input.num_scheduled for _ in range(3)] == [[1, 10], [1, 10], [1, 10]]


def test_prompts_with_logprobs_come_in_small_chunks(monkeypatch):
    """Also alone: a request that arrives waits for the step that runs."""
    monkeypatch.setattr("quire.engine.chunks.SCORED_CHUNK", 10)
    monkeypatch.setattr("quire.engine.chunks.LEAST_SCORED", 1)
    scheduler, executor = make(max_num_batched_tokens=100)
    scored = SamplingParams(temperature=0.0, max_tokens=9, prompt_logprobs=0)
    for name, expected in (("alone", [[10]] * 6), ("not alone", [[1, 10], [1, 10]])):
        scheduler.add(AddRequest(name, [len(name), *range(59)], scored))
        assert [run_step(scheduler, executor)[0].input.num_scheduled for _ in expected] == expected


def test_prompts_with_logprobs_share_one_chunk(monkeypatch):
    monkeypatch.setattr("quire.engine.chunks.SCORED_CHUNK", 40)
    monkeypatch.setattr("quire.engine.chunks.LEAST_SCORED", 4)
    scheduler, executor = make(max_num_batched_tokens=200)
    scored = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    for i in range(4):
        scheduler.add(AddRequest(f"scored {i}", [i, *range(10, 89)], scored))
    assert run_step(scheduler, executor)[0].input.num_scheduled == [40, 4, 4, 4]
    scheduler.add(AddRequest("other", [5], greedy(50)))
    run_step(scheduler, executor)
    while any(request.sampling.prompt_logprobs is not None for request in scheduler.running):
        step, outputs = run_step(scheduler, executor)
        assert "other" in {output.request_id for output in outputs}
        assert step.num_tokens <= 1 + 40 + 3 * 4


def test_requests_of_one_step_share_their_prefix():
    scheduler, executor = make(block_size=4)
    for name in "abc":
        scheduler.add(AddRequest(name, list(range(10)), greedy()))
    step, outputs = run_step(scheduler, executor)
    assert step.input.num_computed == [0, 8, 8] and step.input.num_scheduled == [10, 2, 2]
    assert [new.block_ids[0][:2] for new in step.input.new] == [[1, 2]] * 3
    assert [output.counts.cached for output in outputs] == [0, 8, 8]


def test_a_full_hit_computes_the_last_token():
    scheduler, executor = make(block_size=4)
    scheduler.add(AddRequest("a", list(range(8)), greedy(1)))
    run_step(scheduler, executor)
    scheduler.add(AddRequest("b", list(range(8)), greedy(1)))
    step, [output] = run_step(scheduler, executor)
    assert step.input.num_computed == [4] and step.input.num_scheduled == [4] and output.counts.cached == 4


def test_outputs_are_cached_for_the_next_turn_of_a_conversation():
    engine = Engine(fake_config(block_size=4))
    prompt = list(range(10))
    engine.add("a", prompt, max_tokens=11)
    engine.run()
    engine.add("b", prompt + engine.tokens("a") + [1, 2, 3], max_tokens=1)
    engine.run()
    assert engine.last("b").counts.cached == 20  # the last of the 21 tokens was sampled, but never computed


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_last_full_block_is_cached_at_any_depth(depth):
    engine = Engine(fake_config(block_size=4, steps_in_flight=depth))
    engine.add("a", list(range(10)), max_tokens=7)  # 17 tokens, 16 of them computed
    engine.run()
    engine.add("b", [*range(10), *engine.tokens("a"), 3], max_tokens=1)
    engine.run()
    assert engine.last("b").counts.cached == 16


def test_salts_separate_prefixes():
    engine = Engine(fake_config(block_size=4))
    for i, salt in enumerate([None, "x", "y", "x", None]):
        engine.add(str(i), list(range(9)), cache_salt=salt, max_tokens=1)
        engine.run()
    assert [engine.last(str(i)).counts.cached for i in range(5)] == [0, 0, 0, 8, 8]


def test_without_prefix_caching_only_the_choices_of_one_request_share():
    engine = Engine(fake_config(block_size=4, enable_prefix_caching=False))
    engine.add("0", list(range(9)), siblings=[Choice("1", 5)], max_tokens=1)
    for i in range(2, 4):
        engine.add(str(i), list(range(9)), max_tokens=1)
    engine.run()
    assert [engine.last(str(i)).counts.cached for i in range(4)] == [0, 8, 0, 0]
    assert engine.scheduler.stats().prefix_cache_queries == 0


def test_prompt_logprobs_compute_the_whole_prompt():
    engine = Engine(fake_config(block_size=4))
    for i, prompt_logprobs in enumerate([None, 0, None]):
        engine.add(str(i), list(range(20)), prompt_logprobs=prompt_logprobs, max_tokens=1)
        engine.run()
    assert [engine.last(str(i)).counts.cached for i in range(3)] == [0, 0, 16]
    assert [entry.token_ids for entry in engine.last("1").prompt_logprobs] == [[t] for t in range(1, 20)]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_max_tokens_0_ends_when_the_prompt_is_computed(depth):
    engine = Engine(fake_config(steps_in_flight=depth, max_num_batched_tokens=8, max_model_len="20"))
    # as long as the context: no output has to fit after it
    engine.add("echo", list(range(20)), max_tokens=0, prompt_logprobs=1)
    engine.add("next", [1, 2], max_tokens=3)
    engine.run()
    outputs = engine.outputs[CLIENT, "echo"]
    assert [output.finish_reason for output in outputs] == [None, None, "length"]
    assert [entry.token_ids[0] for output in outputs for entry in output.prompt_logprobs] == list(range(1, 20))
    assert engine.tokens("echo") == [] and outputs[-1].timing.first_token == 0
    assert engine.tokens("next") == expected_tokens([1, 2], SamplingParams(max_tokens=3), 20, VOCAB)
    engine.assert_at_rest()


class TestStops:
    def outputs(self, tokens: list[list[int]], **sampling):
        """Outputs of a request whose samples are `tokens`, one list per step."""
        scheduler, _ = make()
        scheduler.add(AddRequest("a", [1], SamplingParams(**sampling)))
        for sampled in tokens:
            step = scheduler.schedule()
            if step is None:
                break
            [output] = scheduler.update(step, StepOutput(step.input.step, [sampled]))[b""]
        return output

    def test_eos_and_stop_ids(self):
        assert self.outputs([[5], [9]], eos_token_ids=[9]).finish_reason == "stop"
        assert self.outputs([[5], [9]], eos_token_ids=[9]).stop_reason is None
        assert self.outputs([[5], [8]], eos_token_ids=[9], stop_token_ids=[8]).stop_reason == 8
        assert self.outputs([[9]], eos_token_ids=[9], ignore_eos=True).finish_reason is None
        assert self.outputs([[9]], eos_token_ids=[9], stop_token_ids=[9], ignore_eos=True).stop_reason == 9

    def test_below_min_tokens_nothing_stops(self):
        assert self.outputs([[9], [9]], eos_token_ids=[9], min_tokens=2).finish_reason is None
        assert self.outputs([[9], [9], [9]], eos_token_ids=[9], min_tokens=2).finish_reason == "stop"
        assert self.outputs([[8]], stop_token_ids=[8], min_tokens=1).finish_reason is None
        assert self.outputs([[9], [9]], eos_token_ids=[9], min_tokens=2, max_tokens=2).finish_reason == "length"

    def test_several_tokens_of_a_step_end_at_the_stop(self):
        output = self.outputs([[5, 9, 7]], eos_token_ids=[9])
        assert output.new_token_ids == [5, 9] and output.finish_reason == "stop"
        assert self.outputs([[5, 6, 7]], max_tokens=2).new_token_ids == [5, 6]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("cut", [1, 5, 11])
def test_a_resubmitted_request_goes_on_as_if_never_interrupted(depth, cut):
    sampling = {"max_tokens": 12, "seed": 3}
    whole = expected_tokens([4, 5, 6], SamplingParams(**sampling), 100, VOCAB)
    engine = Engine(fake_config(steps_in_flight=depth, max_model_len="100"))
    engine.add("a", [4, 5, 6], output_token_ids=whole[:cut], prompt_logprobs=0, **sampling)
    engine.run()
    assert whole[:cut] + engine.tokens("a") == whole and engine.last("a").finish_reason == "length"
    assert not any(output.prompt_logprobs for output in engine.outputs[CLIENT, "a"]), "they were delivered before"


def test_a_resubmitted_request_that_was_complete_ends_at_once():
    engine = Engine(fake_config())
    engine.add("length", [1], output_token_ids=[2, 3], max_tokens=2)
    engine.add("stop", [1], output_token_ids=[2, 9], max_tokens=5, stop_token_ids=[9])
    engine.run()
    assert engine.last("length").finish_reason == "length" and engine.tokens("length") == []
    assert engine.last("stop").finish_reason == "stop" and engine.last("stop").stop_reason == 9
    engine.assert_at_rest()


@pytest.mark.parametrize(
    "message, words",
    [
        (AddRequest("x", [], greedy()), "prompt_token_ids is empty"),
        (AddRequest("x", [1, VOCAB], greedy()), "outside the model's vocabulary, 0 .. 999"),
        (AddRequest("x", [-1], greedy()), "outside the model's vocabulary, 0 .. 999"),
        (AddRequest("x", [1] * 20, greedy()), "20 tokens, but a request may have at most 12"),
        (AddRequest("x", [1] * 12, greedy()), "12 tokens, but a request may have at most 12"),
        (AddRequest("x", [1], greedy(-1)), "max_tokens"),
        (AddRequest("x", [1], greedy(min_tokens=-1)), "min_tokens is -1"),
        (AddRequest("x", [1], greedy(), output_token_ids=[VOCAB]), "output_token_ids: token id 1000"),
        (AddRequest("x", [1], greedy(), siblings=[Choice("y", 1, [-5])]), "output_token_ids: token id -5"),
        (AddRequest("x", [1], greedy(), siblings=[Choice("x", 1)]), "two choices"),
        (AddRequest("x", [1], greedy(), siblings=[Choice("good", 1)]), "'good' is already in use"),
        (AddRequest("x", [1], greedy(bad_words_ids=[[1, 2], [VOCAB]])), "bad_words: token id 1000"),
        (
            AddRequest("x", [1], greedy(bad_words_ids=[[1] * 13])),
            "bad_words: an entry has 13 tokens, but a request may have at most 12",
        ),
        (AddRequest("x", [1], greedy(bad_words_ids=[[1] * 12] * 30_000)), "bad_words: 30000 sequences"),
        (AddRequest("x", [1], greedy(allowed_token_ids=[5, VOCAB])), "allowed_token_ids: token id 1000"),
        (
            AddRequest("x", [1], greedy(allowed_token_ids=[5] * 1001)),
            "allowed_token_ids has 1001 entries, but may have at most 1000",
        ),
        (AddRequest("x", [1], greedy(logit_bias={-1: 5.0})), "logit_bias: token id -1"),
        (AddRequest("x", [1], greedy(stop_token_ids=[VOCAB])), "stop_token_ids: token id 1000"),
        (AddRequest("x", [1], greedy(stop_token_ids=[1] * 1025)), "stop_token_ids has 1025 entries"),
        (AddRequest("x", [1], greedy(eos_token_ids=[VOCAB], min_tokens=1)), "eos_token_ids: token id 1000"),
        (AddRequest("x", [1], greedy(logprobs_mode="loud")), "logprobs_mode is 'loud'"),
        (AddRequest("good", [1], greedy()), "already in use"),
    ],
)
def test_what_can_never_run_is_refused_alone(message, words):
    engine = Engine(fake_config(num_gpu_blocks_override=4, block_size=4))
    engine.add("good", [1, 2], max_tokens=3)
    engine.put(message)
    engine.run()
    errors = [output for outputs in engine.outputs.values() for output in outputs if output.error]
    assert len(errors) == len(message.choices) and all(
        words in error.error and error.finish_reason == "error" for error in errors
    )
    assert {error.error_kind for error in errors} == {"invalid_request"}
    assert len(engine.tokens("good")) == 3 and engine.outputs[CLIENT, "good"][-1].finish_reason == "length"
    engine.assert_at_rest()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_may_fill_the_whole_pool(depth):
    engine = Engine(fake_config(num_gpu_blocks_override=6, block_size=4, steps_in_flight=depth))
    for name in "ab":
        engine.add(name, [ord(name)], max_tokens=1000)
    engine.run()
    for name in "ab":
        assert (
            engine.tokens(name) == expected_tokens([ord(name)], SamplingParams(max_tokens=1000), 20, VOCAB)
            and engine.last(name).finish_reason == "length"
        )
    engine.assert_at_rest()


def test_preemption_does_not_change_what_was_cached_at_first():
    engine = Engine(fake_config(num_gpu_blocks_override=9, block_size=2, max_model_len="16"))
    for name in "ab":
        engine.add(name, [ord(name)] * 6, max_tokens=8)
    engine.run()
    assert engine.last("b").timing.num_preemptions >= 1
    assert {output.counts.cached for output in engine.outputs[CLIENT, "b"]} == {0}
    assert engine.last("b").timing.num_prefill_computed == 6


def test_an_error_of_one_request_is_its_own():
    """The worker reports the error by batch position; the contents of the request's blocks are not trusted."""
    scheduler, executor = make(block_size=2)
    for name in "abc":
        scheduler.add(AddRequest(name, [ord(name)] * 5, greedy(2)))
    step = scheduler.schedule()
    output = executor.execute(step.input).result()
    outputs = scheduler.update(step, StepOutput(output.step, output.token_ids, errors={1: "no such logit"}))[b""]
    assert [(o.request_id, o.finish_reason, o.error) for o in outputs] == [
        ("b", "error", "no such logit"),
        ("a", None, None),
        ("c", None, None),
    ]
    scheduler.add(AddRequest("again", [ord("b")] * 5, greedy(2)))
    step, outputs = run_step(scheduler, executor)
    assert step.input.num_computed == [5, 5, 0]
    assert {o.request_id for o in outputs if o.finish_reason == "length"} == {"a", "c"}


@pytest.mark.parametrize(
    ("sampling", "kind"),
    [
        ({}, "engine"),
        ({"allowed_token_ids": [3]}, "invalid_request"),
        ({"grammar": "start: /a/"}, "invalid_request"),
        ({"logit_bias": {3: -100.0}}, "invalid_request"),
    ],
)
def test_who_excluded_every_token(sampling, kind):
    """The request, if it can; else the model's logits are at fault."""
    scheduler, _ = make()
    scheduler.add(AddRequest("a", [1, 2, 3], greedy(2, **sampling)))
    step = scheduler.schedule()
    output = StepOutput(step.input.step, [[]], errors={0: NO_TOKEN_ERROR})
    (found,) = scheduler.update(step, output)[b""]
    assert (found.error, found.error_kind) == (NO_TOKEN_ERROR, kind)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_500_aborts_at_random_moments_free_everything(depth, policy):
    rng = random.Random(depth)
    engine = Engine(
        fake_config(
            steps_in_flight=depth,
            scheduling_policy=policy,
            num_gpu_blocks_override=80,
            block_size=4,
            max_num_seqs=16,
            max_num_batched_tokens=64,
            max_model_len="200",
        )
    )
    ids = [str(i) for i in range(500)]
    for name in ids:
        engine.add(
            name,
            [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 60))],
            max_tokens=100,
            priority=rng.randrange(3),
            ignore_eos=True,
        )
    rng.shuffle(ids)
    for name in ids:
        for _ in range(rng.randrange(3)):
            engine.turn()
        engine.abort(name)
        engine.abort(name, "unknown")
    engine.run(lambda: assert_invariants(engine))
    engine.assert_at_rest()
    # Exactly once for requests that finished before their abort, never for the others.
    assert all(sum(bool(output.finish_reason) for output in outputs) <= 1 for outputs in engine.outputs.values())


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_heavy_pressure(depth, policy):
    """Many requests with common prefixes in a pool for a few of them."""
    rng, limit = random.Random(17 * depth), 120
    engine = Engine(
        fake_config(
            steps_in_flight=depth,
            scheduling_policy=policy,
            num_gpu_blocks_override=45,
            block_size=4,
            max_num_seqs=12,
            max_num_batched_tokens=50,
            max_model_len=str(limit),
        )
    )
    stems, requests = [[rng.randrange(VOCAB) for _ in range(40)] for _ in range(4)], {}
    for i in range(100):
        prompt = rng.choice(stems)[: rng.randrange(41)] + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 40))]
        requests[str(i)] = (
            prompt,
            SamplingParams(max_tokens=rng.randrange(1, 80), seed=rng.randrange(5), stop_token_ids=[1, 2, 3, 4, 5]),
        )
        engine.add(
            str(i),
            prompt,
            priority=rng.randrange(4),
            max_tokens=requests[str(i)][1].max_tokens,
            seed=requests[str(i)][1].seed,
            stop_token_ids=[1, 2, 3, 4, 5],
        )
        for _ in range(rng.randrange(4)):
            engine.turn()
    engine.run(lambda: assert_invariants(engine))
    for name, (prompt, sampling) in requests.items():
        assert engine.tokens(name) == expected_tokens(prompt, sampling, limit, VOCAB)
    assert sum(engine.last(name).timing.num_preemptions for name in requests) > 5
    engine.assert_at_rest()


def test_depth_overshoots_by_depth_minus_one_steps_only():
    """Length stops are predicted, so they waste no step; a stop id is seen late, and tokens after it are dropped."""
    for depth in (1, 2, 3):
        for sampling, overshoot in (
            ({"max_tokens": 10}, 0),
            (
                {
                    "max_tokens": 100,
                    "stop_token_ids": [expected_tokens([1], SamplingParams(max_tokens=10), 99, VOCAB)[-1]],
                },
                depth - 1,
            ),
        ):
            engine = Engine(fake_config(steps_in_flight=depth))
            before = engine.core.executor.num_steps
            engine.add("a", [1], **sampling)
            engine.run()
            assert engine.core.executor.num_steps - before == 10 + overshoot
            assert len(engine.tokens("a")) == 10


def test_stats_count_what_happened():
    scheduler, executor = make(block_size=4, max_num_batched_tokens=8)
    for name in "ab":
        scheduler.add(AddRequest(name, list(range(10)), greedy(3)))
        while scheduler.requests:
            run_step(scheduler, executor)
    stats = scheduler.flush_stats()
    assert (stats.num_prompt_tokens, stats.num_generation_tokens) == (12, 6)
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (20, 8)
    assert stats.iteration_tokens == [8, 2, 1, 1, 2, 1, 1]
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)
    assert scheduler.flush_stats().iteration_tokens == []


def test_gauges():
    scheduler, _ = make(max_num_seqs=1, num_gpu_blocks_override=11, block_size=4)
    for name in "ab":
        scheduler.add(AddRequest(name, [1] * 8, greedy()))
    scheduler.schedule()
    stats = scheduler.stats()
    assert (stats.num_running, stats.num_waiting) == (1, 1) and stats.kv_cache_usage == pytest.approx(0.2)


def test_schedule_without_requests_is_none():
    scheduler, _ = make()
    assert scheduler.schedule() is None


def test_stages_of_a_pipeline_work_on_different_requests():
    """With two stages two halves of the requests take turns, so that no step waits for a token of the previous one; a
    request alone runs in every step.
    """
    engine = Engine(fake_config(pipeline_parallel_size=2, steps_in_flight=3))
    for i in range(4):
        engine.add(str(i), [i + 1] * 5, max_tokens=20, ignore_eos=True)
    steps, execute = [], engine.core.executor.execute
    engine.core.executor.execute = lambda step: steps.append(step.rows) or execute(step)
    engine.run(lambda: assert_invariants(engine))
    assert steps[0] == [0, 1, 2, 3] and sorted(steps[1:3]) == [[0, 2], [1, 3]] and steps[1:] == steps[1:3] * 19
    for i in range(4):
        assert engine.tokens(str(i)) == expected_tokens([i + 1] * 5, SamplingParams(max_tokens=20), 4096, VOCAB)
    steps.clear()
    engine.add("alone", [9], max_tokens=5, ignore_eos=True)
    engine.run()
    assert steps == [[0]] * 5
