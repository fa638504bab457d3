"""The service that compiles structures: cache, limits, processes that are killed."""

from __future__ import annotations

import asyncio
import signal
from types import SimpleNamespace

import pytest

from quire.server.errors import BadRequest, Unavailable
from quire.server.generate import structures as service
from quire.server.generate.structures import Structures
from quire.server.structured import compile_process, process
from quire.server.structured.structure import Structure
from tests.server.structured.walk import COMPILER, EOS, SIZE, SPECIALS, TOKENS


class Client:
    def __init__(self) -> None:
        self.vocabularies: list[bytes] = []

    def set_vocabulary(self, vocabulary: bytes) -> None:
        self.vocabularies.append(vocabulary)


def state() -> SimpleNamespace:
    model = SimpleNamespace(vocab_size=SIZE, eos_token_ids=[EOS])
    tokenizer = SimpleNamespace(token_bytes=lambda i: TOKENS.tokens[i], special_ids=frozenset(SPECIALS.values()))
    return SimpleNamespace(client=Client(), model=model, tokenizer=tokenizer)


def use(act) -> None:
    async def run() -> None:
        structures = Structures()
        try:
            await act(structures, state())
        finally:
            structures.close()

    asyncio.run(run())


def test_grammars_are_compiled_once_and_the_engine_gets_the_vocabulary():
    async def act(structures, state):
        one = Structure(kind="regex", value="a+", param="regex")
        same = Structure(kind="regex", value="a+", param="guided_regex")
        first, second = await asyncio.gather(structures.grammar(one, state), structures.grammar(same, state))
        assert first is second is await structures.grammar(one, state)
        with pytest.raises(BadRequest, match=r"guided_regex: .*unclosed group") as caught:
            await structures.grammar(Structure(kind="regex", value="(", param="guided_regex"), state)
        assert caught.value.param == "guided_regex"
        assert len(state.client.vocabularies) == 1

    use(act)


def test_a_server_is_warm_before_its_first_structure(monkeypatch):
    monkeypatch.setattr(service, "WARM_AFTER", 0.01)

    async def act(structures, state):
        structures.warm(state)
        structures.warm(state)
        await structures._warming
        assert len(state.client.vocabularies) == len(structures._idle) == 1
        process = structures._idle[0]
        await structures.grammar(Structure(kind="regex", value="b"), state)
        assert structures._idle == [process]

    use(act)


def test_the_cache_is_bounded_in_bytes(monkeypatch):
    monkeypatch.setattr(service, "CACHE_BYTES", 3000)

    async def act(structures, state):
        for i in range(12):
            await structures.grammar(Structure(kind="regex", value=f"a{i}"), state)
        assert 0 < structures._num_bytes <= 3000
        assert len(structures._grammars) < 12

    use(act)


def test_size_is_bounded():
    async def act(structures, state):
        with pytest.raises(BadRequest, match="more than 262144 bytes"):
            await structures.grammar(Structure(kind="regex", value="a" * 300_000), state)

    use(act)


@pytest.mark.slow
def test_a_process_that_does_not_answer_is_replaced():
    """Also with a structure that does not fit into the pipe to it."""

    async def act(structures, state):
        for value in ("b", "b" * 200_000):
            await structures.grammar(Structure(kind="choice", value=["a", value[:2]]), state)
            stopped = structures._idle[0]
            stopped._child.send_signal(signal.SIGSTOP)
            stopped.max_silence = 0.3
            assert await structures.grammar(Structure(kind="choice", value=[value]), state)
            assert stopped._child.poll() is not None

    use(act)


@pytest.mark.slow
def test_ten_seconds_without_progress_suffice():
    """For a small and a large structure; those of others are compiled meanwhile."""
    large = Structure(kind="choice", value=[f"word {i} {'x' * 20}" for i in range(7000)])

    async def act(structures, state):
        await structures.grammar(Structure(kind="regex", value="a"), state)
        stopped, loop = structures._idle[0]._child, asyncio.get_running_loop()
        stopped.send_signal(signal.SIGSTOP)
        started = loop.time()
        waiting = asyncio.ensure_future(structures.grammar(Structure(kind="regex", value="b"), state))
        while structures._idle:
            await asyncio.sleep(0.005)
        assert await structures.grammar(large, state)
        assert not waiting.done()
        assert await waiting
        assert stopped.poll() is not None
        for one in structures._idle:
            one._child.send_signal(signal.SIGSTOP)
        larger = Structure(kind="choice", value=[*large.value, "z"])
        assert await structures.grammar(larger, state)
        assert loop.time() - started < 50.0  # twice ten seconds, and the compilations

    use(act)


