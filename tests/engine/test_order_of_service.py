"""Which requests run first, and which are preempted: by arrival, by priority, and background requests."""

from __future__ import annotations

from quire.engine.messages import AddRequest, Choice, SamplingParams
from tests.helpers.engine.fake_executor import expected_tokens
from tests.helpers.engine.harness import VOCAB, Engine, assert_invariants, fake_config, greedy, make, run_step


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
    assert engine.last("waiting").counts.cached > 200 and engine.last("waiting").error is None
