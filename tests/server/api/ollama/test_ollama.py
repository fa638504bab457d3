"""/api with Ollama's own client, over an engine that says what the test writes."""

from __future__ import annotations

import asyncio
import json

import ollama
import pytest

from quire.engine.messages import EngineOutput
from tests.helpers.server.running import MODEL
from tests.helpers.server.scripted import Stream, scripted_server, write_folder
from tests.helpers.server.templates import CHATML, QWEN3_TOOLS

ASK = [{"role": "user", "content": "Weather?"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich \\"🙂\\""}}\n</tool_call>'


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    with scripted_server(write_folder(tmp_path_factory.mktemp("ollama"), QWEN3_TOOLS)) as (server, script):
        yield server, script


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    with scripted_server(write_folder(tmp_path_factory.mktemp("plain"), CHATML)) as (server, script):
        yield server, script


def client_of(server) -> ollama.Client:
    return ollama.Client(host=server.url)


def prompt(server, script) -> str:
    return server.state.tokenizer.decode(script.requests[-1].prompt_token_ids, skip_special_tokens=False)


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_a_chat_whole_and_streamed(pair, seed):
    server, script = pair
    text = "<think>\nhm é\n</think>\n\nLook:\n" + CALL + CALL
    script.says(text, seed=seed)
    whole = client_of(server).chat(MODEL, ASK, tools=TOOLS)
    script.says(text, seed=seed)
    parts = list(client_of(server).chat(MODEL, ASK, tools=TOOLS, stream=True))
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert "".join(part.message.thinking or "" for part in parts).strip() == whole.message.thinking.strip() == "hm é"
    assert whole.message.content.strip() == "Look:"
    streamed = [call for part in parts for call in part.message.tool_calls or ()]
    for calls in (whole.message.tool_calls, streamed):
        assert [(call.function.name, call.function.arguments) for call in calls] == [
            ("weather", {"city": 'Zürich "🙂"'})
        ] * 2
    last = parts[-1]
    assert last.done_reason == "stop" and last.eval_count == whole.eval_count > 5
    assert last.prompt_eval_count == len(script.requests[-1].prompt_token_ids)
    assert 0 < last.prompt_eval_duration <= last.total_duration and last.eval_duration >= 0 == last.load_duration


def test_generate_with_and_without_a_template(plain):
    server, script = plain
    script.says("Hi there")
    answer = client_of(server).generate(MODEL, "Hello", system="Be brief.")
    assert answer.response == "Hi there" and answer.done
    assert "system\nBe brief." in prompt(server, script) and "user\nHello" in prompt(server, script)
    client_of(server).generate(f"{MODEL}:latest", "Once upon", raw=True)
    assert prompt(server, script) == "Once upon"
    parts = list(client_of(server).generate(MODEL, "Hello", stream=True))
    assert "".join(part.response for part in parts) == "Hi there"
    assert client_of(server).generate(MODEL).done_reason == "load"
    assert client_of(server).chat(MODEL).done_reason == "load"


@pytest.mark.parametrize("keep_alive", [0, 0.0, "0", "0s", "0m"])
def test_without_a_prompt_a_model_is_unloaded_or_loaded(plain, keep_alive):
    """As Ollama says it, whole and with `stream`; `load` for every other time."""
    client, number = client_of(plain[0]), len(plain[1].requests)
    for answer in (
        client.generate(MODEL, keep_alive=keep_alive),
        client.generate(MODEL, "", keep_alive=keep_alive),
        client.chat(MODEL, keep_alive=keep_alive),
        client.chat(MODEL, [], keep_alive=keep_alive),
        *client.generate(MODEL, keep_alive=keep_alive, stream=True),
        *client.chat(MODEL, keep_alive=keep_alive, stream=True),
    ):
        assert answer.done and answer.done_reason == "unload"
    for other in (None, "5m", -1, 300):
        assert client.generate(MODEL, keep_alive=other).done_reason == "load"
        assert client.chat(MODEL, keep_alive=other).done_reason == "load"
    assert len(plain[1].requests) == number
    assert client.generate(MODEL, "Hello", keep_alive=keep_alive).done_reason == "stop"


def test_options_reach_the_sampler(plain):
    server, script = plain
    script.says("x", finish_reason="length")
    options = {
        "num_predict": 7,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.1,
        "seed": 4,
        "repeat_penalty": 1.5,
        "presence_penalty": 0.25,
        "frequency_penalty": 0.5,
        "num_ctx": 8192,
        "stop": ["END"],
    }
    assert client_of(server).chat(MODEL, ASK, options=options, keep_alive="5m").done_reason == "length"
    sampling = script.requests[-1].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (
        7,
        0.5,
        3,
        0.9,
        0.1,
    )
    assert (sampling.seed, sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (
        4,
        1.5,
        0.25,
        0.5,
    )


@pytest.mark.parametrize("num_predict", [0, -1, -2, 4096, 128000, 2**62])
def test_num_predict_is_cut_to_the_context(plain, num_predict):
    server, script = plain
    script.says("x", finish_reason="length")
    answer = client_of(server).generate(MODEL, "Hello", options={"num_predict": num_predict})
    assert answer.done_reason == "length"
    sent = script.requests[-1]
    assert sent.sampling.max_tokens == 4096 - len(sent.prompt_token_ids)


@pytest.mark.parametrize("top", [None, 2])
def test_log_probabilities_are_told_per_token(pair, top):
    server, script = pair
    script.says("<think>hm</think>Hi there")
    client, fields = client_of(server), {"logprobs": True, "top_logprobs": top}
    whole = client.chat(MODEL, ASK, **fields)
    assert script.requests[-1].sampling.logprobs == (top or 0)
    streamed = [one for part in client.chat(MODEL, ASK, stream=True, **fields) for one in part.logprobs or ()]
    generated = client.generate(MODEL, "x", **fields).logprobs
    for found in (whole.logprobs, streamed, generated):
        assert len(found) == whole.eval_count and all(one.logprob == -0.5 for one in found)
        assert "".join(one.token for one in found).startswith("<think>hm</think>Hi there")
        assert all((one.top_logprobs is None) == (top is None) for one in found)
    assert client.chat(MODEL, ASK).logprobs is None


def test_formats_constrain_the_answer(plain):
    server, script = plain
    script.says("{}")
    for format in ("json", {"type": "object", "properties": {"a": {"type": "integer"}}}):
        client_of(server).chat(MODEL, ASK, format=format)
        assert script.requests[-1].sampling.grammar is not None
    client_of(server).chat(MODEL, ASK, format="")
    assert script.requests[-1].sampling.grammar is None


def test_thinking_is_told_to_the_template(pair):
    server, script = pair
    script.says("Hi")
    client_of(server).chat(MODEL, ASK, think=False)
    assert "<think>\n\n</think>" in prompt(server, script)
    client_of(server).chat(MODEL, ASK, think=True)
    assert not prompt(server, script).endswith("</think>\n\n")


def test_a_conversation_of_tools_renders_as_the_template_has_it(pair):
    server, script = pair
    script.says("ok")
    history = [
        *ASK,
        {
            "role": "assistant",
            "content": "",
            "thinking": "call it",
            "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Bern"}}}],
        },
        {"role": "tool", "content": "rain", "tool_name": "weather"},
    ]
    client_of(server).chat(MODEL, history, tools=TOOLS)
    text = prompt(server, script)
    assert '"name": "weather", "arguments": {"city": "Bern"}' in text
    assert "<tool_response>\nrain\n</tool_response>" in text


