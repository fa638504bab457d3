"""JSON that a model wrote goes out on every API and comes back in the history: with half surrogate pairs, control
characters, and numbers that no machine word holds.
"""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.server.parsers.json_writer import JsonWriter
from quire.server.parsers.model_json import has_half, raw_object, read, without_halves
from tests.helpers.server.running import MODEL
from tests.helpers.server.scripted import scripted_server, write_folder
from tests.helpers.server.templates import QWEN3_TOOLS

HALF = "\\ud83d"  # six characters: the escape of half of a pair
NUMBERS = f"[1e999, {2**200}, -0.10, 3.141592653589793238462643]"
WRITTEN = f'{{"city": "{HALF} \\ude00\\ud83d\\ude42 {HALF}", "text": "one\ntwo", "numbers": {NUMBERS}}}'
TEXTS = '"city": "\\ufffd \\ufffd🙂 \\ufffd", "text": "one\\ntwo"'
GIVEN = json.loads(f'{{{TEXTS}, "numbers": {NUMBERS}}}', parse_int=str, parse_float=str)
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {WRITTEN}}}\n</tool_call>'
FUNCTION = {"name": "weather", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": FUNCTION}
ASK = [{"role": "user", "content": "Weather?"}]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    with scripted_server(write_folder(tmp_path_factory.mktemp("json"), QWEN3_TOOLS)) as (server, script):
        script.says(CALL)
        yield server, script


def post(server, path, **body):
    response = server.http.post(path, json={"model": MODEL} | body, headers={"anthropic-version": "2023-06-01"})
    assert response.status_code == 200, response.text
    return response


def same(arguments: str) -> bool:
    arguments.encode()
    return json.loads(arguments, parse_int=str, parse_float=str) == GIVEN


def events(response) -> list[dict]:
    """Of a stream: events or lines."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n")]
    return [json.loads(line, parse_int=str, parse_float=str) for line in lines if line.startswith("{")]


def test_chat(pair):
    server, _ = pair
    message = post(server, "/v1/chat/completions", messages=ASK, tools=[TOOL]).json()["choices"][0]["message"]
    assert same(message["tool_calls"][0]["function"]["arguments"])
    chunks = events(post(server, "/v1/chat/completions", messages=ASK, tools=[TOOL], stream=True))
    calls = [call for chunk in chunks for c in chunk["choices"] for call in c["delta"].get("tool_calls") or ()]
    assert same("".join(call["function"].get("arguments", "") for call in calls))
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "4 °C"}
    history = [*ASK, message, result]
    for path in ("/v1/chat/completions", "/tokenize", "/apply-template", "/v1/chat/completions/render"):
        post(server, path, messages=history, tools=[TOOL])


@pytest.mark.parametrize("arguments", [f'{{"city": "{HALF}"}}', f'{{"{HALF}": 1}}', '{"a": 1e999}', "[" * 1500])
@pytest.mark.parametrize("stream", [False, True])
def test_any_arguments_in_the_history(pair, arguments, stream):
    server, _ = pair
    call = {"name": "weather", "arguments": arguments}
    histories = [
        [*ASK, {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": call}]}],
        [*ASK, {"role": "assistant", "function_call": call}, {"role": "function", "name": "weather", "content": "4"}],
    ]
    for history in histories:
        post(server, "/v1/chat/completions", messages=history, stream=stream)
    items = [{"role": "user", "content": "x"}, {"type": "function_call", "call_id": "c", **call}]
    post(server, "/v1/responses", input=items, stream=stream)


def test_the_older_form(pair):
    server, _ = pair
    body = post(server, "/v1/chat/completions", messages=ASK, functions=[FUNCTION]).json()
    message = body["choices"][0]["message"]
    assert same(message["function_call"]["arguments"])
    result = {"role": "function", "name": "weather", "content": "4 °C"}
    post(server, "/v1/chat/completions", messages=[*ASK, message, result], functions=[FUNCTION])


def test_responses(pair):
    server, _ = pair
    tools = [{"type": "function", **FUNCTION}]
    answer = post(server, "/v1/responses", input="Weather?", tools=tools).json()
    (call,) = (item for item in answer["output"] if item["type"] == "function_call")
    assert same(call["arguments"])
    done = events(post(server, "/v1/responses", input="Weather?", tools=tools, stream=True))[-1]
    assert same(done["response"]["output"][-1]["arguments"])
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "4 °C"}
    history = [{"role": "user", "content": "Weather?"}, *answer["output"], result]
    for path in ("/v1/responses", "/v1/responses/input_tokens"):
        post(server, path, input=history, tools=tools)
    post(server, "/v1/responses", input=[result], previous_response_id=answer["id"], tools=tools)


def test_messages(pair):
    server, _ = pair
    fields = {"max_tokens": 200, "tools": [{"name": "weather", "input_schema": {"type": "object"}}]}
    response = post(server, "/v1/messages", messages=ASK, **fields)
    (block,) = json.loads(response.text, parse_int=str, parse_float=str)["content"]
    assert block["type"] == "tool_use" and block["input"] == GIVEN
    streamed = events(post(server, "/v1/messages", messages=ASK, stream=True, **fields))
    assert same("".join(e["delta"].get("partial_json", "") for e in streamed if e["type"] == "content_block_delta"))
    content = {"type": "tool_result", "tool_use_id": block["id"], "content": "4 °C"}
    block["input"].pop("numbers")  # what a client sends must fit into its own numbers
    history = [*ASK, {"role": "assistant", "content": [block]}, {"role": "user", "content": [content]}]
    post(server, "/v1/messages", messages=history, **fields)
    post(server, "/v1/messages/count_tokens", messages=history, tools=fields["tools"])


@pytest.mark.parametrize("stream", [False, True])
def test_ollama(pair, stream):
    server, _ = pair
    parts = events(post(server, "/api/chat", messages=ASK, tools=[TOOL], stream=stream))
    (call,) = (call for part in parts for call in part["message"].get("tool_calls", ()))
    assert call["function"]["arguments"] == GIVEN
    call["function"]["arguments"].pop("numbers")
    call["function"].pop("index")
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    post(server, "/api/chat", messages=[*ASK, answer, {"role": "tool", "content": "4"}], stream=stream)


MESSAGES = {"messages": [{"role": "user", "content": "TEXT"}]}
BODIES = {
    "/v1/chat/completions": MESSAGES,
    "/v1/chat/completions/render": MESSAGES,
    "/apply-template": MESSAGES,
    "/tokenize": {"prompt": "TEXT"},
    "/v1/completions": {"prompt": "TEXT"},
    "/v1/responses": {"input": "TEXT"},
    "/v1/responses/input_tokens": {"input": "TEXT"},
    "/v1/messages": {"max_tokens": 1} | MESSAGES,
    "/v1/messages/count_tokens": MESSAGES,
    "/v1/embeddings": {"input": "TEXT"},
    "/api/chat": MESSAGES,
    "/api/generate": {"prompt": "TEXT"},
    "/generate": {"text": "TEXT"},
    "/infill": {"input_prefix": "TEXT", "input_suffix": ""},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("half", [HALF, HALF + " ", HALF + "\\u0041", "\\ude42"])
def test_halves_in_requests_are_refused(pair, path, half):
    server, _ = pair
    body = json.dumps({"model": MODEL} | BODIES[path]).replace("TEXT", half)
    headers = {"content-type": "application/json", "anthropic-version": "2023-06-01"}
    response = server.http.post(path, content=body, headers=headers)
    assert response.status_code == 400 and "half of a surrogate pair" in response.text


def test_a_template_that_writes_halves(tmp_path):
    folder = write_folder(tmp_path, QWEN3_TOOLS)
    with scripted_server(folder, trust_request_chat_template=True) as (server, _):
        body = {"messages": ASK, "chat_template": '{{ "\\ud83d" }}'}
        response = server.http.post("/v1/chat/completions", json=body)
        assert response.status_code == 400 and "half of a surrogate pair" in response.text


# ---- the reader and the writer by themselves


@given(st.text(st.characters()))
def test_the_reader_against_the_library(text):
    written = json.dumps([text, {text: 1}])
    value, keys = read(written)
    assert value == "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in json.loads(written)[0])
    assert list(keys) == [value]
    assert has_half(text) == (text.encode("utf-8", "replace").decode() != text)


def test_numbers_are_not_changed():
    for text in ("1e999", "-1e999", "9" * 5000, "NaN", "Infinity"):
        with pytest.raises(ValueError):
            read(f"[{text}]")
    assert read(f"[{2**70}]") == [2**70]
    assert bytes(raw_object('{"a":\n1e999, "b": 1.50}')) == b'{"a":1e999,"b":1.50}'
    assert without_halves('"\\\\ud83d \\ud83d"') == '"\\\\ud83d \\ufffd"'


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def written(text: str, sizes: list[int], **options) -> tuple[str, JsonWriter]:
    pieces: list[str] = []
    writer = JsonWriter(pieces.append, **options)
    for size in [*sizes, len(text)]:
        taken = writer.push(text[:size])
        if taken < len(text[:size]):
            break
        text = text[size:]
    return "".join(pieces), writer


@pytest.mark.slow
@settings(max_examples=200)
@given(JSON.map(lambda value: {"a": value}), st.booleans(), st.sampled_from([None, 1]), st.lists(st.integers(0, 5)))
def test_the_writer_does_not_change_json(value, ascii_only, indent, sizes):
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    out, writer = written(text + " rest", sizes)
    assert writer.done and out == text


@pytest.mark.slow
@settings(max_examples=200)
@given(st.text(st.sampled_from("{}[]:,\"'\\u0d8tTn1.e \n"), max_size=40), st.lists(st.integers(0, 5)), st.booleans())
def test_the_writer_writes_json_or_nothing(text, sizes, cut):
    pieces: list[str] = []
    for given_sizes in (sizes, []):
        parts: list[str] = []
        writer = JsonWriter(parts.append, only_objects=True)
        rest = "{" + text
        for size in [*given_sizes, len(rest)]:
            if writer.push(rest[:size]) < len(rest[:size]):
                break
            rest = rest[size:]
        writer.close(cut)
        pieces.append("".join(parts))
    assert pieces[0] == pieces[1]
    assert pieces[0] == "" or isinstance(json.loads(pieces[0]), dict)
