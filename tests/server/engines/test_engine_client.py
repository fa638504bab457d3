"""The engine client against a scripted engine, and against the real process with the fake executor."""

import asyncio
import contextlib
import dataclasses
import functools
import itertools

import msgspec
import pytest

from quire.configs.config import Config
from quire.engine.messages import (
    AbortRequests,
    AddRequest,
    Call,
    CallResult,
    Choice,
    EngineCalls,
    EngineDead,
    EngineOutput,
    EngineStats,
    SamplingParams,
    StepOutputs,
    TokenCounts,
    TokenLogprobs,
)
from quire.server.engines.client import EngineCallError, EngineClient, EngineUnavailable
from quire.server.engines.process import EngineProcess
from quire.server.engines.quarantine import Quarantine
from quire.server.engines.turns import Turns
from tests.helpers.engine.fake_executor import BACKEND, expected_tokens
from tests.helpers.server.fake_engine import FakeEngine, ready


def request(request_id="r", prompt=(1, 2, 3), **fields):
    return AddRequest(request_id, list(prompt), SamplingParams(**fields.pop("sampling", {})), **fields)


def without_age(message):
    assert message.age > 0
    return msgspec.structs.replace(message, age=0.0)


def asynchronous(test):
    """Run an async test to its end, at most 30 s."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 30))

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
            await engine.send(
                StepOutputs([EngineOutput("b", [1]), EngineOutput("a", [2]), EngineOutput("unknown", [3])])
            )
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
            await engine.output("r", 1, counts=TokenCounts(2), prompt_logprobs=logprobs[:1])
            await engine.output("r", 2, 3, logprobs=logprobs[2:4], prompt_logprobs=logprobs[1:2])
            await engine.output("r", 4, logprobs=logprobs[4:5])
            await engine.output("r", finish_reason="length")
            while client.num_open:
                await asyncio.sleep(0.01)
            whole = EngineOutput("r", [1, 2, 3, 4], "length", None, logprobs[2:5], logprobs[:2], TokenCounts(2))
            assert [o async for o in stream] == [whole]

    @asynchronous
    async def test_choices_share_a_stream(self):
        async with connected() as (client, engine):
            stream = client.generate(request("r-0", siblings=[Choice("r-1", 1)]))
            assert (await engine.receive()).siblings == [Choice("r-1", 1)]
            await engine.send(StepOutputs([EngineOutput("r-1", [1], "stop"), EngineOutput("r-0", [2])]))
            assert {o.request_id: o.new_token_ids for o in [await anext(stream), await anext(stream)]} == {
                "r-1": [1],
                "r-0": [2],
            }
            stream.abort("r-1")  # already finished
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
            await engine.output("r", 1)  # was in transit
            assert await engine.receives_nothing()
            assert client.num_open == 0
            client.generate(request())  # the id is free again

    @asynchronous
    async def test_names_are_unique(self):
        async with connected() as (client, _):
            client.generate(request())
            with pytest.raises(ValueError, match="'r' is in use"):
                client.generate(request("x", siblings=[Choice("r", 0)]))
            assert client.num_open == 1

    @asynchronous
    async def test_waiting_prompts_are_counted(self):
        async with connected() as (client, engine):
            a, b, c = (
                client.generate(request(name, prompt=range(size), siblings=[Choice(name * 2, 1)]))
                for name, size in (("a", 10), ("b", 20), ("c", 40))
            )
            assert (client.num_open, client.num_waiting_tokens) == (6, 140)
            for _ in range(3):
                await engine.receive()
            await engine.output("aa", 1)
            assert (await anext(a)).new_token_ids == [1]
            assert (client.num_open, client.num_waiting_tokens) == (6, 130)
            b.abort("b")
            assert (client.num_open, client.num_waiting_tokens) == (5, 110)
            await b.aclose()
            assert (client.num_open, client.num_waiting_tokens) == (4, 90)
            await a.aclose()
            await c.aclose()
            assert (client.num_open, client.num_waiting_tokens) == (0, 0)

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
        """More messages than one turn reads, while sending continues: no readiness edge of the socket may be lost."""
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
            first, second = (asyncio.create_task(client.call(*c)) for c in ((EngineCalls.stats, 1, "x"), (len,)))
            a, b = await engine.receive(), await engine.receive()
            assert a == Call(a.call_id, "stats", [1, "x"])
            await engine.send(CallResult(b.call_id, error="unknown method"))
            await engine.send(CallResult(a.call_id, {"num_running": 0}))
            assert await first == {"num_running": 0}
            with pytest.raises(EngineCallError, match="unknown method"):
                await second
            with pytest.raises(TimeoutError):
                await client.call(EngineCalls.stats, timeout=0.05)
            await engine.send(CallResult(3, "late"))

    @asynchronous
    async def test_death_ends_calls(self):
        async with connected() as (client, engine):
            call = asyncio.create_task(client.call(EngineCalls.stats))
            await engine.receive()
            await engine.send(EngineDead("out of memory"))
            with pytest.raises(EngineUnavailable, match="out of memory"):
                await call
            with pytest.raises(EngineUnavailable, match="out of memory"):
                await client.call(EngineCalls.stats)


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
            assert without_age(await second.receive()) == request(
                "a", sampling={"max_tokens": 9}, output_token_ids=[1, 2]
            )
            await second.output("a", 4, finish_reason="stop")
            assert without_age(await second.receive()) == request("late")
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
    async def test_only_what_the_batch_had_room_for_is_suspect(self):
        """Higher priorities first. Requests that were queued wait until the suspects are cleared."""
        client = EngineClient()
        waited, urgent = client.generate(request("waited", priority=5)), client.generate(request("urgent", priority=-1))
        for crash in range(2):
            async with FakeEngine() as engine:
                await client.connect(engine.address)
                await engine.start(max_num_seqs=1)
                for name in ["waited", "urgent"][crash:]:
                    assert (await engine.receive()).request_id == name
                assert await engine.receives_nothing()
                client.on_dead("boom")
                assert client.num_explained_deaths == crash + 1
        output = await anext(urgent)
        assert output.finish_reason == "error" and "died 2 times" in output.error
        async with FakeEngine() as engine:
            await client.connect(engine.address)
            await engine.start(max_num_seqs=1)
            assert (await engine.receive()).request_id == "waited"
            client.generate(request("new"))
            assert (await engine.receive()).request_id == "new"
            await client.close("given up")
        assert [o.error async for o in waited] == ["given up"]

    @pytest.mark.slow
    @pytest.mark.parametrize(("poison", "tokens_at_death"), itertools.product([0, 3, 8], [0, 20]))
    @asynchronous
    async def test_one_that_kills_engines_fails_alone(self, poison, tokens_at_death):
        """Nine requests and a tenth that arrives later; each engine dies when it has the tenth: at most three do."""
        client, num_deaths = EngineClient(), 0
        streams = [client.generate(request(str(i), siblings=[Choice(f"{i}b", 1)] if i == 4 else [])) for i in range(9)]
        answers = [asyncio.create_task(self.collect(stream)) for stream in streams]
        names = {str(i) for i in range(9)} | {"4b"}
        while client.num_open:
            async with FakeEngine() as engine:
                await client.connect(engine.address)
                await engine.start(max_num_seqs=16)
                if await self.serve(engine, names, str(poison), 0 if num_deaths else tokens_at_death, client):
                    client.on_dead("boom")
                    num_deaths += 1
                    if num_deaths == 1:
                        late = client.generate(request("late"))
                        answers.append(asyncio.create_task(self.collect(late)))
                        names.add("late")
        results = await asyncio.gather(*answers)
        for i, outputs in enumerate(results):
            if i == poison:
                assert outputs[-1].finish_reason == "error" and "while it ran this request" in outputs[-1].error
            else:
                assert [o.finish_reason for o in outputs if o.finish_reason] == ["length"] * (2 if i == 4 else 1)
        assert num_deaths == (3 if tokens_at_death else 2) and client.num_explained_deaths == num_deaths
        await client.close()

    @pytest.mark.slow
    @pytest.mark.parametrize("tokens_at_death", [1, 5, 12, 25])
    @pytest.mark.parametrize("poisons", [("3",), ("0", "8")], ids=str)
    @asynchronous
    async def test_one_that_kills_every_engine_later_fails_alone(self, poisons, tokens_at_death):
        """Every engine dies when one of the requests has received so many tokens from it, so that short trials pass."""
        client, num_deaths = EngineClient(), 0
        answers = [asyncio.create_task(self.collect(client.generate(request(str(i))))) for i in range(9)]
        while client.num_open:
            async with FakeEngine() as engine:
                await client.connect(engine.address)
                await engine.start(max_num_seqs=16)
                if await self.serve_until(engine, poisons, tokens_at_death, client):
                    num_deaths += 1
                    client.on_dead("boom")
        for i, outputs in enumerate(await asyncio.gather(*answers)):
            assert outputs[-1].finish_reason == ("error" if str(i) in poisons else "length")
        assert num_deaths <= 5 * len(poisons) and client.num_explained_deaths == num_deaths
        await client.close()

    async def serve_until(self, engine, poisons, num_tokens, client):
        """Run requests until all have ended, or one of `poisons`, which are longer, has received `num_tokens` here."""
        received, running = {}, {}
        while client.num_open:
            while not await engine.receives_nothing(0.01):
                await self.take(engine, running)
            for name in list(running):
                received[name] = received.get(name, 0) + 1
                if name in poisons and received[name] >= num_tokens:
                    return True
                running[name] += 1
                last = running[name] == (300 if name in poisons else 30)
                await engine.output(name, running[name], finish_reason="length" if last else None)
                if last:
                    del running[name]
            await asyncio.sleep(0.001)
        return False

    @asynchronous
    async def test_one_whose_client_left_explains_a_death(self):
        """The engine may still run it. Later it does not: an idle engine's death counts."""
        for num_messages, explained in ((0, 1), (6, 0)):
            async with connected() as (client, engine):
                stream = client.generate(request())
                await engine.receive()
                await stream.aclose()
                assert await engine.receive() == AbortRequests(["r"])
                for _ in range(num_messages):
                    await engine.send(StepOutputs([]))
                while client.num_messages < num_messages:
                    await asyncio.sleep(0.001)
                client.on_dead("boom")
                assert client.num_explained_deaths == explained

    async def collect(self, stream):
        return [output async for output in stream]

    async def take(self, engine, running):
        """Receive a message, and keep in `running` how many tokens each request has."""
        match await engine.receive():
            case AddRequest() as message:
                running |= {choice.request_id: len(choice.output_token_ids) for choice in message.choices}
            case AbortRequests(request_ids):
                for name in request_ids:
                    running.pop(name, None)
            case Call(call_id):
                await engine.send(CallResult(call_id, {}))

    async def serve(self, engine, names, poison, tokens_at_death, client):
        """Run requests until all have ended, or until the tenth has received `tokens_at_death` tokens. Returns whether
        the engine dies of it.
        """
        running = {}
        for turn in itertools.count():
            while not await engine.receives_nothing(0.02):
                await self.take(engine, running)
            if poison in running and turn >= tokens_at_death:
                return True
            if not client.num_open:
                return False
            for name in list(running):
                running[name] += 1
                last = running[name] == 30
                await engine.output(name, running[name], finish_reason="length" if last else None)
                if last:
                    del running[name]

    @asynchronous
    async def test_what_ends_during_its_trial_is_cleared(self):
        client = EngineClient()
        streams = [client.generate(request(str(i))) for i in range(3)]
        async with FakeEngine() as engine:
            await client.connect(engine.address)
            await engine.start()
            for _ in streams:
                await engine.receive()
            client.on_dead("boom")
        async with FakeEngine() as engine:
            await client.connect(engine.address)
            await engine.start()
            assert (await engine.receive()).request_id == "0" and await engine.receives_nothing()
            await streams[0].aclose()
            assert await engine.receive() == AbortRequests(["0"])
            await streams[2].aclose()  # while it waits
            assert (await engine.receive()).request_id == "1"
            await engine.output("1", 5, finish_reason="stop")
            assert [o.new_token_ids async for o in streams[1]] == [[5]]
            client.generate(request("new"))
            assert (await engine.receive()).request_id == "new"
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


