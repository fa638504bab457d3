"""Tests deltas from engine outputs: text, alignment, stop strings, choices, errors, and metrics."""

import asyncio
import dataclasses
import itertools
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.configs.config import Config
from quire.engine.messages import (
    AddRequest,
    EngineCalls,
    EngineOutput,
    RequestTiming,
    SamplingParams,
    TokenCounts,
    TokenLogprobs,
)
from quire.server.engines.client import EngineClient, OutputStream
from quire.server.engines.process import EngineProcess
from quire.server.errors import BadRequest, EngineError
from quire.server.generate import deltas
from quire.server.generate.generation import SLICE, Generation
from quire.server.metrics.metrics import Metrics
from quire.server.request.generation_request import GenerationRequest
from quire.server.text.tokenizer import Tokenizer
from tests.helpers.engine.fake_executor import BACKEND, expected_tokens
from tests.helpers.server.tokenizer_kinds import CORPUS, byte_level, llama2
from tests.helpers.server.whole_text import whole_text

EOS = 2  # <|im_end|> of byte_level


class ScriptedClient:
    """`outputs` are handed to the reader one at a time, or all at once if `merged`."""

    index = 0

    def __init__(self, outputs, merged=False):
        self.outputs = list(outputs)
        self.merged = merged
        self.requests: list[AddRequest] = []
        self.aborted: list[str] = []

    def generate(self, request):
        if request.request_id == "taken":
            raise ValueError("request_id 'taken' is in use")
        self.requests.append(request)
        self.stream = OutputStream(self, [choice.request_id for choice in request.choices])
        if self.merged:
            for output in self.outputs:
                self.stream._put(output)
        else:
            self._next()
        return self.stream

    def _next(self):
        if self.outputs and self.outputs[0].request_id in self.stream._unfinished:
            self.stream._put(self.outputs.pop(0))
            asyncio.get_running_loop().call_soon(self._wait)

    def _wait(self):
        if self.stream._pending:
            asyncio.get_running_loop().call_soon(self._wait)
        else:
            self._next()

    def _abort(self, request_ids):
        self.aborted += request_ids


def outputs_of(chunks, finish_reason="length", request_id="r", logprobs=False, **last):
    """One output per chunk; the last one finishes."""
    result = []
    for i, ids in enumerate(chunks):
        fields = {"finish_reason": finish_reason, **last} if i == len(chunks) - 1 else {}
        result.append(
            EngineOutput(
                request_id,
                list(ids),
                logprobs=[TokenLogprobs([t], [-0.5], 1) for t in ids] if logprobs else None,
                **fields,
            )
        )
    return result


