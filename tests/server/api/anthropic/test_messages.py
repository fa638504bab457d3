"""/v1/messages with Anthropic's own client, over an engine that says what the test writes."""

from __future__ import annotations

import asyncio
import json
import re

import anthropic
import httpx
import pytest

from quire.engine.messages import EngineOutput
from tests.helpers.server.running import MODEL, RunningServer, make_config, poll, running_server
from tests.helpers.server.scripted import Stream, scripted_server, write_folder
from tests.helpers.server.templates import CHATML, QWEN3_TOOLS

ASK = [{"role": "user", "content": "Weather?"}]
TOOLS = [
    {
        "name": "weather",
        "description": "of a city",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
    {"name": "time", "input_schema": {"type": "object", "properties": {}}},
]
THOUGHTS = "<think>\nhm, é🙂\n</think>\n\n"
CALLS = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich \\"🙂\\""}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
)


def client_of(server: RunningServer, key: str = "none") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0, timeout=30)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    with scripted_server(write_folder(tmp_path_factory.mktemp("messages"), QWEN3_TOOLS)) as (server, script):
        yield server, script


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    with scripted_server(write_folder(tmp_path_factory.mktemp("plain"), CHATML)) as (server, script):
        yield server, script


def ask(server, **fields):
    return client_of(server).messages.create(**{"model": MODEL, "max_tokens": 200, "messages": ASK} | fields)


def streamed(server, **fields):
    arguments = {"model": MODEL, "max_tokens": 200, "messages": ASK} | fields
    with client_of(server).messages.stream(**arguments) as stream:
        events = list(stream)
        return stream.get_final_message(), events


def prompt(server, script) -> str:
    return server.state.tokenizer.decode(script.requests[-1].prompt_token_ids, skip_special_tokens=False)


def test_a_plain_answer(plain):
    server, script = plain
    script.says("Hello there")
    message = ask(server, system="Be brief.")
    assert (message.role, message.type, message.stop_reason, message.stop_sequence) == (
        "assistant",
        "message",
        "end_turn",
        None,
    )
    assert [block.text for block in message.content] == ["Hello there"] and message.id.startswith("msg_")
    assert message.usage.output_tokens == len(server.state.tokenizer.encode("Hello there", False)) + 1
    assert message.usage.input_tokens == len(script.requests[-1].prompt_token_ids)
    assert "<|im_start|>system\nBe brief.<|im_end|>" in prompt(server, script)
    assert script.requests[-1].sampling.max_tokens == 200


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_thoughts_text_and_calls_whole_and_streamed(pair, seed):
    server, script = pair
    script.says(THOUGHTS + "Let me see.\n" + CALLS, seed=seed)
    whole = ask(server, tools=TOOLS)
    script.says(THOUGHTS + "Let me see.\n" + CALLS, seed=seed)
    final, events = streamed(server, tools=TOOLS)
    for message in (whole, final):
        thinking, text, weather, time = message.content
        assert thinking.thinking.strip() == "hm, é🙂" and text.text.strip() == "Let me see."
        assert (weather.name, weather.input) == ("weather", {"city": 'Zürich "🙂"'}) and weather.id != time.id
        assert (time.name, time.input, message.stop_reason) == ("time", {}, "tool_use")
    kinds = [event.type for event in events if event.type.startswith(("message_", "content_block_"))]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4
    assert final.usage.output_tokens == whole.usage.output_tokens > 0


