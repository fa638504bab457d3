"""Hints are never a 400: what has no effect here is accepted and named in the `Warning` header, in every dialect, with
the vendors' own clients.
"""

from __future__ import annotations

import logging
from typing import Any

import anthropic
import msgspec
import ollama
import pytest

from quire.server.api.anthropic import protocol as of_anthropic
from quire.server.api.ollama import protocol as of_ollama
from quire.server.api.openai import protocol as of_openai
from quire.server.api.openai.embeddings import EmbeddingRequest
from quire.server.api.openai.responses import protocol as of_responses
from quire.server.api.textgen import protocol as of_textgen
from quire.server.http.parse_body import parse
from tests.helpers.server.running import MODEL, poll

HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "name": "time", "parameters": {"type": "object", "properties": {}}}


def warning_of(answer: Any) -> str:
    return answer.headers.get("warning", "")


def effectless(warning: str) -> set[str]:
    """The names in a Warning header, all of which must be known parameters."""
    assert warning.startswith('199 quire "parameters without effect here: '), warning
    return set(warning.partition("here: ")[2].rstrip('"').split(", "))


CHAT = {
    "verbosity": "low",
    "service_tier": "flex",
    "store": True,
    "safety_identifier": "user-1",
}
RESPONSES = {
    "text": {"verbosity": "high"},
    "service_tier": "priority",
    "safety_identifier": "user-1",
    "reasoning": {"mode": "pro", "context": "all_turns"},
    "context_management": [{"type": "compaction", "compact_threshold": 1000}],
    "prompt_cache_options": {"comparison_response_id": "resp_1"},
    "tools": [TOOL | {"defer_loading": True, "allowed_callers": ["programmatic"]}],
}
TOLD = {
    "text.verbosity",
    "service_tier",
    "safety_identifier",
    "reasoning.mode",
    "reasoning.context",
    "context_management",
    "prompt_cache_options.comparison_response_id",
    "tools.0.defer_loading",
    "tools.0.allowed_callers",
}


def test_openai(server):
    chat = server.openai.chat.completions.with_raw_response
    assert effectless(warning_of(chat.create(model=MODEL, messages=HELLO, max_tokens=1, **CHAT))) == set(CHAT)
    texts = server.openai.completions.with_raw_response
    extra = {"reasoning_effort": "low", "length_penalty": 0.5}
    assert effectless(warning_of(texts.create(model=MODEL, prompt="a", max_tokens=1, extra_body=extra))) == set(extra)
    responses = server.openai.responses.with_raw_response
    answer = responses.create(model=MODEL, input="Hello", max_output_tokens=16, **RESPONSES)
    assert effectless(warning_of(answer)) == TOLD
    counted = server.openai.responses.input_tokens.with_raw_response.count(
        model=MODEL, input="Hello", personality="friendly", text={"verbosity": "low"}
    )
    assert effectless(warning_of(counted)) == {"personality", "text.verbosity"}


def test_anthropic(server):
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    fields = {"service_tier": "priority", "speed": "fast", "container": "container_1", "inference_geo": "us"}
    extra = {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}
    extra |= {"thinking": {"type": "adaptive", "display": "omitted"}}
    tool = {"name": "time", "input_schema": {"type": "object"}, "defer_loading": True}
    answer = client.messages.with_raw_response.create(
        model=MODEL, max_tokens=2, messages=HELLO, tools=[tool], extra_body=fields | extra
    )
    told = {*fields, "context_management", "thinking.display", "tools.0.defer_loading"}
    assert effectless(warning_of(answer)) == told
    neutral = {"service_tier": "auto", "speed": "standard", "metadata": {"user_id": "u"}}
    for thinking in ({"type": "between_tools"}, {"type": "adaptive", "display": "summarized"}):
        answer = client.messages.with_raw_response.create(
            model=MODEL, max_tokens=2, messages=HELLO, thinking=thinking, extra_body=neutral
        )
        assert not warning_of(answer)


