"""An answer that ends inside a character ends before it, in every dialect and parser, streamed or not."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace

import pytest
import tokenizers
from tokenizers import AddedToken

from quire.engine.messages import EngineOutput
from quire.server.offline.llm import LLM
from quire.server.offline.params import SamplingParams
from quire.server.text.detokenizer import Detokenizer
from tests.helpers.engine.fake_executor import BACKEND
from tests.helpers.server.dialects import ASK, DIALECTS
from tests.helpers.server.light_model import write_light_model
from tests.helpers.server.running import MODEL, poll
from tests.helpers.server.scripted import Script, Stream, scripted_server, write_folder
from tests.helpers.server.templates import QWEN3_TOOLS
from tests.server.batches.test_batches import line, results, run
from tests.server.parsers.answers import add_up, parse, parser
from tests.server.parsers.renderers import RENDERERS

FIM = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
ANSWER = "Say é 🦙🦙 你"
THOUGHTS = "<think>\nhm 🦙\n</think>\n\n"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "🦙é"}}\n</tool_call>'


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = write_folder(tmp_path_factory.mktemp("half"), QWEN3_TOOLS)
    backend = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")
    backend.add_special_tokens([AddedToken(text, special=True) for text in FIM])
    backend.save(f"{folder}/tokenizer.json")
    with open(f"{folder}/config.json", "w") as file:
        json.dump({"vocab_size": backend.get_vocab_size()}, file)
    with scripted_server(folder, batch_dir=str(tmp_path_factory.mktemp("batches"))) as (server, script):
        yield server, script


def cuts(tokenizer, text: str):
    """Every beginning of the text's tokens, and as much of the text as its bytes are."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    for count in range(1, len(ids) + 1):
        data = b"".join(map(tokenizer.token_bytes, ids[:count]))
        yield ids[:count], data.decode(errors="ignore")


def halves(tokenizer, text: str):
    """Those that end inside a character."""
    return [
        (ids, before)
        for ids, before in cuts(tokenizer, text)
        if b"".join(map(tokenizer.token_bytes, ids)) != before.encode()
    ]


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", DIALECTS)
def test_an_answer_is_cut_before_a_character(pair, name, stream):
    server, script = pair
    reasons = itertools.cycle(["length", "stop", "abort"])
    for ids, before in [*cuts(script.tokenizer, ANSWER), *halves(script.tokenizer, ANSWER)]:
        reason = next(reasons)
        script.says(ids, finish_reason=reason)
        assert DIALECTS[name].ask(server.http, stream).content == before, (ids, reason)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", [name for name, dialect in DIALECTS.items() if not dialect.plain])
def test_thoughts_and_arguments_are_cut_before_a_character(pair, name, stream):
    server, script = pair
    for ids, before in halves(script.tokenizer, THOUGHTS + CALL):
        script.says(ids, finish_reason="length")
        said = DIALECTS[name].ask(server.http, stream)
        expected = parse(before, "hermes", "qwen3")
        assert (said.content, said.reasoning) == (expected.content, expected.reasoning)
        assert [json.loads(call) for call in said.calls] == [json.loads(call.arguments) for call in expected.calls]
        assert said.reasoning.startswith("hm") and "\ufffd" not in said.texts and "\\ufffd" not in said.texts


@pytest.mark.parametrize("name", RENDERERS)
def test_every_format_of_calls_is_cut_before_a_character(pair, name):
    tokenizer = pair[1].tokenizer
    text = RENDERERS[name]([("get_weather", {"city": "🦙é", "names": ["你🦊"]})])
    found = halves(tokenizer, text)
    assert len(found) >= 4
    for ids, before in found:
        expected = parse(before, name)
        for pieces in ([ids], [[token_id] for token_id in ids]):
            detokenizer, reader = Detokenizer(tokenizer, [], skip_special_tokens=False), parser(name)
            events = [event for piece in pieces for event in reader.push(detokenizer.push(piece))]
            answer = add_up([*events, *reader.push(detokenizer.finish()), *reader.finish()])
            assert answer == expected and "fffd" not in ascii(answer)


@pytest.mark.parametrize("stream", [False, True])
def test_stops(pair, stream):
    """A stop token, shown or not, and a stop string after and within characters."""
    server, script = pair
    completions = DIALECTS["completions"]
    eos = script.tokenizer.eos_token_ids[0]
    for ids, before in halves(script.tokenizer, ANSWER):
        script.says(ids)  # and the token that ends it
        shown = {"include_stop_str_in_output": True, "skip_special_tokens": False}
        assert completions.ask(server.http, stream, **shown).content == before + script.tokenizer.id_to_token(eos)
        script.says(ids, finish_reason="length")
        for stop in ("never comes", "你", "\ufffd", before[-1] + "\ufffd"):
            assert completions.ask(server.http, stream, stop=stop).content == before
        for include in (False, True):
            said = completions.ask(server.http, stream, stop=before[-1], include_stop_str_in_output=include)
            assert said.content == before[: before.index(before[-1]) + include]


@pytest.mark.parametrize("stream", [False, True])
def test_the_end_of_a_thinking_budget(pair, stream):
    server, script = pair
    forced = list(server.state.formats.forced_end)
    content = script.tokenizer.encode("Hi", add_special_tokens=False)
    for ids, before in halves(script.tokenizer, "<think>\nhm 🦙é"):
        script.says([*ids, *forced, *content])
        said = DIALECTS["chat"].ask(server.http, stream, thinking_token_budget=len(ids))
        assert (said.reasoning, said.content) == (before.removeprefix("<think>\n").rstrip(), "Hi")