def test_a_conversation_of_tools_renders_as_the_template_has_it(pair):
    server, script = pair
    script.says("Done.")
    history = [
        {"role": "user", "content": [{"type": "text", "text": "Both, please", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "two calls", "signature": "x"},
                {"type": "text", "text": "Yes."},
                {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Bern"}},
                {"type": "tool_use", "id": "toolu_2", "name": "time", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "rain"}]},
                {"type": "tool_result", "tool_use_id": "toolu_2", "content": "no clock", "is_error": True},
                {"type": "text", "text": "and now?"},
            ],
        },
    ]
    ask(server, tools=TOOLS, messages=history, system=[{"type": "text", "text": "S1"}, {"type": "text", "text": "S2"}])
    expected = server.state.tokenizer.render_chat(
        [
            {"role": "system", "content": "S1\nS2"},
            {"role": "user", "content": "Both, please"},
            {
                "role": "assistant",
                "content": "Yes.",
                "reasoning_content": "two calls",
                "tool_calls": [
                    {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bern"}}},
                    {"type": "function", "function": {"name": "time", "arguments": {}}},
                ],
            },
            {"role": "tool", "content": "rain"},
            {"role": "tool", "content": "Error: no clock"},
            {"role": "user", "content": "and now?"},
        ],
        tools=[
            {
                "type": "function",
                "function": {"name": t["name"]}
                | ({"description": t["description"]} if "description" in t else {})
                | {"parameters": t["input_schema"]},
            }
            for t in TOOLS
        ],
        add_generation_prompt=True,
    )
    assert prompt(server, script) == expected


def test_a_last_message_of_the_assistant_is_continued(plain):
    server, script = plain
    script.says("42")
    ask(server, messages=[*ASK, {"role": "assistant", "content": "The answer is "}])
    assert prompt(server, script).endswith("The answer is ")


def test_how_an_answer_ends(plain):
    server, script = plain
    script.says("one two", finish_reason="length")
    assert ask(server).stop_reason == "max_tokens"
    # a client sends what its own vendor's models can write
    for max_tokens in (4096, 32000, 128000):
        assert ask(server, max_tokens=max_tokens).stop_reason == "model_context_window_exceeded"
        sent = script.requests[-1]
        assert sent.sampling.max_tokens == 4096 - len(sent.prompt_token_ids)
        assert streamed(server, max_tokens=max_tokens)[0].stop_reason == "model_context_window_exceeded"
    script.says("one STOP two")
    message = ask(server, stop_sequences=["STOP"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "STOP")
    assert message.content[0].text == "one "
    script.says("one STOP two", seed=4)
    message, _ = streamed(server, stop_sequences=["STOP"])
    assert (message.stop_reason, message.stop_sequence, message.content[0].text) == ("stop_sequence", "STOP", "one ")


def test_choices_of_tools(pair):
    server, script = pair
    call = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
    for choice in ({"type": "any"}, {"type": "tool", "name": "time"}, {"type": "auto"}):
        script.says(call)
        assert ask(server, tools=TOOLS, tool_choice=choice).content[-1].name == "time"
        assert (script.requests[-1].sampling.grammar is not None) == (choice["type"] != "auto")
    script.says(call)
    assert ask(server, tools=TOOLS, tool_choice={"type": "none"}).content[-1].type == "text"


def test_thinking_is_told_to_the_template_and_bounded(pair, plain):
    server, script = pair
    script.says("Hi")
    ask(server, thinking={"type": "disabled"})
    assert "<think>\n\n</think>" in prompt(server, script)
    ask(server, thinking={"type": "enabled", "budget_tokens": 1024})
    assert script.requests[-1].sampling.thinking.budget == 1024
    server, script = plain
    script.says("Hi")
    assert ask(server, thinking={"type": "enabled", "budget_tokens": 1024}).content[0].text == "Hi"


def test_counting_tokens_is_what_the_answer_says(pair):
    server, script = pair
    script.says("Hi")
    client = client_of(server)
    fields = {"model": MODEL, "messages": ASK, "tools": TOOLS, "system": "S"}
    assert (
        client.messages.count_tokens(**fields).input_tokens == ask(server, tools=TOOLS, system="S").usage.input_tokens
    )


def test_models_in_anthropics_form(plain):
    server, _ = plain
    page = client_of(server).models.list()
    assert [model.id for model in page] == [MODEL, "alias"] and page.data[0].type == "model"
    assert client_of(server).models.retrieve(MODEL).display_name == MODEL
    with pytest.raises(anthropic.NotFoundError):
        client_of(server).models.retrieve("none")


@pytest.mark.parametrize(
    ("change", "status", "kind", "words"),
    [
        ({"model": "none"}, 404, "not_found_error", "does not exist"),
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ({"max_tokens": -1}, 400, "invalid_request_error", "max_tokens"),
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        ({"temperature": 3}, 400, "invalid_request_error", "temperature"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            400,
            "invalid_request_error",
            "web_search",
        ),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, 400, "invalid_request_error", "'x'"),
        ({"tools": TOOLS[:1] * 2}, 400, "invalid_request_error", "same name"),
        ({"mcp_servers": [{"url": "x"}]}, 400, "invalid_request_error", "mcp_servers"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, 400, None, "source.type"),
        ({"messages": [{"role": "robot", "content": "x"}]}, 400, "invalid_request_error", "role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "a", "input": {}}]}]},
            400,
            "invalid_request_error",
            "no tool_use",
        ),
        ({"messages": [{"role": "user", "content": "x " * 6000}]}, 400, "invalid_request_error", "prompt is too long"),
    ],
)
def test_errors_have_anthropics_form(pair, change, status, kind, words):
    server, _ = pair
    body = {"model": MODEL, "max_tokens": 5, "messages": ASK} | change
    body = {name: value for name, value in body.items() if value is not None}
    answer = server.http.post("/v1/messages", json=body)
    error = answer.json()
    assert (answer.status_code, error["type"]) == (status, "error"), answer.text
    assert words in error["error"]["message"] and kind in (None, error["error"]["type"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_words", [4096, 5000, 10**6])
def test_clients_read_by_how_much_a_conversation_is_too_long(plain, num_words, stream):
    """Claude Code and others take both numbers from Anthropic's sentence, to the full stop that it has not."""
    body = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": "x " * num_words}]}
    answer = plain[0].http.post("/v1/messages", json=body | {"stream": stream})
    says = re.fullmatch(r"prompt is too long: (\d+) tokens > (\d+) maximum", answer.json()["error"]["message"])
    num_tokens, limit = map(int, says.groups())
    assert answer.status_code == 400 and num_tokens > limit == 4096


def test_an_error_in_a_stream_is_an_event_of_anthropics(plain, monkeypatch):
    server, script = plain

    def generate(request):
        ids = server.state.tokenizer.encode("Hi", False)
        return Stream(
            [
                EngineOutput(request.request_id, ids),
                EngineOutput(request.request_id, [], finish_reason="error", error="out of luck"),
            ]
        )

    monkeypatch.setattr(script, "generate", generate)
    with pytest.raises(anthropic.APIStatusError, match="out of luck"):
        streamed(server)
    with pytest.raises(anthropic.InternalServerError, match="out of luck"):
        ask(server)


def test_keys_in_either_header(model_folder):
    with running_server(model_folder, api_key=["secret"]) as server:
        server.wait_ready()
        assert ask_with(anthropic.Anthropic(base_url=server.url, api_key="secret"))
        assert ask_with(anthropic.Anthropic(base_url=server.url, auth_token="secret"))
        with pytest.raises(anthropic.AuthenticationError) as caught:
            ask_with(anthropic.Anthropic(base_url=server.url, api_key="wrong"))
        assert caught.value.body["error"]["type"] == "authentication_error"


def ask_with(client: anthropic.Anthropic):
    return client.messages.create(model=MODEL, max_tokens=2, messages=ASK).content


def test_batches(model_folder, tmp_path):
    running = RunningServer(make_config(model_folder, batch_dir=str(tmp_path))).wait_ready()
    try:
        client = client_of(running)
        params = {"model": MODEL, "max_tokens": 3, "messages": ASK}
        requests = [{"custom_id": f"c{i}", "params": params} for i in range(5)]
        requests.append({"custom_id": "bad", "params": params | {"temperature": 9}})
        batch = client.messages.batches.create(requests=requests)
        poll(lambda: client.messages.batches.retrieve(batch.id).processing_status == "ended", 30)
        batch = client.messages.batches.retrieve(batch.id)
        assert (batch.request_counts.succeeded, batch.request_counts.errored, batch.request_counts.processing) == (
            5,
            1,
            0,
        )
        found = {one.custom_id: one.result for one in client.messages.batches.results(batch.id)}
        assert found["c3"].type == "succeeded" and 0 < found["c3"].message.usage.output_tokens <= 3
        assert found["bad"].type == "errored" and "temperature" in found["bad"].error.error.message
        assert [one.id for one in client.messages.batches.list()] == [batch.id]
        assert client.messages.batches.cancel(batch.id).processing_status == "ended"
        client.delete(f"/v1/files/file-{batch.id.removeprefix('msgbatch_')}e", cast_to=object)
        with pytest.raises(anthropic.NotFoundError, match="have been deleted"):
            client.messages.batches.results(batch.id)
        client.messages.batches.delete(batch.id)
        with pytest.raises(anthropic.NotFoundError):
            client.messages.batches.retrieve(batch.id)
        for wrong in (
            [],
            [{"custom_id": "a b", "params": params}],
            [{"custom_id": "a", "params": []}],
            requests[:1] * 2,
        ):
            with pytest.raises(anthropic.BadRequestError):
                client.messages.batches.create(requests=wrong)
    finally:
        running.stop()


def test_async_client_streams(plain):
    server, script = plain
    script.says("Hello", seed=2)

    async def read() -> str:
        async with (
            anthropic.AsyncAnthropic(base_url=server.url, api_key="x", max_retries=0) as client,
            client.messages.stream(model=MODEL, max_tokens=9, messages=ASK) as stream,
        ):
            return "".join([piece async for piece in stream.text_stream])

    assert asyncio.run(read()) == "Hello"


@pytest.mark.slow
def test_bytes_on_the_wire(plain):
    """Every event has the name of its type, and nothing follows message_stop."""
    server, script = plain
    script.says("Hi")
    with httpx.stream(
        "POST",
        f"{server.url}/v1/messages",
        json={"model": MODEL, "max_tokens": 9, "messages": ASK, "stream": True},
        trust_env=False,
    ) as answer:
        text = answer.read().decode()
    events = [part.split("\n") for part in text.strip().split("\n\n") if not part.startswith(":")]
    for name, data in events:
        assert json.loads(data.removeprefix("data: "))["type"] == name.removeprefix("event: ")
    assert events[-1][0] == "event: message_stop"
