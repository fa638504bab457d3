"""The engine loop and its messages, in the test's process."""

from __future__ import annotations

import pytest

from quire.engine.chores.give_back import GiveBack
from quire.engine.chores.idle_work import IdleWork
from quire.engine.core import EngineCore
from quire.engine.messages import (
    AbortRequests,
    AddRequest,
    Call,
    CallResult,
    EngineDead,
    Hello,
    Progress,
    Ready,
    SamplingParams,
    StepOutputs,
)
from quire.worker.messages import StepOutput
from tests.helpers.engine.fake_executor import FakeExecutor, expected_tokens
from tests.helpers.engine.harness import CLIENT, VOCAB, Clock, Engine, Idle, LocalSocket, fake_config


def sent(engine: Engine, client: bytes = CLIENT) -> list:
    messages, engine.socket.sent = engine.socket.sent, []
    return [message for receiver, message in messages if receiver == client]


def test_hello_is_answered_by_progress_and_then_ready():
    engine = Engine(fake_config(num_gpu_blocks_override=77))
    messages = sent(engine)
    assert all(isinstance(message, Progress) for message in messages[:-1]) and isinstance(messages[-1], Ready)
    assert messages[0].phase == "loading weights" or messages[0].phase == "starting"
    assert messages[-2].phase == "warming up"
    assert messages[-1].worker.num_blocks == 77 and messages[-1].depth == 1
    engine.put(Hello(), b"second")
    engine.core.receive()
    assert sent(engine, b"second") == [messages[-1]]


def test_the_first_step_leaves_nothing_behind():
    engine = Engine(fake_config())
    assert engine.core.executor.num_steps == 2, "a prompt and a decode"
    engine.assert_at_rest()
    assert engine.scheduler.stats().iteration_tokens == [] and not engine.scheduler.kv.pool.pages.by_key


def test_what_arrives_while_loading_is_kept():
    socket = LocalSocket()
    core = EngineCore(fake_config(), socket)
    socket.inbox += [
        (b"a", Hello()),
        (b"a", AddRequest("kept", [1], SamplingParams(max_tokens=2))),
        (b"a", AddRequest("dropped", [1], SamplingParams())),
        (b"a", AbortRequests(["dropped"])),
        (b"a", Call(1, "stats")),
    ]
    core.start()
    assert list(core.scheduler.requests) == [(b"a", "kept")]
    kinds = [type(message) for _, message in socket.sent]
    assert kinds.index(Ready) < kinds.index(CallResult)


def test_a_failing_first_step_is_not_ready(monkeypatch):
    def fail(self, step):
        class Result:
            def result(self):
                return StepOutput(step.step, [[0]], errors={0: "nan"})

        return Result()

    monkeypatch.setattr(FakeExecutor, "execute", fail)
    with pytest.raises(RuntimeError, match="the warm-up step failed: nan"):
        Engine(fake_config())


def test_each_server_gets_its_own_outputs_even_under_the_same_ids():
    engine = Engine(fake_config())
    prompts = {b"one": [1, 2], b"two": [3, 4, 5]}
    for client, prompt in prompts.items():
        engine.put(Hello(), client)
        engine.add("same", prompt, client, max_tokens=5)
    engine.run()
    for client, prompt in prompts.items():
        assert engine.tokens("same", client) == expected_tokens(prompt, SamplingParams(max_tokens=5), 4096, VOCAB)


def test_abort_is_only_ones_own():
    engine = Engine(fake_config())
    engine.add("a", [1], b"one", max_tokens=5)
    engine.abort("a", client=b"two")
    engine.run()
    assert len(engine.tokens("a", b"one")) == 5


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_server_that_is_gone_takes_its_requests_along(depth):
    engine = Engine(fake_config(steps_in_flight=depth))
    for client in (b"stays", b"goes"):
        engine.put(Hello(), client)
        engine.add("a", [1], client, max_tokens=50)
    for _ in range(5):
        engine.turn()
    engine.socket.gone.add(b"goes")
    for _ in range(depth + 1):
        engine.turn()
    assert list(engine.scheduler.requests) == [(b"stays", "a")] and b"goes" not in engine.core.clients
    engine.run()
    assert len(engine.tokens("a", b"stays")) == 50
    engine.assert_at_rest()


