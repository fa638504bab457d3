"""The service that compiles structures: cache, limits, processes that are killed."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from quire.server.errors import BadRequest
from quire.server.structured import service
from quire.server.structured.service import Structures
from quire.server.structured.structure import Structure
from tests.server.structured.walk import EOS, SIZE, SPECIALS, TOKENS


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


def test_a_process_that_does_not_answer_is_killed_and_replaced(monkeypatch):
    async def act(structures, state):
        await structures.grammar(Structure(kind="regex", value="a"), state)
        child = structures._processes[0]._child
        child.send_signal(19)  # SIGSTOP: it hangs
        monkeypatch.setattr(service, "TIMEOUT", 0.3)
        with pytest.raises(BadRequest, match="too much time or memory"):
            await structures.grammar(Structure(kind="regex", value="b"), state)
        assert child.poll() is not None
        monkeypatch.setattr(service, "TIMEOUT", 5.0)
        assert "c" in await structures.grammar(Structure(kind="regex", value="c"), state)

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
        assert all(isinstance(result, str | BadRequest) for result in results), results
        assert loop.time() - started < 5.0 * len(HOSTILE) / service.NUM_PROCESSES
        assert longest < 1.0
        assert await structures.grammar(Structure(kind="regex", value="z"), state)

    use(act)