def test_ollama(server):
    options = {"tfs_z": 0.5, "penalize_newline": False, "num_predict": 1}
    answer = ollama.Client(host=server.url).chat(MODEL, HELLO, options=options)
    assert answer.done
    body = {"model": MODEL, "messages": HELLO, "stream": False, "options": options, "truncate": True}
    told = {f"options.{name}" for name in options if name != "num_predict"}
    assert effectless(warning_of(server.http.post("/api/chat", json=body))) == told | {"truncate"}


PARTS = [
    {"type": "text", "text": "One."},
    {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    {"type": "refusal", "refusal": "Two."},
    {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
    {"type": "output_text", "text": "Three."},
    {"type": "file", "file": {"file_id": "f"}},
]


@pytest.mark.parametrize(
    ("said", "text", "names"),
    [
        (
            {"content": PARTS},
            "One.\nTwo.\nThree.",
            ["content.1 (input_audio)", "content.3 (thinking)", "content.5 (file)"],
        ),
        ({"content": PARTS[1:2]}, "", ["content.0 (input_audio)"]),
        ({"content": None, "refusal": "No."}, "No.", []),
        ({"content": None, "audio": {"id": "audio_1"}}, "", ["audio"]),
        ({"audio": {"id": "audio_1", "data": "AAAA", "expires_at": 1, "transcript": "Aloud."}}, "Aloud.", []),
        ({"content": "Written.", "audio": {"id": "audio_1"}}, "Written.", ["audio"]),
    ],
)
def test_what_an_assistant_said_elsewhere(server, said, text, names):
    messages = [*HELLO, {"role": "assistant"} | said, *HELLO]
    chat = server.openai.chat.completions.with_raw_response.create(model=MODEL, messages=messages, max_tokens=1)
    assert warning_of(chat) == "" if not names else effectless(warning_of(chat)) == {f"messages.1.{n}" for n in names}
    rendered = server.http.post("/v1/chat/completions/render", json={"messages": messages}).json()
    assert f"<|im_start|>assistant\n{text}<|im_end|>" in rendered["prompt"]


def test_what_a_user_said_is_never_left_out(server):
    for part in PARTS:
        if part["type"] not in ("text", "refusal"):
            body = {"messages": [{"role": "user", "content": [part]}]}
            refused = server.http.post("/v1/chat/completions", json=body)
            assert refused.status_code == 400 and refused.json()["error"]["param"].startswith("messages.0.content.0")


def test_calls_of_tools_with_another_servers_type(server):
    call = {"id": "c", "type": "builtin_function", "function": {"name": "$web_search", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "c", "content": "x"}
    messages = [*HELLO, {"role": "assistant", "tool_calls": [call]}, result, *HELLO]
    answer = server.http.post("/v1/chat/completions/render", json={"messages": messages})
    assert answer.status_code == 200 and "$web_search" in answer.json()["prompt"]


# ---- every hint of every type of request

REQUIRED = {
    of_openai.ChatCompletionRequest: {"messages": HELLO},
    of_openai.CompletionRequest: {"prompt": "a"},
    of_openai.TokenizeRequest: {"prompt": "a"},
    of_openai.DetokenizeRequest: {"tokens": [1]},
    EmbeddingRequest: {"input": "a"},
    of_responses.ResponsesRequest: {"input": "a"},
    of_responses.InputTokensRequest: {"input": "a"},
    of_anthropic.MessagesRequest: {"model": "m", "max_tokens": 1, "messages": HELLO},
    of_anthropic.CountTokensRequest: {"model": "m", "messages": HELLO},
    of_ollama.ChatRequest: {"model": "m", "messages": HELLO},
    of_ollama.GenerateRequest: {"model": "m", "prompt": "a"},
}
HINTS = [(cls, name) for cls in REQUIRED for name in cls.hints if name not in cls.__struct_fields__]


@pytest.mark.slow
@pytest.mark.parametrize(("cls", "name"), HINTS, ids=[f"{cls.__name__}-{name}" for cls, name in HINTS])
@pytest.mark.parametrize("value", ["x", 7, {"a": [1]}, [{}], "y" * 1000])
def test_any_value_of_a_hint_is_accepted_and_told_even_when_strict(cls, name, value):
    body = msgspec.json.encode(REQUIRED[cls] | {name: value})
    _, ignored = parse(body, cls, strict=True)
    assert (ignored.unknown, ignored.hints) == ([], [name])
    for neutral in (None, *cls.hints[name]):
        assert not parse(msgspec.json.encode(REQUIRED[cls] | {name: neutral}), cls)[1]


def test_nested_hints_are_told_by_their_path():
    body = {"text": "a", "sampling_params": {"stream_interval": 4}}
    assert parse(msgspec.json.encode(body), of_textgen.TextRequest)[1].hints == ["sampling_params.stream_interval"]


def test_input_type_of_embeddings():
    body = {"input": "a", "input_type": "query"}
    assert parse(msgspec.json.encode(body), EmbeddingRequest)[1].hints == ["input_type"]


def test_hints_and_unknown_fields_are_told_apart_and_logged_once(server, caplog):
    caplog.set_level(logging.WARNING)
    body = {"messages": HELLO, "max_tokens": 1, "verbosity": "low", "temprature_of": 1}
    for _ in range(3):
        answer = server.http.post("/v1/chat/completions", json=body)
        assert warning_of(answer) == (
            '199 quire "unknown parameters ignored: temprature_of; parameters without effect here: verbosity"'
        )
    poll(lambda: "temprature_of" in caplog.text)
    assert caplog.text.count("temprature_of") == 1 and caplog.text.count("has no effect here: verbosity") <= 1


# ---- hints that do have an effect


def test_stop_of_a_response_is_honoured(server):
    whole = server.openai.responses.create(model=MODEL, input="Hello", temperature=0, max_output_tokens=40)
    text = whole.output_text
    stop = text[len(text) // 2 :][:3]
    for given in (stop, ["never said", stop]):
        answer = server.openai.responses.with_raw_response.create(
            model=MODEL, input="Hello", temperature=0, max_output_tokens=40, extra_body={"stop": given, "seed": 5}
        )
        assert not warning_of(answer)
        cut = answer.parse()
        assert stop not in cut.output_text
    for wrong in (3, "x" * 300):
        refused = server.http.post("/v1/responses", json={"input": "a", "stop": wrong})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "stop"


def test_a_prompt_is_computed_without_an_answer(server):
    """`prewarm` of OpenAI's Responses, max_tokens 0 of Anthropic's Messages."""
    text = "How much of this prompt is in the cache before it is asked for the first time? " * 3
    warm = server.openai.responses.create(model=MODEL, input=text, prompt_cache_options={"prewarm": True})
    assert (warm.status, warm.output, warm.usage.output_tokens) == ("completed", [], 0)
    events = list(
        server.openai.responses.create(model=MODEL, input=text, prompt_cache_options={"prewarm": True}, stream=True)
    )
    assert events[-1].type == "response.completed" and events[-1].response.output == []
    asked = server.openai.responses.create(model=MODEL, input=text, max_output_tokens=16)
    assert asked.usage.input_tokens_details.cached_tokens > asked.usage.input_tokens // 2
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    ask = [{"role": "user", "content": text + "And of this?"}]
    warm = client.messages.create(model=MODEL, max_tokens=0, messages=ask)
    assert (warm.content, warm.usage.output_tokens) == ([], 0) and warm.stop_reason == "max_tokens"
    with client.messages.stream(model=MODEL, max_tokens=0, messages=ask) as stream:
        assert stream.get_final_message().content == []
    asked = client.messages.create(model=MODEL, max_tokens=1, messages=ask)
    assert asked.usage.cache_read_input_tokens > asked.usage.input_tokens