def test_utility_calls():
    engine = Engine(fake_config())
    sent(engine)
    engine.add("a", [1] * 40, max_tokens=3)
    engine.turn()
    for call_id, (method, args) in enumerate(
        [("reset_prefix_cache", []), ("stats", []), ("no_such", []), ("stats", [1])]
    ):
        engine.put(Call(call_id, method, args))
    engine.core.receive()
    results = [message for message in sent(engine) if isinstance(message, CallResult)]
    assert [result.call_id for result in results] == [0, 1, 2, 3]
    assert results[0].value is False, "a request runs"
    assert results[1].value["num_running"] == 1 and results[1].value["kv_cache_usage"] > 0
    assert "no_such" in results[2].error and "reset_prefix_cache" in results[2].error
    assert results[3].error.startswith("TypeError")
    engine.run()
    engine.put(Call(9, "reset_prefix_cache"))
    engine.core.receive()
    assert CallResult(9, True) in sent(engine)
    engine.add("again", [1] * 40, max_tokens=1)
    engine.run()
    assert engine.last("again").counts.cached == 0


def test_statistics_come_while_running_and_when_the_engine_becomes_idle():
    engine = Engine(fake_config())
    engine.put(Hello(), b"other")
    sent(engine)
    engine.add("a", [1] * 10, max_tokens=4)
    with pytest.raises(Idle):
        while True:
            engine.core.receive()
            engine.core.step()
    for client in (CLIENT, b"other"):
        stats = [
            message.stats
            for receiver, message in engine.socket.sent
            if receiver == client and isinstance(message, StepOutputs) and message.stats
        ]
        assert (
            sum(part.num_generation_tokens for part in stats) == 4
            and sum(part.num_prompt_tokens for part in stats) == 10
        )
        assert [n for part in stats for n in part.iteration_tokens] == [10, 1, 1, 1]
        assert (stats[-1].num_running, stats[-1].kv_cache_usage) == (0, 0.0)
    engine.socket.sent.clear()
    with pytest.raises(Idle):
        engine.core.receive()
    assert not engine.socket.sent, "nothing new, so nothing is sent"


def test_an_idle_engine_looks_for_kernels_until_they_are_there(monkeypatch):
    looks = iter([True, True, False])  # at the start, then while idle
    monkeypatch.setattr(FakeExecutor, "look_for_ops", lambda self: next(looks))
    clock = Clock(monkeypatch)
    engine = Engine(fake_config())
    monkeypatch.setattr(engine.socket, "wait", clock.wait)
    for _ in range(4):
        engine.core.receive()
    assert clock.timeouts == [0.5, 0.5, None, None]


def test_an_idle_engine_gives_the_memory_of_its_cache_back_once(monkeypatch):
    """After a request, when the workers want it; cached prefixes are forgotten first, and blocks are used in order."""
    calls, wanted = [], iter([False, True])
    monkeypatch.setattr(FakeExecutor, "wants_memory_back", lambda self, idle: next(wanted), raising=False)
    monkeypatch.setattr(FakeExecutor, "give_back", lambda self: calls.append("given back"), raising=False)
    clock = Clock(monkeypatch)
    engine = Engine(fake_config())
    engine.core.chores.append(GiveBack(engine.scheduler.kv, engine.core.executor, engine.core.ready.worker))
    monkeypatch.setattr(engine.socket, "wait", clock.wait)
    engine.core.receive()
    engine.add("a", [1] * 40, max_tokens=4)
    while engine.core.scheduler.requests or not clock.timeouts[1:]:
        engine.core.receive()
        if engine.core.scheduler.requests:
            engine.core.step()
    for _ in range(3):
        engine.core.receive()
    assert clock.timeouts == [None, None, 5.0, 5.0, None]
    assert calls == ["given back"]
    pool = engine.core.scheduler.kv.pool
    assert not pool.pages.by_key and pool.take(3) == [1, 2, 3]


