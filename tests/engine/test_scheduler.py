"""Decisions of the scheduler, case by case."""

from __future__ import annotations

import random

import pytest

from quire.engine.executor.fake import FakeExecutor, FakeOptions, expected_tokens
from quire.engine.kv.manager import KVCacheManager
from quire.engine.messages import AddRequest, Choice, SamplingParams
from quire.engine.scheduler import Scheduler
from quire.worker.messages import NO_TOKEN_ERROR, NewRequest, StepInput, StepOutput
from tests.engine.harness import CLIENT, VOCAB, Engine, assert_invariants, fake_config


def greedy(max_tokens: int = 4, **sampling) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **sampling)


def make(enable_prefix_caching: bool = True, **settings) -> tuple[Scheduler, FakeExecutor]:
    config = fake_config(**settings)
    executor = FakeExecutor(config, FakeOptions())
    return Scheduler(
        config.scheduler,
        executor.ready,
        KVCacheManager(
            executor.ready.num_blocks,
            executor.ready.block_size,
            enable_prefix_caching,
            executor.ready.groups,
            executor.ready.max_num_batched_tokens,
        ),
    ), executor


def run_step(scheduler: Scheduler, executor: FakeExecutor):
    step = scheduler.schedule()
    return step, scheduler.update(step, executor.execute(step.input).result()).get(b"", [])


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
            NewRequest(0, prompts[0], 3, [[1, 2]], sampling),
            NewRequest(1, prompts[1], 2, [[3]], sampling),
            NewRequest(2, prompts[2], 8, [[4, 5, 6]], sampling),
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


def test_prompts_with_logprobs_come_in_small_chunks_while_others_run(monkeypatch):
    monkeypatch.setattr("quire.engine.chunks.SCORED_CHUNK", 10)
    monkeypatch.setattr("quire.engine.chunks.LEAST_SCORED", 1)
    scheduler, executor = make(max_num_batched_tokens=100)
    scored = SamplingParams(temperature=0.0, max_tokens=9, prompt_logprobs=0)
    for name, expected in (("alone", [[60]]), ("not alone", [[1, 10], [1, 10]])):
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
    assert [output.num_cached_tokens for output in outputs] == [0, 8, 8]


def test_a_full_hit_computes_the_last_token():
    scheduler, executor = make(block_size=4)
    scheduler.add(AddRequest("a", list(range(8)), greedy(1)))
    run_step(scheduler, executor)
    scheduler.add(AddRequest("b", list(range(8)), greedy(1)))
    step, [output] = run_step(scheduler, executor)
    assert step.input.num_computed == [4] and step.input.num_scheduled == [4] and output.num_cached_tokens == 4


def test_outputs_are_cached_for_the_next_turn_of_a_conversation():
    engine = Engine(fake_config(block_size=4))
    prompt = list(range(10))
    engine.add("a", prompt, max_tokens=11)
    engine.run()
    engine.add("b", prompt + engine.tokens("a") + [1, 2, 3], max_tokens=1)
    engine.run()
    assert engine.last("b").num_cached_tokens == 20  # the last of the 21 tokens was sampled, but never computed


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_last_full_block_is_cached_at_any_depth(depth):
    engine = Engine(fake_config(block_size=4, steps_in_flight=depth))
    engine.add("a", list(range(10)), max_tokens=7)  # 17 tokens, 16 of them computed
    engine.run()
    engine.add("b", [*range(10), *engine.tokens("a"), 3], max_tokens=1)
    engine.run()
    assert engine.last("b").num_cached_tokens == 16


def test_salts_separate_prefixes():
    engine = Engine(fake_config(block_size=4))
    for i, salt in enumerate([None, "x", "y", "x", None]):
        engine.add(str(i), list(range(9)), cache_salt=salt, max_tokens=1)
        engine.run()
    assert [engine.last(str(i)).num_cached_tokens for i in range(5)] == [0, 0, 0, 8, 8]


def test_without_prefix_caching_only_the_choices_of_one_request_share():
    engine = Engine(fake_config(block_size=4, enable_prefix_caching=False))
    engine.add("0", list(range(9)), siblings=[Choice("1", 5)], max_tokens=1)
    for i in range(2, 4):
        engine.add(str(i), list(range(9)), max_tokens=1)
    engine.run()
    assert [engine.last(str(i)).num_cached_tokens for i in range(4)] == [0, 8, 0, 0]
    assert engine.scheduler.stats().prefix_cache_queries == 0