def run(tokenizer, client, metrics=None, sampling=None, **fields):
    async def collect():
        request = GenerationRequest("r", fields.pop("prompt", [5, 6]), SamplingParams(**sampling or {}), **fields)
        generation = Generation(client, tokenizer, request, metrics)
        deltas = [delta async for delta in generation]
        await generation.aclose()
        return deltas

    return asyncio.run(asyncio.wait_for(collect(), 20))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.load(byte_level(tmp_path_factory.mktemp("m") / "m"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return Tokenizer.load(llama2(tmp_path_factory.mktemp("m") / "m"))


class TestText:
    @pytest.mark.slow
    @pytest.mark.parametrize("kind", ["tokenizer", "llama"])
    @settings(max_examples=120, deadline=None)
    @given(data=st.data())
    def test_any_chunks_give_the_same(self, request, kind, data):
        """Text, ids and logprobs of all deltas equal the whole; at every moment the reported ids are those with sent
        text.
        """
        tokenizer = request.getfixturevalue(kind)
        ids = tokenizer.encode(data.draw(st.sampled_from([*CORPUS[:5], "🦊🦊 x", "ab"])), False)
        ids = data.draw(
            st.one_of(st.just(ids), st.lists(st.integers(3, tokenizer.vocab_size - 1), min_size=1, max_size=20))
        )
        cuts = sorted({0, len(ids), *data.draw(st.lists(st.integers(0, len(ids)), max_size=8))})
        chunks = [ids[a:b] for a, b in itertools.pairwise(cuts)]
        text = whole_text(tokenizer, ids)
        start = data.draw(st.integers(0, max(0, len(text) - 2)))
        stop = [text[start : start + data.draw(st.integers(1, 4))]] if data.draw(st.booleans()) and text else []
        client = ScriptedClient(outputs_of(chunks, logprobs=True), merged=data.draw(st.booleans()))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("quire.server.generate.generation.SLICE", data.draw(st.sampled_from([1, 3, SLICE])))
            deltas = run(tokenizer, client, prompt=[], stop=stop, sampling={"logprobs": 0})
        got = "".join(d.text for d in deltas)
        got_ids = [i for d in deltas for i in d.token_ids]
        assert [e.token_ids[0] for d in deltas for e in d.logprobs] == got_ids
        assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)
        if stop:
            assert got == text[: text.index(stop[0])]
            assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", stop[0])
            assert got_ids == ids[: len(got_ids)] and stop[0] in tokenizer.decode(got_ids)
            assert stop[0] not in tokenizer.stream(()).push(got_ids[:-1])
        else:
            assert (got, got_ids, deltas[-1].finish_reason, deltas[-1].stop_reason) == (text, ids, "length", None)
        emitted, told = "", []
        for delta in deltas[:-1]:
            emitted, told = emitted + delta.text, told + delta.token_ids
            assert emitted.startswith(tokenizer.stream(()).push(told))

    def test_a_delta_with_nothing_to_tell_is_not_sent(self, tokenizer):
        ids = tokenizer.encode("🦊")
        assert len(ids) > 2
        deltas = run(tokenizer, ScriptedClient(outputs_of([[i] for i in ids])))
        assert [(d.text, d.token_ids) for d in deltas] == [("🦊", ids)]

    def test_the_end_token_has_no_text(self, tokenizer):
        ids = [*tokenizer.encode("hi"), EOS]
        for include, text in ((False, "hi"), (True, "hi<|im_end|>")):
            deltas = run(
                tokenizer,
                ScriptedClient(outputs_of([ids], "stop")),
                skip_special_tokens=False,
                include_stop_str_in_output=include,
            )
            assert "".join(d.text for d in deltas) == text
            assert [i for d in deltas for i in d.token_ids] == ids
            assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", None)

    def test_a_stop_token(self, tokenizer):
        ids = tokenizer.encode("one two")
        deltas = run(tokenizer, ScriptedClient(outputs_of([[i] for i in ids], "stop", stop_reason=ids[-1])))
        assert "".join(d.text for d in deltas) == whole_text(tokenizer, ids[:-1])
        assert [i for d in deltas for i in d.token_ids] == ids
        assert deltas[-1].stop_reason == ids[-1]

    def test_prompt_logprobs_and_cached_tokens(self, tokenizer):
        entries = [TokenLogprobs([i], [-1.0], 1) for i in range(3)]
        script = [
            EngineOutput("r", [], prompt_logprobs=entries[:2], counts=TokenCounts(16)),
            EngineOutput("r", [70], "length", prompt_logprobs=entries[2:]),
        ]
        deltas = run(tokenizer, ScriptedClient(script))
        assert [d.prompt_logprobs for d in deltas] == [entries[:2], entries[2:]]
        assert [d.counts.cached for d in deltas] == [16, 16]
        assert deltas[0].finish_reason is None and deltas[0].logprobs is None


class TestStopStrings:
    def test_the_engine_request_is_aborted(self, tokenizer):
        ids = tokenizer.encode("abc STOP def")
        client = ScriptedClient(outputs_of([[i] for i in ids]))
        deltas = run(tokenizer, client, stop=["STOP"])
        assert "".join(d.text for d in deltas) == "abc "
        assert client.aborted == ["r"] and client.outputs

    def test_in_the_last_output_there_is_nothing_to_abort(self, tokenizer):
        client = ScriptedClient(outputs_of([tokenizer.encode("abc STOP def")]))
        deltas = run(tokenizer, client, stop=["STOP"], include_stop_str_in_output=True)
        assert ("".join(d.text for d in deltas), deltas[-1].finish_reason, deltas[-1].stop_reason) == (
            "abc STOP",
            "stop",
            "STOP",
        )
        assert client.aborted == []

    def test_min_tokens(self, tokenizer):
        ids = tokenizer.encode("b") * 6
        deltas = run(tokenizer, ScriptedClient(outputs_of([ids])), stop=["b"], sampling={"min_tokens": 4})
        assert "".join(d.text for d in deltas) == "bbbb"
        assert [i for d in deltas for i in d.token_ids] == ids[:5]


class TestChoices:
    def test_requests_of_the_choices(self, tokenizer):
        client = ScriptedClient(
            [
                *outputs_of([[70]], request_id="r/1"),
                *outputs_of([[71]], request_id="r/0"),
                *outputs_of([[72]], request_id="r/2"),
            ],
            merged=True,
        )
        deltas = run(tokenizer, client, n=3, sampling={"seed": 2**63 - 2, "max_tokens": 4}, priority=3, cache_salt="s")
        (request,) = client.requests
        assert [(choice.request_id, choice.seed) for choice in request.choices] == [
            ("r/0", 2**63 - 2),
            ("r/1", 2**63 - 1),
            ("r/2", -(2**63)),
        ]
        assert (request.priority, request.cache_salt, request.sampling.max_tokens) == (3, "s", 4)
        assert sorted((d.index, d.token_ids[0]) for d in deltas) == [(0, 71), (1, 70), (2, 72)]

    def test_one_choice_stops_while_others_go_on(self, tokenizer):
        stop = tokenizer.encode("x!")
        script = [
            *outputs_of([stop, stop], request_id="r/0"),
            *outputs_of([tokenizer.encode("yes"), tokenizer.encode(" no")], request_id="r/1"),
        ]
        client = ScriptedClient([script[0], *script[2:]])
        deltas = run(tokenizer, client, n=2, stop=["!"])
        assert {i: "".join(d.text for d in deltas if d.index == i) for i in (0, 1)} == {0: "x", 1: "yes no"}
        assert client.aborted == ["r/0"]

    def test_closing_aborts_the_rest_once(self, tokenizer):
        async def main():
            metrics = Metrics("m", 4096)
            client = ScriptedClient([EngineOutput("r/1", [70], "length"), EngineOutput("r/0", [71])])
            generation = Generation(client, tokenizer, GenerationRequest("r", [5], SamplingParams(), n=3), metrics)
            await anext(generation)
            await generation.aclose()
            await generation.aclose()
            assert sorted(client.aborted) == ["r/0", "r/2"]
            assert metrics._finished["abort"] == 2

        asyncio.run(main())

    def test_nothing_is_sent_before_the_first_read(self, tokenizer):
        client = ScriptedClient([])
        asyncio.run(Generation(client, tokenizer, GenerationRequest("r", [5], SamplingParams())).aclose())
        assert client.requests == client.aborted == []


def test_errors_are_told(tokenizer):
    ids = tokenizer.encode("partial 🦊")[:-1]
    client = ScriptedClient(
        [
            EngineOutput("r", ids),
            EngineOutput("r", [], "error", error="the engine died 2 times while it ran this request"),
        ]
    )
    deltas = run(tokenizer, client)
    assert (deltas[-1].finish_reason, deltas[-1].error) == (
        "error",
        "the engine died 2 times while it ran this request",
    )
    assert "".join(d.text for d in deltas) == whole_text(tokenizer, ids)


def test_a_request_that_the_engine_refuses_is_a_bad_request(tokenizer):
    """400; errors of the engine itself give 500."""

    async def collect(request_id, **fields):
        client = ScriptedClient([EngineOutput("r", [], "error", error="bad_words: no", **fields)])
        await deltas.collect(
            deltas.run([Generation(client, tokenizer, GenerationRequest(request_id, [5], SamplingParams()))]), 1
        )

    with pytest.raises(BadRequest, match="bad_words: no"):
        asyncio.run(collect("r", error_kind="invalid_request"))
    with pytest.raises(BadRequest, match="'taken' is in use"):
        asyncio.run(collect("taken"))
    with pytest.raises(EngineError, match="bad_words: no"):
        asyncio.run(collect("r"))


def test_a_pile_that_ends_in_a_refusal_is_a_bad_request(tokenizer):
    """The last slice reports the error that ends the request."""
    outputs = outputs_of([[100] * (2 * SLICE + 1)], "error", error="bad_words: no", error_kind="invalid_request")

    async def main() -> None:
        generation = Generation(
            ScriptedClient(outputs), tokenizer, GenerationRequest("r", [5], SamplingParams(max_tokens=1000))
        )
        await deltas.collect(deltas.run([generation]), 1)

    with pytest.raises(BadRequest, match="bad_words: no"):
        asyncio.run(main())


class TestRecording:
    def record(self, tokenizer, script, **fields):
        calls = []
        names = (
            "observe_prompt",
            "observe_first_token",
            "observe_tokens",
            "observe_request",
            "observe_group",
            "observe_abort",
        )
        recorder = SimpleNamespace(**{name: lambda *args, name=name: calls.append((name, *args)) for name in names})
        recorder.for_engine = lambda engine: recorder
        run(tokenizer, ScriptedClient(script), recorder, prompt=[5, 6, 7], **fields)
        return calls

    def test_what_is_recorded(self, tokenizer):
        timing = RequestTiming(1, 2, 3, 4, 0, 2)
        calls = self.record(
            tokenizer,
            [
                EngineOutput("r", [70, 71], counts=TokenCounts(1)),
                EngineOutput("r", [72, 73, 74]),
                EngineOutput("r", [75], "length", timing=timing),
            ],
        )
        assert [name for name, *_ in calls] == [
            "observe_prompt",
            "observe_first_token",
            "observe_tokens",
            "observe_tokens",
            "observe_request",
            "observe_group",
        ]
        assert calls[0][1:] == (3, 1) and calls[2][2] == 3 and calls[3][2] == 1
        assert (calls[4][2:4], calls[4][5], calls[5][2]) == (("length", 6), timing, 6)

    def test_a_request_for_no_tokens(self, tokenizer):
        calls = self.record(
            tokenizer, [EngineOutput("r", [], "length", counts=TokenCounts(2))], sampling={"max_tokens": 0}
        )
        assert [name for name, *_ in calls] == ["observe_prompt", "observe_request", "observe_group"] and calls[0][
            1:
        ] == (3, 2)

    def test_a_stop_string_counts_its_tokens(self, tokenizer):
        metrics = Metrics("m", 4096)
        ids = tokenizer.encode("a STOP")
        run(tokenizer, ScriptedClient(outputs_of([[*ids, 70, 70, 70]])), metrics, stop=["STOP"])
        assert metrics._histograms["request_generation_tokens"].total == len(ids)
        assert metrics._finished["stop"] == 1


def test_with_the_engine_process(tokenizer):
    """Choices, stop strings and clients that leave, against the real engine with the fake executor."""

    async def main():
        engine = EngineProcess(
            Config.from_flat(distributed_executor_backend=BACKEND, max_num_seqs=8, log_level="warning")
        )
        engine.start()
        client = EngineClient()
        try:
            await client.connect(engine.address)
            await asyncio.wait_for(client.wait_ready(), 60)

            async def one(index):
                sampling = SamplingParams(max_tokens=60, seed=index)
                whole = [
                    expected_tokens([1, 2, index], SamplingParams(max_tokens=60, seed=index + i), 4096, 1000)
                    for i in range(2)
                ]
                text = whole_text(tokenizer, whole[0])
                stop = [text[len(text) // 2 :][:3]] if index % 3 == 0 else []
                generation = Generation(
                    client, tokenizer, GenerationRequest(f"r{index}", [1, 2, index], sampling, n=2, stop=stop)
                )
                texts, ids = ["", ""], [[], []]
                async for delta in generation:
                    texts[delta.index] += delta.text
                    ids[delta.index] += delta.token_ids
                    if index % 5 == 4 and len(ids[0]) > 10:
                        break
                else:
                    for i in range(2):
                        expected = whole_text(tokenizer, whole[i])
                        assert texts[i] == (expected.split(stop[0])[0] if stop else expected)
                        assert ids[i] == whole[i][: len(ids[i])]
                await generation.aclose()

            await asyncio.gather(*(one(index) for index in range(20)))
            assert client.num_open == 0
            while (stats := await client.call(EngineCalls.stats))["num_running"] or stats["num_waiting"]:
                await asyncio.sleep(0.01)
            assert stats["kv_cache_usage"] == 0
        finally:
            await client.close()
            engine.terminate(5)

    asyncio.run(main())


def test_a_pile_is_read_in_slices(tokenizer):
    """A long backlog of one choice does not delay others, and the deltas equal those of the whole."""
    tokens = [100 + i % 300 for i in range(10 * SLICE + 3)]
    outputs = outputs_of([tokens], logprobs=True)
    turns = 0

    async def main() -> list:
        nonlocal turns
        generation = Generation(
            ScriptedClient(outputs, merged=True),
            tokenizer,
            GenerationRequest("r", [3], SamplingParams(logprobs=0), stop=["never there"]),
        )

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counter = asyncio.create_task(count())
        deltas = [delta async for delta in generation]
        counter.cancel()
        return deltas

    deltas = asyncio.run(main())
    assert turns >= 10 and len(deltas) == 11
    assert [i for delta in deltas for i in delta.token_ids] == tokens and sum(
        len(delta.logprobs) for delta in deltas
    ) == len(tokens)
    assert "".join(delta.text for delta in deltas) == whole_text(tokenizer, tokens) and [
        delta.finish_reason for delta in deltas
    ] == [None] * 10 + ["length"]


def test_a_stage_transforms_the_deltas_between_generation_and_dialect(tokenizer):
    """The place of a parser for tool calls or reasoning: it may hold text back, split deltas, and flush at the end."""

    async def hold_back_one(stream):
        held = {}
        async for delta in stream:
            text, held[delta.index] = held.get(delta.index, "") + delta.text[:-1], delta.text[-1:]
            if delta.finish_reason is not None:
                text += held.pop(delta.index)
            yield dataclasses.replace(delta, text=text.upper())

    async def main(stage):
        ids = tokenizer.encode("once upon a time", add_special_tokens=False)
        client = ScriptedClient(outputs_of([ids[:2], ids[2:3], ids[3:]]))
        generation = Generation(client, tokenizer, GenerationRequest("r", [5], SamplingParams()))
        return [delta async for delta in deltas.run([generation], stage=stage)]

    plain, staged = asyncio.run(main(deltas.identity)), asyncio.run(main(hold_back_one))
    assert "".join(delta.text for delta in plain) == "once upon a time"
    assert "".join(delta.text for delta in staged) == "ONCE UPON A TIME"
    assert [delta.text for delta in staged] != [delta.text.upper() for delta in plain]
    assert [delta.token_ids for delta in staged] == [delta.token_ids for delta in plain]


def test_a_stage_passes_errors_on_and_closing_aborts(tokenizer):
    async def main():
        client = ScriptedClient([EngineOutput("r", [5]), EngineOutput("r", [], "error", error="no")])
        generation = Generation(client, tokenizer, GenerationRequest("r", [5], SamplingParams()))
        with pytest.raises(EngineError, match="no"):
            await deltas.collect(deltas.run([generation], stage=same), 1)
        client = ScriptedClient([EngineOutput("r", [5]), EngineOutput("r", [6])])
        generation = Generation(client, tokenizer, GenerationRequest("r", [5], SamplingParams()))
        stream = deltas.run([generation], stage=same)
        await anext(stream)
        await stream.aclose()
        return client.aborted

    async def same(stream):
        async for delta in stream:
            yield delta

    assert asyncio.run(main()) == ["r"]