def test_a_busy_engine_gives_free_blocks_back_when_the_machine_is_short(monkeypatch):
    """Cached prefixes that are reused last stay; the blocks of requests always do."""
    monkeypatch.setattr("quire.engine.chores.give_back.INTERVAL", 0.0)
    engine = Engine(fake_config(num_gpu_blocks_override=100, block_size=4, max_num_batched_tokens=16))
    pool = engine.core.scheduler.kv.pool
    for i in range(4):  # 10 full blocks each, of which the fake has the contents
        engine.add(str(i), [i] * 40, max_tokens=2)
        engine.run()
    given = engine.give_back_in_every_turn(2)
    engine.add("long", [9] * 40, max_tokens=6)
    held = set()
    engine.run(lambda: held.update(b for one in engine.core.scheduler.running for ids in one.block_ids for b in ids))
    assert given and not held & set(given)
    assert not any(pool.is_published(block) for block in given)
    assert len(given) == len(set(given)), "each once: their memory was returned"
    given.clear()
    engine.core.executor.memory_short = lambda: 0
    engine.add("again", [3] * 40, max_tokens=2)  # the last one before
    engine.run()
    assert engine.last("again").counts.cached == 36 and not given


def test_a_queued_request_that_fails_unexpectedly_fails_alone(monkeypatch, caplog):
    engine = Engine(fake_config())
    monkeypatch.setattr("quire.engine.scheduler.check_request", lambda *args: 1 / 0)
    engine.add("bad", [1])
    engine.run()
    assert engine.last("bad").finish_reason == "error" and "division" in engine.last("bad").error
    assert "request bad: cannot add it to the queue" in caplog.text


def test_death_is_logged_once_and_told_to_everyone(caplog):
    engine = Engine(fake_config())
    sent(engine)
    engine.put(Hello(), b"late")
    engine.core.die(RuntimeError("out of memory"))
    assert (CLIENT, EngineDead("RuntimeError: out of memory")) in engine.socket.sent and (
        b"late",
        EngineDead("RuntimeError: out of memory"),
    ) in engine.socket.sent
    assert caplog.text.count("the engine failed") == 1


def test_depth_2_schedules_the_next_step_before_it_waits():
    """Steps overlap if the calls come in this order: execute, execute, result, execute, result ..."""
    engine = Engine(fake_config(steps_in_flight=2))
    calls, execute = [], engine.core.executor.execute

    def traced(step):
        calls.append(f"execute {step.step}")
        pending = execute(step)

        class Traced:
            def result(self):
                calls.append(f"result {step.step}")
                return pending.result()

        return Traced()

    engine.core.executor.execute = traced
    engine.add("a", [1, 2], max_tokens=4)
    engine.run()
    first = int(calls[0].split()[1])
    assert calls == [
        f"{what} {first + i}"
        for what, i in [
            ("execute", 0),
            ("execute", 1),
            ("result", 0),
            ("execute", 2),
            ("result", 1),
            ("execute", 3),
            ("result", 2),
            ("result", 3),
        ]
    ]


def test_what_the_workers_put_off_is_done_between_requests(monkeypatch):
    """Deferred work runs one piece at a time, only without requests, and the engine polls for requests in between; then
    the engine sleeps.
    """
    engine = Engine(fake_config())
    pieces = [True, True, True, False]
    done = []

    def work_idle():
        assert not engine.core.in_flight and not engine.scheduler.requests
        done.append(len(engine.outputs))
        return pieces[len(done) - 1]

    monkeypatch.setattr(engine.core.executor, "work_idle", work_idle, raising=False)
    engine.core.chores.append(IdleWork(engine.core.executor))
    engine.turn()
    engine.turn()
    engine.add("first", [1, 2], max_tokens=3)
    engine.run()
    assert done == [0, 0, 1, 1]
    engine.add("second", [1, 2], max_tokens=3)
    engine.run()
    assert len(done) == 4 and len(engine.tokens("second")) == 3