def test_silence_ends_with_any_progress():
    """A large structure on a busy machine: as long as the process gets some time, it is not silent."""
    now, progress = 0.0, 0.0
    silence = process.Silence(lambda: progress, lambda: now)
    for _ in range(400):
        now += 9.0
        assert silence.seconds() == 9.0
        now, progress = now + 0.5, progress + 0.01
        assert silence.seconds() == 0.0
    now += process.MAX_SILENCE
    assert silence.seconds() == process.MAX_SILENCE


def test_a_process_that_was_killed_while_idle_is_replaced():
    async def act(structures, state):
        await structures.grammar(Structure(kind="regex", value="a"), state)
        for wait in (True, False):
            killed = structures._idle[0]
            killed._child.kill()
            if wait:
                killed._child.wait()
            assert await structures.grammar(Structure(kind="regex", value=f"b{wait}"), state)
            assert structures._idle[0] is not killed
            killed.end()

    use(act)


SLOW = Structure(kind="regex", value="(((a{1000}){1000}){1000}){1000}b")  # beyond the limit of memory


def test_what_exceeds_the_limits_twice_is_unavailable_and_tried_again_later(monkeypatch):
    async def act(structures, state):
        asked = []
        ask = process.CompileProcess.ask

        def dies(self, structure):
            asked.append(self)
            if structure == service._key(SLOW):
                raise process.ProcessDied("at its limit")
            return ask(self, structure)

        monkeypatch.setattr(process.CompileProcess, "ask", dies)
        for _ in range(2):
            with pytest.raises(Unavailable, match="too much time or memory") as caught:
                await structures.grammar(SLOW, state)
            assert caught.value.headers["Retry-After"]
        assert len(set(asked)) == 4
        monkeypatch.setattr(process.CompileProcess, "ask", lambda self, structure: ask(self, structure))
        await structures.grammar(Structure(kind="regex", value="a"), state)

    use(act)


@pytest.mark.slow
def test_a_process_that_makes_progress_goes_on():
    """One that gets a little CPU time now and then is not replaced, however long it takes."""

    async def act(structures, state):
        await structures.grammar(Structure(kind="regex", value="a"), state)
        one, loop = structures._idle[0], asyncio.get_running_loop()
        one.max_silence = 1.0
        schema = {"type": "object", "properties": {f"field{i}": {"type": "string"} for i in range(300)}}
        compiling = asyncio.ensure_future(structures.grammar(Structure(kind="json_schema", value=schema), state))
        started = loop.time()
        while loop.time() - started < 4 * one.max_silence:
            used = one._cpu_time()
            while one._cpu_time() == used and not compiling.done():
                await asyncio.sleep(0.002)
            one._child.send_signal(signal.SIGSTOP)
            await asyncio.sleep(one.max_silence / 3)
            one._child.send_signal(signal.SIGCONT)
        assert await compiling
        assert structures._idle == [one]

    use(act)


@pytest.fixture
def processes(monkeypatch) -> list[process.CompileProcess]:
    """Those that are made."""
    made = []

    class Recorded(process.CompileProcess):
        def __init__(self, vocabulary: bytes):
            super().__init__(vocabulary)
            made.append(self)

    monkeypatch.setattr(service, "CompileProcess", Recorded)
    return made


async def stop(one: process.CompileProcess) -> None:
    while one._child is None:
        await asyncio.sleep(0.005)
    one._child.send_signal(signal.SIGSTOP)


@pytest.mark.parametrize("value", ["z", "held 30"])
def test_a_tenant_delays_no_other(processes, value):
    """Whatever its structures do to their processes, and also if the other asks for one of them."""

    async def act(structures, state):
        held = [Structure(kind="choice", value=[f"held {i}"]) for i in range(40)]
        waiting = [asyncio.ensure_future(structures.grammar(one, state, "greedy")) for one in held]
        while len(processes) < service.PER_TENANT:
            await asyncio.sleep(0.005)
        stopped = list(processes)
        await asyncio.gather(*map(stop, stopped))
        assert await structures.grammar(Structure(kind="choice", value=[value]), state, "other")
        assert all(one._child.poll() is None for one in stopped)
        assert len(processes) == service.PER_TENANT + 1
        for one in waiting:
            one.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    use(act)