def test_what_there_is(pair):
    server, _ = pair
    client = client_of(server)
    assert [model.model for model in client.list().models] == [MODEL, "alias"]
    loaded = client.ps().models[0]
    assert loaded.model == MODEL and loaded.context_length == 4096 and loaded.size_vram == 0
    shown = client.show(MODEL)
    assert {"completion", "tools", "thinking"} <= set(shown.capabilities) and "tool_call" in shown.template
    assert server.http.get("/api/version").json()["version"]
    assert server.http.get("/").status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("chat", {"model": "none", "messages": ASK}, 404, "does not exist"),
        ("chat", {"messages": ASK}, 400, "model"),
        ("chat", {"model": MODEL, "messages": ASK, "options": {"temperature": 9}}, 400, "options.temperature"),
        ("chat", {"model": MODEL, "messages": ASK, "options": {"mirostat": 3}}, 400, "options.mirostat"),
        ("chat", {"model": MODEL, "messages": [{"role": "user", "content": "x", "images": ["aa"]}]}, 400, "images"),
        ("chat", {"model": MODEL, "messages": ASK, "format": {"type": "nonsense"}}, 400, "format"),
        ("chat", {"model": MODEL, "messages": ASK, "tools": TOOLS * 2}, 400, "same name"),
        ("generate", {"model": MODEL, "prompt": "x", "template": "y"}, 400, "template"),
        ("generate", {"model": MODEL, "prompt": "x", "raw": True, "system": "y"}, 400, "system"),
        ("generate", {"model": MODEL, "prompt": "x", "options": {"num_predict": -3}}, 400, "num_predict"),
        ("chat", {"model": MODEL, "messages": ASK, "logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
        ("embed", {"model": MODEL, "input": "x"}, 400, "no embeddings"),
        ("embeddings", {"model": MODEL, "prompt": "x"}, 400, "no embeddings"),
        ("show", {}, 400, "model"),
        ("pull", {"model": "x"}, 403, "--allow-downloads"),
        ("nothing", {}, 404, "There is no POST"),
    ],
)
def test_errors_are_texts(pair, path, body, status, words):
    server, _ = pair
    answer = server.http.post(f"/api/{path}", json=body)
    assert answer.status_code == status, answer.text
    assert words in answer.json()["error"]