def test_a_call_begins_after_half_a_character(pair):
    server, script = pair
    call = script.tokenizer.encode(CALL, add_special_tokens=False)
    for ids, before in halves(script.tokenizer, "See 🦙"):
        script.says([*ids, *call])
        said = DIALECTS["chat"].ask(server.http, False)
        assert said.content.strip() == before.strip() and json.loads(said.calls[0]) == {"city": "🦙é"}


def test_what_the_model_wrote_stays(pair):
    """U+FFFD itself, and bytes of no character before other text."""
    server, script = pair
    tokenizer = script.tokenizer
    byte = {tokenizer.token_bytes(token_id): token_id for token_id in range(tokenizer.vocab_size)}
    written = tokenizer.encode("a\ufffd", add_special_tokens=False)
    for ids, text in (
        (written, "a\ufffd"),
        ([*written, *tokenizer.encode("🦙", add_special_tokens=False)[:-1]], "a\ufffd"),
        ([byte[b"a"], byte[b"\xf0"], byte[b"\x9f"], byte[b"b"]], "a\ufffdb"),
        ([byte[b"a"], byte[b"\xff"]], "a\ufffd"),
    ):
        for name, dialect in DIALECTS.items():
            for stream in (False, True):
                script.says(ids, finish_reason="length")
                assert dialect.ask(server.http, stream).content == text, name


def test_logprobs_and_tokens_keep_the_bytes(pair):
    server, script = pair
    for ids, before in halves(script.tokenizer, ANSWER):
        script.says(ids, finish_reason="length")
        data = b"".join(map(script.tokenizer.token_bytes, ids))
        body = {"messages": ASK, "logprobs": True, "return_token_ids": True}
        answer = server.http.post("/v1/chat/completions", json=body).json()
        (choice,) = answer["choices"]
        entries = choice["logprobs"]["content"]
        assert bytes(value for entry in entries for value in entry["bytes"]) == data
        assert choice["message"]["content"] == before and choice["token_ids"] == ids
        assert answer["usage"]["completion_tokens"] == len(ids)
        with server.http.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as streamed:
            lines = [line.removeprefix("data: ") for line in streamed.iter_lines() if line.startswith("data: {")]
        found = [json.loads(line)["choices"] for line in lines]
        told = [one["logprobs"]["content"] for choices in found for one in choices if one.get("logprobs")]
        assert [entry for part in told for entry in part] == entries
        body = {"prompt": "x", "logprobs": 0, "n": 2}
        for one in server.http.post("/v1/completions", json=body).json()["choices"]:
            assert one["text"] == before and len(one["logprobs"]["tokens"]) == len(ids)
            assert max(one["logprobs"]["text_offset"]) <= len(before)


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_and_what_continues_it(pair, stream):
    server, script = pair
    completions = DIALECTS["completions"]
    ids = script.tokenizer.encode(ANSWER, add_special_tokens=False)
    for half, before in halves(script.tokenizer, ANSWER):
        script.says(ids[len(half) :], finish_reason="length")
        rest = completions.ask(server.http, stream, prompt=half).content
        assert before + rest == ANSWER
        assert completions.ask(server.http, stream, prompt=half, echo=True).content == ANSWER
    script.says(ids[:-1], finish_reason="length")
    last = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "Well 🦙"}]
    fields = {"messages": last, "add_generation_prompt": False, "continue_final_message": True}
    assert DIALECTS["chat"].ask(server.http, stream, **fields).content == ANSWER[:-1]


@pytest.mark.slow
def test_a_deadline(pair, monkeypatch):
    server, script = pair

    class Stalling(Stream):
        async def __anext__(self) -> EngineOutput:
            if not self.outputs:
                await server.launcher.stop.wait()
            return await super().__anext__()

    for ids, before in halves(script.tokenizer, ANSWER):
        outputs = [[token_id] for token_id in ids]
        with monkeypatch.context() as patch:
            patch.setattr(
                script,
                "generate",
                lambda request, outputs=outputs: Stalling([EngineOutput(request.request_id, one) for one in outputs]),
                raising=False,
            )
            answer = server.http.post("/v1/chat/completions", json={"messages": ASK, "timeout": 0.2}).json()
        assert answer["choices"][0]["finish_reason"] == "timeout", answer
        assert answer["choices"][0]["message"]["content"] == before


def test_batches(pair):
    server, script = pair
    ids, before = halves(script.tokenizer, ANSWER)[-1]
    script.says(ids, finish_reason="length")
    batch = run(server.openai, [line("one")])
    (result,) = results(server.openai, batch.output_file_id)
    assert result["response"]["body"]["choices"][0]["message"]["content"] == before
    params = {"model": MODEL, "max_tokens": 9, "messages": ASK}
    made = server.http.post("/v1/messages/batches", json={"requests": [{"custom_id": "a", "params": params}]}).json()
    path = f"/v1/messages/batches/{made['id']}"
    poll(lambda: server.http.get(path).json()["processing_status"] == "ended")
    (answer,) = server.http.get(f"{path}/results").text.splitlines()
    assert json.loads(answer)["result"]["message"]["content"] == [{"type": "text", "text": before}]


@pytest.mark.slow
def test_offline(tmp_path):
    with LLM(write_light_model(tmp_path), distributed_executor_backend=BACKEND, max_model_len=64) as llm:
        state = llm._runtime.state
        script = Script(SimpleNamespace(state=state))
        client, state.client = state.client, script
        try:
            for ids, before in halves(script.tokenizer, ANSWER):
                script.says(ids, finish_reason="length")
                (output,) = llm.generate("x", SamplingParams(max_tokens=60), use_tqdm=False)
                assert (output.outputs[0].text, output.outputs[0].token_ids) == (before, ids)
        finally:
            state.client = client
