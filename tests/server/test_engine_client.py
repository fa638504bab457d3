"""The engine client against a scripted engine, and against the real process with the fake executor."""

import asyncio
import contextlib

import pytest

from configs.config import Config
from engine.executor.fake import expected_tokens
from engine.messages import (
    AbortRequests,
    AddRequest,
    Call,
    CallResult,
    EngineDead,
    EngineOutput,
    EngineStats,
    SamplingParams,
    StepOutputs,
    TokenLogprobs,
)
from server.engine_client import EngineCallError, EngineClient, EngineUnavailable
from server.engine_process import EngineProcess
from tests.server.fake_engine import FakeEngine, ready


def request(request_id="r", prompt=(1, 2, 3), **fields):
    return AddRequest(request_id, list(prompt), SamplingParams(**fields.pop("sampling", {})), **fields)


def asynchronous(test):
    """Run an async test to its end, at most 30 s."""
    def run(*args, **kwargs):
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 30))
    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@contextlib.asynccontextmanager
async def connected(max_num_seqs=8, **callbacks):
    client = EngineClient(**callbacks)
    async with FakeEngine() as engine:
        try:
            await client.connect(engine.address)
            await engine.start(max_num_seqs)
            await client.wait_ready()
            yield client, engine
        finally:
            await client.close()


class TestStart:
    @asynchronous
    async def test_progress_then_ready(self):
        seen = []
        async with connected(on_progress=seen.append) as (client, _):
            assert [(p.phase, p.fraction) for p in seen] == [("loading weights", 0.5)]
            assert client.progress.phase == "loading weights"
            assert client.ready == ready() and client.dead is None

    @asynchronous
    async def test_death_while_starting(self):
        async with FakeEngine() as engine:
            client = EngineClient()
            await client.connect(engine.address)
            await engine.receive()
            await engine.send(EngineDead("no such model"))
            with pytest.raises(EngineUnavailable, match="no such model"):
                await client.wait_ready()
            assert client.dead == "no such model"
            await client.close()


class TestRequests:
    @asynchronous
    async def test_outputs_reach_their_request(self):
        async with connected() as (client, engine):
            a, b = client.generate(request("a")), client.generate(request("b", prompt=[7]))
            assert [(await engine.receive()).request_id for _ in range(2)] == ["a", "b"]
            await engine.send(StepOutputs([EngineOutput("b", [1]), EngineOutput("a", [2]), EngineOutput("unknown", [3])]))
            assert (await anext(a)).new_token_ids == [2] and (await anext(b)).new_token_ids == [1]
            await engine.output("a", finish_reason="stop", stop_reason=5)
            assert [o.stop_reason async for o in a] == [5]
            assert client.num_open == 1

    @asynchronous
    async def test_outputs_that_pile_up_are_merged(self):
        logprobs = [TokenLogprobs([i], [-0.5], 1) for i in range(6)]
        async with connected() as (client, engine):
            stream = client.generate(request())
            await engine.receive()
            await engine.output("r", 1, num_cached_tokens=2, prompt_logprobs=logprobs[:1])
            await engine.output("r", 2, 3, logprobs=logprobs[2:4], prompt_logprobs=logprobs[1:2])
            await engine.output("r", 4, logprobs=logprobs[4:5])
            await engine.output("r", finish_reason="length")
            while client.num_open:
                await asyncio.sleep(0.01)
            assert [o async for o in stream] == [EngineOutput("r", [1, 2, 3, 4], "length", None, logprobs[2:5], logprobs[:2], 2)]

    @asynchronous
    async def test_choices_share_a_stream(self):
        async with connected() as (client, engine):
            stream = client.generate(request("r-0"), request("r-1"))
            await engine.receive(), await engine.receive()
            await engine.send(StepOutputs([EngineOutput("r-1", [1], "stop"), EngineOutput("r-0", [2])]))
            assert {o.request_id: o.new_token_ids for o in [await anext(stream), await anext(stream)]} == {"r-1": [1], "r-0": [2]}
            stream.abort("r-1")  # finished: nothing to do
            stream.abort("r-0")
            assert await engine.receive() == AbortRequests(["r-0"])
            assert [o async for o in stream] == []

    @asynchronous
    async def test_closing_aborts_once(self):
        async with connected() as (client, engine):
            stream = client.generate(request())
            await engine.receive()
            reader = asyncio.create_task(anext(stream, None))
            await asyncio.sleep(0)
            await stream.aclose()
            await stream.aclose()
            assert await reader is None
            assert await engine.receive() == AbortRequests(["r"])
            await engine.output("r", 1)  # was on its way
            assert await engine.receives_nothing()
            assert client.num_open == 0
            client.generate(request())  # the name is free again

    @asynchronous
    async def test_names_are_unique(self):
        async with connected() as (client, _):
            client.generate(request())
            with pytest.raises(ValueError, match="'r' is in use"):
                client.generate(request("x"), request("r"))
            assert client.num_open == 1

    @asynchronous
    async def test_requests_before_ready_are_sent_then(self):
        client = EngineClient()
        async with FakeEngine() as engine:
            early = client.generate(request("early"))
            gone = client.generate(request("gone"))
            await client.connect(engine.address)
            await engine.receive()
            await gone.aclose()
            assert await engine.receives_nothing()
            await engine.send(ready())
            assert (await engine.receive()).request_id == "early"
            assert await engine.receives_nothing()
            await client.close()
            assert [o.finish_reason async for o in early] == ["error"]

    @asynchronous
    async def test_stats(self):
        seen = []
        async with connected(on_stats=seen.append) as (_, engine):
            await engine.send(StepOutputs([], EngineStats(num_running=3)))
            while not seen:
                await asyncio.sleep(0.01)
            assert seen == [EngineStats(num_running=3)]

    @asynchronous
    async def test_a_callback_that_raises_stops_nothing(self):
        def fail(stats):
            raise RuntimeError("a bug")

        async with connected(on_stats=fail) as (client, engine):
            asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
            stream = client.generate(request())
            await engine.receive()
            for i in range(20):
                await engine.send(StepOutputs([EngineOutput("r", [i], "length" if i == 19 else None)], EngineStats()))
            assert [i async for o in stream for i in o.new_token_ids] == list(range(20))

    @asynchronous
    async def test_many_messages_at_once(self):
        """More than are read in one turn, while sending goes on: no signal of the socket may be lost."""
        async with connected() as (client, engine):
            stream = client.generate(request())
            await engine.receive()
            for i in range(500):
                await engine.output("r", i, finish_reason="length" if i == 499 else None)
                if i % 7 == 0:
                    client.generate(request(f"s{i}"))
            ids = [i async for o in stream for i in o.new_token_ids]
            assert ids == list(range(500))