def test_an_error_in_a_stream_is_a_line(plain, monkeypatch):
    server, script = plain

    def generate(request):
        ids = server.state.tokenizer.encode("Hi", False)
        failed = EngineOutput(request.request_id, [], finish_reason="error", error="out of luck")
        return Stream([EngineOutput(request.request_id, ids), failed])

    monkeypatch.setattr(script, "generate", generate)
    with pytest.raises(ollama.ResponseError, match="out of luck"):
        list(client_of(server).chat(MODEL, ASK, stream=True))
    with pytest.raises(ollama.ResponseError, match="out of luck"):
        client_of(server).chat(MODEL, ASK)


def test_the_async_client_and_the_bytes_on_the_wire(plain):
    server, script = plain
    script.says("Hello", seed=1)

    async def read() -> str:
        client = ollama.AsyncClient(host=server.url)
        return "".join([part.message.content async for part in await client.chat(MODEL, ASK, stream=True)])

    assert asyncio.run(read()) == "Hello"
    answer = server.http.post("/api/chat", json={"model": MODEL, "messages": ASK})  # streams unless told not to
    assert answer.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert lines[-1]["done"] and not any(line["done"] for line in lines[:-1])


@pytest.mark.slow
@pytest.mark.parametrize("content_type", [None, "application/x-www-form-urlencoded", "application/octet-stream"])
def test_programs_may_send_another_content_type(plain, content_type):
    """LiteLLM and curl do; a web page, which sends its Origin, must not."""
    server, script = plain
    headers = {"content-type": content_type} if content_type else {}
    script.says("Hello", seed=1)
    content = json.dumps({"model": MODEL, "messages": ASK, "stream": False}).encode()
    assert server.http.post("/api/chat", content=content, headers=headers).json()["message"]["content"] == "Hello"
    for name in ("origin", "sec-fetch-site"):
        answer = server.http.post("/api/chat", content=content, headers=headers | {name: "https://example.org"})
        assert answer.status_code == 415
    assert server.http.post("/v1/chat/completions", content=content, headers=headers).status_code == 415