def test_what_nobody_waits_for_is_dropped_and_tenants_take_turns():
    async def act(structures, state):
        await structures.grammar(Structure(kind="regex", value="a"), state)
        slow = {f"p{i}": {"pattern": f"x{i}*$"} for i in range(2000)}
        hanging = [Structure(kind="json_schema", value={"properties": {**slow, "q": {"const": i}}}) for i in range(20)]
        waiting = [asyncio.ensure_future(structures.grammar(one, state, "greedy")) for one in hanging]
        twice = asyncio.ensure_future(structures.grammar(hanging[0], state, "other"))
        await asyncio.sleep(0.2)
        loop = asyncio.get_running_loop()
        started = loop.time()
        for one in waiting:
            one.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert list(structures._compiling) == [("other", service._key(hanging[0]))]
        twice.cancel()
        await asyncio.gather(twice, return_exceptions=True)
        assert not structures._compiling
        assert await structures.grammar(Structure(kind="regex", value="z"), state, "other")
        assert loop.time() - started < 3.0

    use(act)


def test_every_mistake_is_an_answer(monkeypatch):
    """An exception that no check foresaw is a refusal, and the process lives on."""
    with monkeypatch.context() as patch:
        patch.setattr(compile_process, "to_lark", lambda *arguments: {}["missing"])
        answer = COMPILER.compile(Structure(kind="regex", value="a"))
    assert answer.grammar is None
    assert "cannot be compiled: KeyError" in answer.error

    async def act(structures, state):
        for value in (
            {"dependencies": {"a": ["b"]}, "dependentSchemas": "x"},
            {"const": float("inf")},
            {"minimum": float("nan")},
            {"multipleOf": 10**400, "type": "integer"},
        ):
            with pytest.raises(BadRequest):
                await structures.grammar(Structure(kind="json_schema", value=value), state)
        assert len(structures._idle) == 1

    use(act)


def test_integers_of_any_size():
    async def act(structures, state):
        for number in (2**64, -(2**63) - 1, 10**300):
            assert await structures.grammar(Structure(kind="json_schema", value={"const": number}), state)
        for number in (10**400, 10**5000):
            with pytest.raises(BadRequest):
                await structures.grammar(Structure(kind="json_schema", value={"const": number}), state)

    use(act)


def test_a_model_without_an_end_is_refused():
    async def act(structures, state):
        state.model.eos_token_ids = []
        with pytest.raises(BadRequest, match="no end-of-sequence token"):
            await structures.grammar(Structure(kind="regex", value="a"), state)

    use(act)


HOSTILE = [
    Structure(kind="regex", value="(" * 5000 + "a" + ")" * 5000),
    Structure(kind="regex", value="(((a{1000}){1000}){1000}){1000}b"),
    Structure(kind="regex", value="(.*a){300}" + ".{1000}"),
    Structure(kind="regex", value="|".join(f".*{i}.*" for i in range(2000))),
    Structure(kind="json_schema", value={"type": "string", "minLength": 10**9}),
    Structure(kind="json_schema", value={"type": "array", "minItems": 10**12, "items": {"type": "null"}}),
    Structure(kind="json_schema", value={"type": "integer", "multipleOf": 1e-300}),
    Structure(kind="json_schema", value={"allOf": [{"anyOf": [{"minimum": i}, {"maxLength": i}]} for i in range(40)]}),
    Structure(kind="json_schema", value={"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
    Structure(kind="json_schema", value={"properties": {f"p{i}": {"pattern": f"x{i}*$"} for i in range(3000)}}),
    Structure(kind="grammar", value="start: start start | start"),
    Structure(kind="grammar", value="root ::= root"),
    Structure(kind="grammar", value="root ::= " + "(" * 3000),
]


@pytest.mark.slow
def test_hostile_structures_end_in_time_and_stop_nobody():
    """Each is compiled or refused within the limits, while the event loop runs on; the service works afterwards."""

    async def act(structures, state):
        await structures.grammar(Structure(kind="regex", value="a"), state)
        longest, last, loop = 0.0, asyncio.get_running_loop().time(), asyncio.get_running_loop()

        async def watch() -> None:
            nonlocal longest, last
            while True:
                await asyncio.sleep(0.01)
                longest, last = max(longest, loop.time() - last), loop.time()

        watching = asyncio.create_task(watch())
        started = loop.time()
        results = await asyncio.gather(*(structures.grammar(one, state) for one in HOSTILE), return_exceptions=True)
        watching.cancel()
        assert all(isinstance(result, str | BadRequest | Unavailable) for result in results), results
        assert loop.time() - started < 10.0 * len(HOSTILE) / service.PER_TENANT
        assert longest < 1.0
        assert await structures.grammar(Structure(kind="regex", value="z"), state)

    use(act)