class TestCalls:
    @asynchronous
    async def test_answers_and_errors(self):
        async with connected() as (client, engine):
            first, second = asyncio.create_task(client.call("stats", 1, "x")), asyncio.create_task(client.call("nope"))
            a, b = await engine.receive(), await engine.receive()
            assert a == Call(a.call_id, "stats", [1, "x"])
            await engine.send(CallResult(b.call_id, error="unknown method"))
            await engine.send(CallResult(a.call_id, {"num_running": 0}))
            assert await first == {"num_running": 0}
            with pytest.raises(EngineCallError, match="unknown method"):
                await second
            with pytest.raises(TimeoutError):
                await client.call("stats", timeout=0.05)
            await engine.send(CallResult(3, "late"))

    @asynchronous
    async def test_death_ends_calls(self):
        async with connected() as (client, engine):
            call = asyncio.create_task(client.call("stats"))
            await engine.receive()
            await engine.send(EngineDead("out of memory"))
            with pytest.raises(EngineUnavailable, match="out of memory"):
                await call
            with pytest.raises(EngineUnavailable, match="out of memory"):
                await client.call("stats")


class TestRestart:
    @asynchronous
    async def test_open_requests_go_on(self):
        async with connected() as (client, engine), FakeEngine() as second:
            a, b = client.generate(request("a", sampling={"max_tokens": 9})), client.generate(request("b"))
            await engine.receive(), await engine.receive()
            await engine.send(StepOutputs([EngineOutput("a", [1, 2]), EngineOutput("b", [3], "length")]))
            assert (await anext(a)).new_token_ids == [1, 2]
            client.on_dead("signal SIGKILL")
            assert client.ready is None
            late = client.generate(request("late"))
            await client.connect(second.address)
            assert client.dead is None
            await second.start()
            sent = [await second.receive() for _ in range(2)]
            assert sent == [request("a", sampling={"max_tokens": 9}, output_token_ids=[1, 2]), request("late")]
            await second.output("a", 4, finish_reason="stop")
            await second.output("late", 5, finish_reason="stop")
            assert [o.new_token_ids async for o in a] == [[4]]
            assert [o.new_token_ids async for o in late] == [[5]]
            assert [o.new_token_ids async for o in b] == [[3]]
            assert await second.receives_nothing()

    @asynchronous
    async def test_prompt_logprobs_come_once(self):
        entries = [TokenLogprobs([i], [-0.5], 1) for i in range(5)]
        async with connected() as (client, engine), FakeEngine() as second:
            stream = client.generate(request())
            await engine.receive()
            await engine.output("r", prompt_logprobs=entries[:3])
            assert (await anext(stream)).prompt_logprobs == entries[:3]
            client.on_dead("gone")
            await client.connect(second.address)
            await second.start()
            await second.receive()
            for part in (entries[:2], entries[2:4], entries[4:]):
                await second.output("r", prompt_logprobs=part)
            await second.output("r", 1, finish_reason="length")
            assert [e async for o in stream for e in o.prompt_logprobs or ()] == entries[3:]

    @asynchronous
    async def test_two_crashes_in_the_batch_are_enough(self):
        """Only what the batch had room for can have been in it: a request that waited both times is innocent."""
        client = EngineClient()
        streams = [client.generate(request(str(i))) for i in range(4)]
        for crash in range(3):
            async with FakeEngine() as engine:
                await client.connect(engine.address)
                await engine.start(max_num_seqs=2)
                expected = ["0", "1", "2", "3"] if crash < 2 else ["2", "3"]
                assert [(await engine.receive()).request_id for _ in expected] == expected
                assert await engine.receives_nothing()
                client.on_dead("boom")
        for stream in streams[:2]:
            (output,) = [o async for o in stream]
            assert output.finish_reason == "error" and "died 2 times" in output.error
        assert client.num_open == 2
        await client.close("given up")
        for stream in streams[2:]:
            assert [o.error async for o in stream] == ["boom"]

    @asynchronous
    async def test_priority_decides_who_was_in_the_batch(self):
        client = EngineClient()
        client.generate(request("low", priority=5))
        urgent = client.generate(request("urgent", priority=-1))
        for _ in range(2):
            async with FakeEngine() as engine:
                await client.connect(engine.address)
                await engine.start(max_num_seqs=1)
                await engine.receive(), await engine.receive()
                client.on_dead("boom")
        assert (await anext(urgent)).finish_reason == "error"
        assert client.num_open == 1
        await client.close()

    @asynchronous
    async def test_an_engine_that_never_got_ready_condemns_nobody(self):
        client = EngineClient()
        client.generate(request())
        for _ in range(3):
            async with FakeEngine() as engine:
                await client.connect(engine.address)
                await engine.receive()
                client.on_dead("cannot start")
        assert client.num_open == 1
        await client.close()

    @asynchronous
    async def test_after_close(self):
        client = EngineClient()
        await client.close("the server is shutting down")
        await client.close()
        assert [o.error async for o in client.generate(request())] == ["the server is shutting down"]
        with pytest.raises(EngineUnavailable):
            await client.wait_ready()
        assert client.num_open == 0