def test_prompt_logprobs_compute_the_whole_prompt():
    engine = Engine(fake_config(block_size=4))
    for i, prompt_logprobs in enumerate([None, 0, None]):
        engine.add(str(i), list(range(20)), prompt_logprobs=prompt_logprobs, max_tokens=1)
        engine.run()
    assert [engine.last(str(i)).num_cached_tokens for i in range(3)] == [0, 0, 16]
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


def test_fcfs_preempts_the_latest_and_resumes_it_first():
    engine = Engine(fake_config(num_gpu_blocks_override=9, block_size=2, max_model_len="16"))
    for name in "abc":
        engine.add(name, [ord(name)] * 3, max_tokens=8)
    engine.run(lambda: assert_invariants(engine))
    finished = {name: engine.last(name).timing for name in "abc"}
    assert finished["a"].num_preemptions == 0 and finished["c"].num_preemptions >= 1
    assert finished["a"].finished <= finished["b"].finished <= finished["c"].finished


def test_the_order_of_service_heeds_no_wall_clock(monkeypatch):
    """Setting the clock back lets no request overtake. A request that waited for another engine is older."""
    scheduler, _ = make()
    for number, age in enumerate([0.0, 0.0, 100.0]):
        monkeypatch.setattr("time.time", lambda number=number: 1e9 - 3600 * number)
        scheduler.add(AddRequest(str(number), [1], greedy(), age=age))
    assert [request.request_id for request in scheduler.waiting] == ["2", "0", "1"]


def test_the_choices_of_a_request_share_its_prompt():
    """The choices share the prompt's list in memory until they have outputs of their own."""
    engine = Engine(fake_config(max_num_seqs=2))
    message = engine.add("0", list(range(300)), siblings=[Choice(str(i), i) for i in range(1, 8)], max_tokens=5)
    engine.turn()
    requests = list(engine.scheduler.requests.values())
    assert len(requests) == 8 and sum(request.token_ids is message.prompt_token_ids for request in requests) == 6
    engine.run()
    assert all(
        engine.tokens(str(i)) == expected_tokens(message.prompt_token_ids, greedy(5, seed=i), 4096, VOCAB)
        for i in range(8)
    )
    assert len(message.prompt_token_ids) == 300


def test_a_choice_that_was_complete_needs_no_step():
    engine = Engine(fake_config())
    engine.add("a", [1], output_token_ids=[2], siblings=[Choice("b", 1, [3, 4]), Choice("c", 2)], max_tokens=2)
    engine.run()
    assert [(len(engine.tokens(name)), engine.last(name).finish_reason) for name in "abc"] == [
        (1, "length"),
        (0, "length"),
        (2, "length"),
    ]
    engine.assert_at_rest()


def test_priority_runs_the_urgent_first_and_preempts_the_least_urgent():
    engine = Engine(fake_config(scheduling_policy="priority", max_num_seqs=2, num_gpu_blocks_override=50))
    engine.add("low", [1], max_tokens=20, priority=5)
    engine.add("middle", [2], max_tokens=20, priority=3)
    for _ in range(5):
        engine.turn()
    engine.add("high", [3], max_tokens=5, priority=-1)
    engine.add("lowest", [4], max_tokens=5, priority=9)
    engine.turn()
    assert [request.request_id for request in engine.scheduler.running] == ["high", "middle"], (
        "no row was free, and the lowest had to give its own"
    )
    engine.run()
    timings = {name: engine.last(name).timing for name in ("low", "middle", "high", "lowest")}
    assert {name: timing.num_preemptions for name, timing in timings.items()} == {
        "low": 1,
        "middle": 0,
        "high": 0,
        "lowest": 0,
    }
    assert timings["high"].finished < timings["middle"].finished < timings["low"].finished
    assert engine.tokens("low") == expected_tokens([1], SamplingParams(max_tokens=20), 4096, VOCAB)


def test_equal_priorities_do_not_preempt_each_other():
    engine = Engine(fake_config(scheduling_policy="priority", max_num_seqs=1))
    engine.add("first", [1], max_tokens=10, priority=1)
    engine.turn()
    engine.add("second", [2], max_tokens=10, priority=1, age=1000.0)
    engine.run()
    assert engine.last("first").timing.num_preemptions == 0


def test_background_requests_get_a_quarter_of_a_step_of_others():
    scheduler, executor = make(max_num_batched_tokens=64, num_gpu_blocks_override=400, max_model_len="600")
    for i in range(8):
        scheduler.add(AddRequest(f"b{i}", [i, i], greedy(50), background=True))
    alone = scheduler.schedule()
    assert alone.num_tokens == 64 // 8  # short steps, so that an arriving request does not wait long
    scheduler.update(alone, executor.execute(alone.input).result())
    scheduler.add(AddRequest("prompt", list(range(40)), greedy(50)))
    with_prompt, _ = run_step(scheduler, executor)
    assert with_prompt.input.num_scheduled == [1, 40]  # one token until the prompt's size is known
    for name in "xyz":
        scheduler.add(AddRequest(name, [1] * 7, greedy(50)))
    run_step(scheduler, executor)
    with_decodes, _ = run_step(scheduler, executor)
    names = [request.request_id for request in with_decodes.requests]
    assert names[:4] == ["prompt", "x", "y", "z"] and len(names) == 5


