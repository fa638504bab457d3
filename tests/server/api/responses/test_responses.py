"""/v1/responses with OpenAI's own client, over an engine that says what the test writes."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest
from pydantic import BaseModel

from quire.engine.messages import EngineOutput
from tests.helpers.server.running import MODEL
from tests.helpers.server.scripted import Stream, scripted_server, write_folder
from tests.helpers.server.templates import CHATML, QWEN3_TOOLS

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}
TIME = {"type": "function", "name": "time", "parameters": {"type": "object", "properties": {}}, "strict": False}
TOOLS = [WEATHER, TIME]
THOUGHTS = "<think>\nhm, é🙂\n</think>\n\n"
CALLS = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich \\"🙂\\""}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
)
ZURICH = {"city": 'Zürich "🙂"'}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    with scripted_server(write_folder(tmp_path_factory.mktemp("responses"), QWEN3_TOOLS)) as (server, script):
        yield server, script


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    with scripted_server(write_folder(tmp_path_factory.mktemp("plain"), CHATML)) as (server, script):
        yield server, script


def ask(server, **fields):
    return server.openai.responses.create(**{"model": MODEL, "input": "Weather?"} | fields)


def streamed(server, **fields):
    """The events of an answer, which the client checks and puts together."""
    events = list(ask(server, stream=True, **fields))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events


def prompt(server, script) -> str:
    return server.state.tokenizer.decode(script.requests[-1].prompt_token_ids, skip_special_tokens=False)


def test_a_plain_answer(plain):
    server, script = plain
    script.says("Hello there")
    answer = ask(server, instructions="Be brief.", metadata={"a": "b"}, max_output_tokens=200, temperature=0.5)
    assert (answer.output_text, answer.status, answer.object, answer.error) == (
        "Hello there",
        "completed",
        "response",
        None,
    )
    assert answer.id.startswith("resp_") and answer.output[0].id.startswith("msg_") and answer.metadata == {"a": "b"}
    assert (answer.instructions, answer.temperature, answer.max_output_tokens) == ("Be brief.", 0.5, 200)
    assert answer.usage.input_tokens == len(script.requests[-1].prompt_token_ids)
    assert answer.usage.output_tokens == len(server.state.tokenizer.encode("Hello there", False)) + 1
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert answer.completed_at >= answer.created_at and answer.incomplete_details is None
    assert prompt(server, script).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWeather?")
    assert script.requests[-1].sampling.max_tokens == 200


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
@pytest.mark.parametrize("summary", [None, "auto"])
def test_thoughts_text_and_calls_whole_and_streamed(pair, seed, summary):
    server, script = pair
    fields = {"tools": TOOLS, "reasoning": {"summary": summary}, "include": ["reasoning.encrypted_content"]}
    script.says(THOUGHTS + "Let me see.\n" + CALLS, seed=seed)
    whole = ask(server, **fields)
    script.says(THOUGHTS + "Let me see.\n" + CALLS, seed=seed)
    events = streamed(server, **fields)
    final = events[-1].response
    for answer in (whole, final):
        thoughts, text, weather, time = answer.output
        (part,) = thoughts.summary if summary else thoughts.content
        assert part.text.strip() == "hm, é🙂" and thoughts.encrypted_content
        assert text.content[0].text.strip() == "Let me see."
        assert (weather.name, json.loads(weather.arguments)) == ("weather", ZURICH) and weather.call_id != time.call_id
        assert (time.name, json.loads(time.arguments), time.status, answer.status) == (
            "time",
            {},
            "completed",
            "completed",
        )
        assert 0 < answer.usage.output_tokens_details.reasoning_tokens < answer.usage.output_tokens
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    for i, item in enumerate(final.output):
        told = [event for event in events if getattr(event, "output_index", None) == i]
        assert told[0].type == "response.output_item.added" and told[0].item.id == item.id
        assert told[-1].type == "response.output_item.done" and told[-1].item == item
        deltas = "".join(event.delta for event in told if event.type.endswith(".delta"))
        done = next(e for e in told if e.type.endswith((".text.done", "_text.done", "arguments.done")))
        assert deltas == (done.arguments if item.type == "function_call" else done.text)
    order = [kind for kind in dict.fromkeys(kinds) if "part" in kind or "reasoning" in kind]
    if summary:
        assert order[:4] == [
            f"response.reasoning_summary_{kind}" for kind in ("part.added", "text.delta", "text.done", "part.done")
        ]
    else:
        assert order[:4] == [
            "response.content_part.added",
            "response.reasoning_text.delta",
            "response.reasoning_text.done",
            "response.content_part.done",
        ]


def test_items_render_as_the_template_has_them(pair):
    server, script = pair
    script.says("Done.")
    items = [
        {"role": "developer", "content": "S2"},
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "Both, "}, {"type": "input_text", "text": "please"}],
        },
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "two calls"}],
        },
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Yes.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Bern"}'},
        {"type": "function_call", "call_id": "c2", "name": "time", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "noon"}]},
        {"role": "user", "content": "and now?"},
    ]
    ask(server, tools=TOOLS, input=items, instructions="S1")

    def call(name, arguments):
        return {"type": "function", "function": {"name": name, "arguments": arguments}}

    expected = server.state.tokenizer.render_chat(
        [
            {"role": "system", "content": "S1\n\nS2"},
            {"role": "user", "content": "Both, please"},
            {
                "role": "assistant",
                "content": "Yes.",
                "reasoning_content": "two calls",
                "tool_calls": [call("weather", {"city": "Bern"}), call("time", {})],
            },
            {"role": "tool", "content": "rain"},
            {"role": "tool", "content": "noon"},
            {"role": "user", "content": "and now?"},
        ],
        tools=[
            {
                "type": "function",
                "function": {k: tool[k] for k in ("name", "description", "parameters") if k in tool},
            }
            for tool in TOOLS
        ],
        add_generation_prompt=True,
    )
    assert prompt(server, script) == expected


def test_thoughts_come_back_by_their_encrypted_content(pair):
    server, script = pair
    script.says(THOUGHTS + CALLS)
    first = ask(server, tools=TOOLS, store=False, include=["reasoning.encrypted_content"])
    thoughts, *calls = [item.model_dump(exclude_none=True) for item in first.output]
    thoughts["content"] = []
    outputs = [{"type": "function_call_output", "call_id": call["call_id"], "output": "x"} for call in calls]
    script.says("ok")
    ask(server, tools=TOOLS, store=False, input=[{"role": "user", "content": "Weather?"}, thoughts, *calls, *outputs])
    assert "hm, é🙂" in prompt(server, script)
    foreign = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAA"}
    ask(server, input=[{"role": "user", "content": "Weather?"}, foreign, {"role": "user", "content": "x"}])


def test_previous_responses_are_the_history(pair):
    server, script = pair
    script.says(THOUGHTS + CALLS)
    first = ask(server, tools=TOOLS, instructions="Be brief.")
    outputs = [
        {"type": "function_call_output", "call_id": item.call_id, "output": f"of {item.name}"}
        for item in first.output
        if item.type == "function_call"
    ]
    script.says("Rain.")
    second = ask(server, tools=TOOLS, previous_response_id=first.id, input=outputs)
    assert second.previous_response_id == first.id
    script.says("Sun.")
    ask(server, tools=TOOLS, previous_response_id=second.id, input="And tomorrow?")
    told = prompt(server, script)
    places = [
        told.index(text)
        for text in ("Weather?", "hm, é🙂", "of weather", "of time", "Rain.", "And tomorrow?")
        if text in told
    ]
    assert places == sorted(places) and len(places) >= 5 and "Be brief." not in told
    with pytest.raises(openai.NotFoundError) as caught:
        ask(server, previous_response_id="resp_none")
    assert (caught.value.code, caught.value.param) == ("response_not_found", "previous_response_id")


def test_stored_responses(plain):
    server, script = plain
    client = server.openai.responses
    script.says("Hi")
    answer = ask(
        server,
        input=[
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
        ],
    )
    found = client.retrieve(answer.id)
    assert found == answer
    items = list(client.input_items.list(answer.id, order="asc", limit=2))
    assert [(item.role, item.content[0].text) for item in items] == [("user", "a"), ("assistant", "b"), ("user", "c")]
    assert [item.content[0].text for item in client.input_items.list(answer.id)] == ["c", "b", "a"]
    script.says("again")
    reference = {"type": "item_reference", "id": answer.output[0].id}
    ask(server, input=[{"role": "user", "content": "x"}, reference, {"role": "user", "content": "y"}])
    assert "assistant\nHi<|im_end|>" in prompt(server, script)
    events = list(client.retrieve(answer.id, stream=True))
    assert events[-1].type == "response.completed" and events[-1].response == answer
    assert [event.sequence_number for event in client.retrieve(answer.id, stream=True, starting_after=3)] == list(
        range(4, len(events))
    )
    client.delete(answer.id)
    with pytest.raises(openai.NotFoundError):
        client.retrieve(answer.id)
    unstored = ask(server, store=False)
    with pytest.raises(openai.NotFoundError):
        client.retrieve(unstored.id)
    with pytest.raises(openai.BadRequestError, match="background"):
        client.cancel(ask(server).id)


class Person(BaseModel):
    name: str
    age: int


def test_structured_output_and_parse(plain):
    server, script = plain
    script.says('{"name": "Anna", "age": 31}')
    answer = server.openai.responses.parse(model=MODEL, input="Who?", text_format=Person)
    assert answer.output_parsed == Person(name="Anna", age=31)
    assert script.requests[-1].sampling.grammar is not None
    with server.openai.responses.stream(model=MODEL, input="Who?", text_format=Person) as stream:
        assert next(event for event in stream if event.type == "response.output_text.done").parsed.age == 31
        assert stream.get_final_response().output_parsed.name == "Anna"
    ask(server, text={"format": {"type": "json_object"}})
    assert script.requests[-1].sampling.grammar is not None
    ask(server, text={"format": {"type": "text"}})
    assert script.requests[-1].sampling.grammar is None


def test_choices_of_tools(pair):
    server, script = pair
    call = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "time"}]}
    for choice in ("required", {"type": "function", "name": "time"}, "auto", allowed):
        script.says(call)
        answer = ask(server, tools=TOOLS, tool_choice=choice)
        assert answer.output[-1].name == "time"
        assert (script.requests[-1].sampling.grammar is not None) == (choice != "auto")
    script.says(call)
    assert ask(server, tools=TOOLS, tool_choice="none").output[-1].type == "message"


def test_custom_tools(pair):
    server, script = pair
    tools = [{"type": "custom", "name": "shell", "description": "runs a command"}]
    said = '<tool_call>\n{"name": "shell", "arguments": {"input": "ls \\"a\\" é"}}\n</tool_call>'
    script.says(said)
    whole = ask(server, tools=tools)
    script.says(said, seed=1)
    events = streamed(server, tools=tools)
    for answer in (whole, events[-1].response):
        (call,) = answer.output
        assert (call.type, call.name, call.input) == ("custom_tool_call", "shell", 'ls "a" é')
    deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == 'ls "a" é'
    script.says("ok")
    output = {"type": "custom_tool_call_output", "call_id": whole.output[0].call_id, "output": "files"}
    ask(server, tools=tools, previous_response_id=whole.id, input=[output])
    assert "<tool_response>\nfiles\n</tool_response>" in prompt(server, script)


def test_tools_of_agents_are_left_out(pair, tmp_path):
    """Those that Codex offers to every model."""
    server, script = pair
    script.says("Hi.")
    others = [
        {"type": "web_search", "external_web_access": False},
        {"type": "local_shell"},
        {"type": "image_generation", "output_format": "png"},
        {"type": "tool_search"},
    ]
    response = server.http.post("/v1/responses", json={"input": "Hi", "tools": [*TOOLS, *others]})
    assert response.status_code == 200, response.text
    for i, tool in enumerate(others, len(TOOLS)):
        assert f"tools.{i} ({tool['type']})" in response.headers["warning"]
    assert [tool["type"] for tool in response.json()["tools"]] == [tool["type"] for tool in TOOLS]
    assert "local_shell" not in prompt(server, script)
    for choice, status in (("auto", 200), ("required", 400), ({"type": "web_search"}, 400)):
        body = {"input": "Hi", "tools": others, "tool_choice": choice}
        assert server.http.post("/v1/responses", json=body).status_code == status
    with scripted_server(write_folder(tmp_path, QWEN3_TOOLS), strict_params=True) as (strict, _):
        for tool in others:
            refused = strict.http.post("/v1/responses", json={"input": "Hi", "tools": [tool]})
            assert refused.status_code == 400 and refused.json()["error"]["param"].startswith("tools.0")


GROUP = {
    "type": "namespace",
    "name": "crm",
    "description": "Customers.",
    "tools": [
        TOOLS[0] | {"name": "find", "description": "Finds one."},
        {"type": "custom", "name": "note"},
        {"type": "web_search"},
    ],
}
CALL_OF_GROUP = '<tool_call>\n{"name": "crm__find", "arguments": {"city": "Zürich"}}\n</tool_call>'


def test_tools_of_namespaces(pair):
    """As Codex groups the tools of MCP servers. The model knows single names, the client gets both."""
    server, script = pair
    tools = [*TOOLS, GROUP, GROUP | {"name": "mcp__files__", "description": ""}]
    script.says(CALL_OF_GROUP)
    whole = ask(server, tools=tools)
    shown = prompt(server, script)
    for name in ("crm__find", "crm__note", "mcp__files__find", "mcp__files__note"):
        assert f'"name": "{name}"' in shown
    assert '"description": "Customers.\\n\\nFinds one."' in shown and shown.count("Customers.") == 1
    script.says(CALL_OF_GROUP, seed=1)
    events = streamed(server, tools=tools)
    (added,) = [event.item for event in events if event.type == "response.output_item.added"]
    replayed = server.http.get(f"/v1/responses/{whole.id}", params={"stream": "true"}).text
    assert '"namespace":"crm"' in replayed and "crm__find" not in replayed
    for call in (*whole.output, *events[-1].response.output, added):
        assert (call.type, call.namespace, call.name) == ("function_call", "crm", "find")
    (call,) = whole.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "found"}
    histories = (
        {"previous_response_id": whole.id, "input": [result]},
        {"input": [{"role": "user", "content": "Weather?"}, call.model_dump(exclude_none=True), result]},
    )
    for history in histories:
        script.says("ok")
        ask(server, tools=tools, **history)
        assert '{"name": "crm__find", "arguments": {"city": "Zürich"}}' in prompt(server, script)


def test_custom_tools_of_namespaces(pair):
    server, script = pair
    script.says('<tool_call>\n{"name": "crm__note", "arguments": {"input": "x"}}\n</tool_call>')
    (call,) = ask(server, tools=[GROUP], tool_choice="required").output
    assert (call.type, call.namespace, call.name, call.input) == ("custom_tool_call", "crm", "note", "x")
    script.says("ok")
    output = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "noted"}
    said = call.model_dump(exclude_none=True)
    ask(server, tools=[GROUP], input=[{"role": "user", "content": "x"}, said, output])
    assert '"name": "crm__note", "arguments": {"input": "x"}' in prompt(server, script)


@pytest.mark.parametrize(
    "tools,words",
    [
        ([GROUP, GROUP], "two tools are named 'crm__find'"),
        ([GROUP, TOOLS[0] | {"name": "crm__find"}], "two tools are named 'crm__find'"),
        ([GROUP | {"tools": [GROUP]}], "tools.0.tools.0.type"),
        ([{"type": "namespace", "name": "x"}], "tools.0.tools"),
        ([GROUP | {"name": None}], "tools.0.name"),
        ([TOOLS[0] | {"tools": []}], "tools.0.tools: only"),
        ([GROUP | {"name": f"n{i}", "tools": [TOOLS[0]] * 1024} for i in range(2)], "more than 1024"),
    ],
)
def test_namespaces_that_cannot_be(pair, tools, words):
    server, _ = pair
    answer = server.http.post("/v1/responses", json={"input": "Hi", "tools": tools})
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]


def test_how_an_answer_ends(plain, monkeypatch):
    server, script = plain
    script.says("one two", finish_reason="length")
    answer = ask(server)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.output[0].status == "incomplete" and answer.completed_at is None
    script.says("one two", finish_reason="length", seed=2)
    assert streamed(server)[-1].type == "response.incomplete"
    script.says("")
    assert ask(server).output_text == "" and streamed(server)[-1].type == "response.completed"

    def generate(request):
        ids = server.state.tokenizer.encode("Hi", False)
        return Stream(
            [
                EngineOutput(request.request_id, ids),
                EngineOutput(request.request_id, [], finish_reason="error", error="out of luck"),
            ]
        )

    monkeypatch.setattr(script, "generate", generate)
    last = streamed(server)[-1]
    assert (last.type, last.response.status, last.response.error.message) == (
        "response.failed",
        "failed",
        "out of luck",
    )
    assert server.openai.responses.retrieve(last.response.id).status == "failed"
    with pytest.raises(openai.InternalServerError, match="out of luck"):
        ask(server)


def test_logprobs(plain):
    server, script = plain
    for fields in ({"top_logprobs": 1}, {"include": ["message.output_text.logprobs"]}):
        script.says("Hello you")
        whole = ask(server, **fields).output[0].content[0].logprobs
        script.says("Hello you")
        events = streamed(server, **fields)
        told = [one for event in events if event.type == "response.output_text.delta" for one in event.logprobs]
        assert "".join(one.token for one in whole).startswith("Hello") and len(told) == len(whole)
        assert whole[0].logprob == told[0].logprob == -0.5


def test_truncation_leaves_out_the_oldest_turns(plain):
    server, script = plain
    script.says("ok")
    turns = []
    for i in range(8):
        turns += [
            {"role": "user", "content": f"turn {i} " + "x " * 400},
            {"role": "assistant", "content": f"answer {i}"},
        ]
    items = [{"role": "system", "content": "S"}, *turns, {"role": "user", "content": "last"}]
    with pytest.raises(openai.BadRequestError) as caught:
        ask(server, input=items)
    assert caught.value.code == "context_length_exceeded"
    answer = ask(server, input=items, truncation="auto", max_output_tokens=100)
    told = prompt(server, script)
    assert answer.truncation == "auto" and "turn 0" not in told and "turn 7" in told and "last" in told
    assert told.startswith("<|im_start|>system\nS<") and 3000 < len(script.requests[-1].prompt_token_ids) <= 3996


def test_counting_input_tokens(pair):
    server, script = pair
    script.says("Hi")
    fields = {"input": "Weather?", "tools": TOOLS, "instructions": "S"}
    counted = server.openai.responses.input_tokens.count(model=MODEL, **fields)
    first = ask(server, **fields)
    assert counted.input_tokens == first.usage.input_tokens
    fields = {"input": "more", "previous_response_id": first.id}
    counted = server.openai.responses.input_tokens.count(model=MODEL, **fields)
    assert counted.input_tokens == ask(server, **fields).usage.input_tokens


def test_effort_reaches_the_template(pair):
    server, script = pair
    script.says("Hi")
    assert ask(server, reasoning={"effort": "none"}).reasoning.effort == "none"
    assert "<think>\n\n</think>" in prompt(server, script)
    ask(server, reasoning={"effort": "low"})
    assert script.requests[-1].sampling.thinking.budget == 1024


def user(*parts):
    return [{"role": "user", "content": list(parts)}]


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"model": "none"}, "model", "does not exist"),
        ({"input": None}, "input", "Missing"),
        ({"input": []}, "input", "Missing"),
        ({"input": 3}, "input", "expected"),
        ({"max_output_tokens": 0}, "max_output_tokens", ">= 1"),
        ({"max_output_tokens": 10**6}, "max_output_tokens", "too large"),
        ({"temperature": 3}, "temperature", "<= 2"),
        ({"metadata": {"a": "b" * 600}}, "metadata", "512"),
        ({"include": ["secrets"]}, "include.0", "secrets"),
        ({"truncation": "some"}, "truncation", "some"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools.0.type", "'mcp'"),
        ({"tools": [{"type": "file_search", "vector_store_ids": ["a"]}]}, "tools.0.type", "'file_search'"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools.0.type", "'mcp'"),
        ({"tools": [{"type": "function"}]}, "tools.0.name", "Missing"),
        ({"tools": TOOLS[:1] * 2}, "tools", "two tools"),
        ({"tool_choice": "required"}, "tool_choice", "only allowed"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name", "'x'"),
        ({"tools": TOOLS, "tool_choice": {"type": "file_search"}}, "tool_choice.type", "file_search"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "Missing"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "not supported"),
        ({"background": True, "store": False}, "background", "stored"),
        ({"input": user({"type": "input_image", "image_url": "data:"})}, "input.0.content.0.image_url", "no images"),
        ({"input": user({"type": "input_file"})}, "input.0.content.0.type", "input_file"),
        ({"input": [{"type": "mesage", "content": "x"}]}, "input.0.type", "mesage"),
        ({"input": [{"content": "x"}]}, "input.0.role", "Missing"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input.0.role", "robot"),
        (
            {"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]},
            "input.0.call_id",
            "no call before",
        ),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0.id", "no item with id 'msg_1' is stored"),
        ({"input": [{"type": "item_reference", "id": "fc_1"}]}, "input.0.id", "no item with id 'fc_1' is stored"),
        ({"conversation": "conv_1"}, "conversation", "stored"),
        ({"conversation": "conv_1", "previous_response_id": "resp_1"}, "conversation", "exclude"),
        ({"input": "x " * 6000}, "input", "maximum context"),
        ({"reasoning": {"effort": "enormous"}}, "reasoning.effort", "enormous"),
    ],
)
def test_wrong_input(pair, change, param, words):
    server, _ = pair
    answer = server.http.post("/v1/responses", json={"model": MODEL, "input": "Weather?"} | change)
    error = answer.json()["error"]
    assert answer.status_code in (400, 404) and error["param"] == param and words in error["message"], answer.text


def test_async_client_streams(plain):
    server, script = plain
    script.says("Hello", seed=2)

    async def read() -> str:
        async with (
            server.aopenai() as client,
            client.responses.stream(model=MODEL, input="Hi") as stream,
        ):
            async for event in stream:
                if event.type == "response.output_text.done":
                    text = event.text
            assert (await stream.get_final_response()).output_text == text
            return text

    assert asyncio.run(read()) == "Hello"


@pytest.mark.slow
def test_what_the_sdk_has_and_this_server_has_not(server):
    with pytest.raises(openai.NotFoundError, match="type compaction_trigger"):
        server.openai.responses.compact(model=MODEL, input="hi")
    with pytest.raises(openai.BadRequestError, match="not supported"):
        server.openai.responses.create(model=MODEL, input="hi", moderation={"model": "m"})