class TestRealEngine:
    CONFIG = Config.from_flat(distributed_executor_backend="fake", max_num_seqs=4, max_num_batched_tokens=64, log_level="warning")

    @asynchronous
    async def test_requests_survive_a_killed_engine(self):
        """Twelve requests, three per batch slot; the engine is killed half way. Every one gets exactly the tokens it would have had."""
        engines = [EngineProcess(self.CONFIG), EngineProcess(self.CONFIG)]
        client = EngineClient()
        try:
            for engine in engines:
                engine.start()
            await client.connect(engines[0].address)
            await client.wait_ready()
            params = [SamplingParams(max_tokens=200, seed=i) for i in range(12)]
            streams = [client.generate(AddRequest(str(i), [1, 2, i], p)) for i, p in enumerate(params)]

            async def collect(stream):
                return [i async for o in stream for i in o.new_token_ids]

            tasks = [asyncio.create_task(collect(stream)) for stream in streams]
            while client.num_open > 6:
                await asyncio.sleep(0.005)
            engines[0].kill()
            client.on_dead("killed by the test")
            await client.connect(engines[1].address)
            await client.wait_ready()
            for i, (task, p) in enumerate(zip(tasks, params)):
                assert await task == expected_tokens([1, 2, i], p, 4096, 1000)
            assert (await client.call("stats"))["num_running"] == 0
            with pytest.raises(EngineCallError, match="unknown method"):
                await client.call("no_such_method")
        finally:
            await client.close()
            for engine in engines:
                engine.terminate(5)