def test_background_steps_are_short_and_single_while_others_are_expected(monkeypatch):
    now = 1000.0
    monkeypatch.setattr("quire.engine.scheduler.time.monotonic", lambda: now)
    scheduler, executor = make(max_num_batched_tokens=512, num_gpu_blocks_override=400, max_model_len="600")
    scheduler.add(AddRequest("a", [1], greedy(1)))
    run_step(scheduler, executor)
    for i in range(20):
        scheduler.add(AddRequest(f"b{i}", [i] * 10, greedy(50), background=True))
    step = scheduler.schedule()
    assert step.num_tokens == 512 // 256 and scheduler.schedule() is None
    scheduler.update(step, executor.execute(step.input).result())
    now += 5.0
    steps = [scheduler.schedule(), scheduler.schedule()]
    assert [step.num_tokens for step in steps] == [512 // 8] * 2


def test_a_background_request_makes_room_for_others_and_ends_all_the_same():
    engine = Engine(fake_config(max_num_seqs=2, num_gpu_blocks_override=50))
    engine.add("back", [1], max_tokens=20, background=True)
    engine.add("ground", [2], max_tokens=20, background=True)
    for _ in range(4):
        engine.turn()
    engine.add("one", [3], max_tokens=5)
    engine.add("two", [4], max_tokens=5)
    order = []
    engine.run(lambda: order.extend(o for c, o in engine.outputs if engine.last(o).finish_reason and o not in order))
    assert order[:2] == ["one", "two"]
    for name, first in (("back", 1), ("ground", 2), ("one", 3), ("two", 4)):
        assert engine.last(name).finish_reason == "length"
        sampling = SamplingParams(max_tokens=20 if name in ("back", "ground") else 5)
        assert engine.tokens(name) == expected_tokens([first], sampling, 100, VOCAB)
    engine.assert_at_rest()


def test_fcfs_ignores_priority():
    engine = Engine(fake_config(max_num_seqs=1))
    for i, name in enumerate("ab"):
        engine.add(name, [1], max_tokens=3, priority=-i)
    engine.run()
    assert engine.last("a").timing.finished < engine.last("b").timing.scheduled


def test_admission_leaves_running_requests_what_they_are_about_to_need():
    """Without a reserve a new request takes the last blocks, loses them a step later, and so on."""
    engine = Engine(fake_config(num_gpu_blocks_override=41, block_size=4, max_num_seqs=16, max_num_batched_tokens=64))
    for i in range(40):
        engine.add(str(i), [i + 1] * 10, max_tokens=10)
    engine.run()
    assert sum(engine.last(str(i)).timing.num_preemptions for i in range(40)) <= 6  # 13 without


def test_a_request_that_waits_for_room_is_not_matched_anew_in_every_step():
    """Each block of its prefix is looked up once, until one is evicted."""
    engine = Engine(fake_config(num_gpu_blocks_override=200, block_size=2, max_model_len="400"))
    engine.add("first", list(range(300)), max_tokens=1)
    engine.run()  # leaves 149 blocks that can be found
    engine.add("running", [7] * 20, max_tokens=70)
    for _ in range(3):
        engine.turn()
    engine.add("waiting", [*range(300), *range(80)], max_tokens=1)
    pool, lookups = engine.scheduler.kv.pool, []
    find = pool.find
    pool.find = lambda block_hash: lookups.append(block_hash) or find(block_hash)
    engine.run(lambda: assert_invariants(engine))
    assert engine.last("waiting").timing.scheduled >= engine.last("running").timing.finished
    assert len(lookups) < 400, "one step looks up 150"
    assert engine.last("waiting").num_cached_tokens > 200 and engine.last("waiting").error is None


def test_preemption_does_not_change_what_was_cached_at_first():
    engine = Engine(fake_config(num_gpu_blocks_override=9, block_size=2, max_model_len="16"))
    for name in "ab":
        engine.add(name, [ord(name)] * 6, max_tokens=8)
    engine.run()
    assert engine.last("b").timing.num_preemptions >= 1
    assert {output.num_cached_tokens for output in engine.outputs[CLIENT, "b"]} == {0}
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