@dataclasses.dataclass(eq=False)
class One:
    is_open: bool = True
    num_received: int = 0
    num_crashes: int = 0
    num_solo_deaths: int = 0
    runs_to_end: bool = False


class TestSeveralFrontends:
    def test_one_that_dies_with_another_frontends_is_not_convicted(self):
        """The other frontend had not heard of the trial when it sent the killer."""
        innocent, killer = One(), One()
        first, second = Quarantine(num_needed=2), Quarantine(num_needed=2)
        first.on_death([innocent]), second.on_death([killer])
        assert second.next_trial() == [killer]
        killer.num_received = 4
        assert not second.next_trial() and not second.active
        assert first.next_trial() == [innocent]
        first.on_death([innocent]), second.on_death([killer])
        assert first.culprit is None and second.culprit is None and killer.runs_to_end
        assert first.next_trial() == [innocent]
        innocent.num_received = 4
        assert not first.next_trial() and not first.active
        killer.num_received = 0
        assert second.next_trial() == [killer]
        killer.num_received = 1000
        assert not second.next_trial() and second.active
        for _ in range(2):
            second.on_death([killer])
            second.next_trial()
        assert second.culprit is killer and not second.active

    def test_turns(self):
        turns = Turns()
        assert turns.note(1, True) and turns.holder == 1
        assert not turns.note(0, True) and not turns.note(1, True) and turns.holder == 1
        assert turns.note(1, False) and turns.holder == 0
        assert not turns.note(2, False)
        assert turns.note(0, False) and turns.holder is None

    @asynchronous
    async def test_suspects_wait_for_their_turn_and_others_send_nothing_new(self):
        client, said = EngineClient(), []
        client.share(1, said.append)
        answer = asyncio.create_task(TestRestart().collect(client.generate(request("killer"))))
        for number in range(3):
            async with FakeEngine() as engine:
                await client.connect(engine.address)
                await engine.start()
                if number:
                    client.set_turn(0)
                    other = client.generate(request("other"))
                    assert await engine.receives_nothing(0.1)
                    await other.aclose()
                    client.set_turn(1)
                assert (await engine.receive()).request_id == "killer"
                client.on_dead("boom")
        assert "the engine died 3 times" in (await answer)[-1].error and said == [True, True, False]
        async with FakeEngine() as engine:
            client.set_turn(0)
            await client.connect(engine.address)
            client.generate(request("late"))
            await engine.start()
            assert await engine.receives_nothing(0.1)
            client.set_turn(None)
            assert (await engine.receive()).request_id == "late"
        await client.close()


class TestRealEngine:
    SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 64}
    CONFIG = Config.from_flat(distributed_executor_backend=BACKEND, log_level="warning", **SIZES)

    @asynchronous
    async def test_requests_survive_a_killed_engine(self):
        """Twelve requests, three per batch slot; the engine is killed half way.

        Each request gets the same tokens as without the crash.
        """
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
            assert (await client.call(EngineCalls.stats))["num_running"] == 0
            with pytest.raises(EngineCallError, match="unknown method"):
                await client.call(lambda engine: None)
        finally:
            await client.close()
            for engine in engines:
                engine.terminate(5)
