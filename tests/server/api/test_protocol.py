"""Tests parsing of bodies: every field, every kind of error with its `param`, and the handling of undeclared fields."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.server.api.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from quire.server.api.openai.responses.protocol import (
    ConversationRequest,
    ConversationUpdate,
    InputTokensRequest,
    NewItems,
    ResponsesRequest,
)
from quire.server.api.pooling.protocol import RerankRequest
from quire.server.errors import BadRequest
from quire.server.http import parse_body
from quire.server.http.parse_body import MAX_NESTING, parse

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
TEXT = {"prompt": "Hi"}


def parse_object(data: dict[str, Any], cls: type = ChatCompletionRequest, strict: bool = False):
    return parse(json.dumps(data).encode(), cls, strict=strict)


def error_of(data: dict[str, Any] | bytes, cls: type = ChatCompletionRequest, strict: bool = False) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        parse(data if isinstance(data, bytes) else json.dumps(data).encode(), cls, strict=strict)
    return caught.value


OUT_OF_RANGE = [
    ("temperature", -0.1, "0"),
    ("temperature", 2.1, "2"),
    ("top_p", 0, "0"),
    ("top_p", 1.1, "1"),
    ("top_k", -2, "-1"),
    ("min_p", -0.1, "0"),
    ("min_p", 1.5, "1"),
    ("presence_penalty", 2.5, "2"),
    ("presence_penalty", -2.5, "-2"),
    ("frequency_penalty", 3, "2"),
    ("frequency_penalty", -3, "-2"),
    ("repetition_penalty", 0, "0"),
    ("n", 0, "1"),
    ("n", 129, "128"),
    ("max_tokens", -1, "0"),
    ("min_tokens", -1, "0"),
    ("seed", 2**63, str(2**63 - 1)),
    ("prompt_logprobs", -2, "-1"),
    ("truncate_prompt_tokens", -2, "-1"),
    ("priority", 2**63, str(2**63 - 1)),
    ("t_max_predict_ms", -1, "0"),
]


@pytest.mark.parametrize("cls,base", [(ChatCompletionRequest, CHAT), (CompletionRequest, TEXT)])
@pytest.mark.parametrize("name,value,limit", OUT_OF_RANGE)
def test_out_of_range_names_field_limit_and_value(cls, base, name, value, limit):
    error = error_of(base | {name: value}, cls)
    assert error.status == 400 and error.param == name
    assert name in error.message and limit in error.message and str(value) in error.message


WRONG_TYPE = [
    ("temperature", "hot"),
    ("n", 1.5),
    ("n", True),
    ("stream", "yes"),
    ("stop", 5),
    ("stop_token_ids", "x"),
    ("logit_bias", []),
    ("max_tokens", "16"),
    ("seed", "a"),
    ("ignore_eos", 1),
    ("cache_salt", 5),
    ("stream_options", True),
    ("model", 5),
    ("bad_words", "x"),
    ("allowed_token_ids", 3),
]


@pytest.mark.parametrize("name,value", WRONG_TYPE)
def test_wrong_type_names_the_field(name, value):
    error = error_of(CHAT | {name: value})
    assert error.param == name and name in error.message


NESTED = [
    ({"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": 5}]}, "messages.1.content"),
    ({"messages": [{"content": "a"}]}, "messages.0.role"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"text": "b"}]}]},
        "messages.0.content.1.type",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "x"}}]}]},
        "messages.0.content.0.input_audio",
    ),
    ({"messages": [{"role": "assistant", "content": "a", "tool_calls": [{"id": 1}]}]}, "messages.0.tool_calls.0.id"),
    ({"messages": [{"role": "assistant", "content": "a", "reasoning_content": 5}]}, "messages.0.reasoning_content"),
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({}, "messages"),
    (CHAT | {"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
    (CHAT | {"stop": ["a", ""]}, "stop.1"),
    (CHAT | {"stop": ""}, "stop"),
    (CHAT | {"logit_bias": {"5": 1e7}}, "logit_bias"),
    (CHAT | {"logit_bias": {"5": "x"}}, "logit_bias"),
    (CHAT | {"stop_token_ids": [1, -1]}, "stop_token_ids.1"),
    (CHAT | {"allowed_token_ids": []}, "allowed_token_ids"),
    (CHAT | {"cache_salt": "a/b"}, "cache_salt"),
    (CHAT | {"cache_salt": "x" * 129}, "cache_salt"),
    (CHAT | {"cache_salt": ""}, "cache_salt"),
    (CHAT | {"request_id": "a b"}, "request_id"),
    (CHAT | {"request_id": "a\n"}, "request_id"),
    (CHAT | {"truncation_side": "middle"}, "truncation_side"),
]


@pytest.mark.parametrize("data,param", NESTED)
def test_param_is_the_dotted_path(data, param):
    assert error_of(data).param == param


@pytest.mark.parametrize(
    "cls,base,name,value",
    [
        *[
            (ChatCompletionRequest, CHAT, name, value)
            for name, value in [
                ("modalities", ["text", "audio"]),
                ("audio", {}),
                ("web_search_options", {}),
                ("echo", True),
            ]
        ],
        *[
            (cls, base, name, value)
            for cls, base in [(ChatCompletionRequest, CHAT), (CompletionRequest, TEXT)]
            for name, value in [
                ("use_beam_search", True),
                ("prompt_embeds", "x"),
                ("watermarking", {"x": 1}),
                ("lora_path", "x"),
            ]
        ],
        (CompletionRequest, TEXT, "tools", [{"type": "function"}]),
    ],
)
def test_meaningful_but_unsupported_is_refused(cls, base, name, value):
    error = error_of(base | {name: value}, cls)
    assert (error.status, error.param, error.code) == (400, name, "unsupported_parameter") and name in error.message


@pytest.mark.parametrize(
    "data",
    [
        {"tools": None},
        {"tools": []},
        {"tool_choice": "none"},
        {"tool_choice": None},
        {"response_format": {"type": "text"}},
        {"response_format": None},
        {"modalities": ["text"]},
        {"reasoning_effort": None},
        {"use_beam_search": False},
        {"functions": None},
        {
            "user": "u",
            "metadata": {"a": "b"},
            "store": False,
            "service_tier": "auto",
            "verbosity": "medium",
            "prompt_cache_key": "k",
            "prompt_cache_options": {"mode": "implicit", "ttl": "30m"},
            "parallel_tool_calls": True,
        },
        {
            "messages": [
                {
                    "role": "assistant",
                    "content": "a",
                    "refusal": None,
                    "annotations": None,
                    "audio": None,
                    "function_call": None,
                    "tool_calls": None,
                }
            ]
        },
    ],
)
def test_neutral_and_harmless_fields_are_accepted_without_a_warning(data):
    _, ignored = parse_object(CHAT | data)
    assert not ignored


def test_a_body_with_very_many_members_is_not_decoded(monkeypatch):
    """The members may be in any object, known or not; colons in strings do not count."""
    hello = b'"messages":[{"role":"user","content":"%b"}]'
    flood = b",".join(b'"%x\\\\":1' % i for i in range(parse_body.MAX_MEMBERS))
    text = b'a \\"b\\": \\\\' * parse_body.MAX_MEMBERS
    parse(b"{" + hello % text + b"}", ChatCompletionRequest)
    monkeypatch.setattr(parse_body, "_members", None)
    for body in (b"{%b,%b}", b'{%b,"x":{%b}}', b'{%b,"x":[{%b}]}'):
        with pytest.raises(BadRequest, match="more than 65536 fields in all"):
            parse(body % (hello % b"", flood), ChatCompletionRequest)


def test_unknown_fields_are_collected_or_refused():
    data = {
        "messages": [{"role": "user", "content": "a", "mood": "good"}],
        "temprature": 1,
        "stream": True,
        "stream_options": {"include_usag": True},
    }
    unknown = parse_object(data)[1].unknown
    assert sorted(unknown) == ["messages.0.mood", "stream_options.include_usag", "temprature"]
    error = error_of(data, strict=True)
    assert (
        error.param in unknown and error.code == "unknown_parameter" and all(name in error.message for name in unknown)
    )


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b'"x"',
        b"null",
        b"\xff\xfe",
        b'{"messages": NaN}',
        b'{"prompt": "\\ud800"}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
    ],
)
def test_bad_json_is_a_400(body):
    assert error_of(body).status == 400


def test_deep_nesting_is_refused_where_it_would_reach_templates():
    deep: Any = 1
    for _ in range(MAX_NESTING + 1):
        deep = {"a": deep}
    assert error_of(CHAT | {"chat_template_kwargs": deep}).param == "chat_template_kwargs"
    assert error_of(CHAT | {"documents": [deep]}).param == "documents.0"


TOO_MANY = [
    ("stop", ["a"] * 65, "64"),
    ("stop", "x" * 257, "256"),
    ("stop", ["x" * 257], "256"),
    ("stop_token_ids", [1] * 129, "128"),
    ("bad_words", ["a"] * 257, "256"),
    ("bad_words", ["x" * 129], "128"),
    ("allowed_token_ids", [1] * (2**14 + 1), "16384"),
    ("logit_bias", {str(i): 1 for i in range(2**14 + 1)}, "16384"),
    ("model", "x" * 257, "256"),
    ("repetition_penalty", 1001, "1000"),
    ("repetition_penalty", 5e-324, "0.001"),  # logits divided by it would be infinite
    ("t_max_predict_ms", 1e10, "0"),
]


@pytest.mark.parametrize("cls,base", [(ChatCompletionRequest, CHAT), (CompletionRequest, TEXT)])
@pytest.mark.parametrize("name,value,limit", TOO_MANY)
def test_too_much_names_field_and_limit(cls, base, name, value, limit):
    error = error_of(base | {name: value}, cls)
    assert error.param.split(".")[0] == name and name in error.message and limit in error.message


@pytest.mark.parametrize(
    "data,param",
    [
        ({"messages": CHAT["messages"] * 10_001}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 1001}]}, "messages.0.content"),
        (CHAT | {"documents": [{}] * 1001}, "documents"),
        (CHAT | {"chat_template_kwargs": {str(i): 1 for i in range(65)}}, "chat_template_kwargs"),
        (CHAT | {"chat_template_kwargs": {"a": "x" * 70_000}}, "chat_template_kwargs"),
        (CHAT | {"chat_template": "x" * (2**18 + 1)}, "chat_template"),
        (CHAT | {str(i): 1 for i in range(300)}, None),
        ({"messages": [CHAT["messages"][0] | {str(i): 1 for i in range(300)}]}, "messages.0"),
    ],
)
def test_conversations_are_bounded(data, param):
    assert error_of(data).param == param


def bounded(schema: dict[str, Any], path: str, components: dict[str, Any]) -> list[str]:
    """Paths in `schema` of lists, texts, numbers and free-form objects without a maximum."""
    if "$ref" in schema:
        return bounded(components[schema["$ref"].rpartition("/")[2]], path, components)
    wrong = [
        found
        for key in ("anyOf", "allOf")
        for i, one in enumerate(schema.get(key, []))
        for found in bounded(one, path, components)
    ]
    kind = schema.get("type")
    maxima = {"string": ("maxLength", "enum"), "array": ("maxItems",), "integer": ("maximum",), "number": ("maximum",)}
    if kind in maxima and not any(name in schema for name in maxima[kind]):
        wrong.append(path)
    if kind == "object" and "properties" not in schema and "maxProperties" not in schema:
        wrong.append(path)
    for name, one in schema.get("properties", {}).items():
        wrong += bounded(one, f"{path}.{name}", components)
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            wrong += bounded(schema[key], f"{path}.{key}", components)
    return wrong


@pytest.mark.parametrize(
    "cls",
    [
        ChatCompletionRequest,
        CompletionRequest,
        TokenizeRequest,
        DetokenizeRequest,
        ResponsesRequest,
        InputTokensRequest,
        ConversationRequest,
        ConversationUpdate,
        NewItems,
    ],
)
def test_everything_in_a_request_has_a_maximum_in_the_openapi_document(cls):
    (schema,), components = msgspec.json.schema_components([cls])
    assert bounded(schema, cls.__name__, components) == []


@pytest.mark.parametrize("prompt", ["a", ["a", "b"], [1, 2], [[1], [2, 3]]])
def test_prompt_shapes(prompt):
    assert parse_object({"prompt": prompt}, CompletionRequest)[0].prompt == prompt


@pytest.mark.parametrize(
    "prompt,param",
    [
        (5, "prompt"),
        (None, "prompt"),
        ([1.5], "prompt.0"),
        ([[1, "a"]], "prompt.0.1"),
        ([True], "prompt.0"),
        ({}, "prompt"),
    ],
)
def test_wrong_prompt_shapes(prompt, param):
    assert error_of({"prompt": prompt}, CompletionRequest).param == param


def test_other_bodies():
    assert error_of({}, DetokenizeRequest).param == "tokens"
    assert error_of({"tokens": ["a"]}, DetokenizeRequest).param == "tokens.0"
    assert error_of({"messages": []}, TokenizeRequest).param == "messages"
    assert parse_object({"prompt": "a", "add_special_tokens": False}, TokenizeRequest)[0].add_special_tokens is False


def test_null_means_absent_for_every_optional_field():
    for cls, base in ((ChatCompletionRequest, CHAT), (CompletionRequest, TEXT)):
        names = [name for name in cls.__struct_fields__ if name not in base]
        request, ignored = parse_object(base | dict.fromkeys(names), cls)
        assert not ignored and all(getattr(request, name) is None for name in names)
        assert request == parse_object(base, cls)[0]


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "x"]), inner, max_size=3)
    ),
    max_leaves=8,
)
NAMES = sorted(
    {
        *ChatCompletionRequest.__struct_fields__,
        *ChatCompletionRequest.unsupported,
        *ChatCompletionRequest.harmless,
        *ChatCompletionRequest.hints,
        "prompt",
    }
)


@settings(suppress_health_check=[HealthCheck.too_slow])  # it depends on the clock
@given(
    st.dictionaries(st.sampled_from(NAMES), JSON, max_size=5),
    st.sampled_from([ChatCompletionRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest]),
)
def test_any_json_object_is_parsed_or_refused_by_name(data, cls):
    body = msgspec.json.encode(data)
    try:
        request, ignored = parse(body, cls)
    except BadRequest as error:
        assert error.param is None or error.param.split(".")[0] in {*data, *cls.__struct_fields__}
    else:
        known = {*cls.__struct_fields__, *cls.harmless, *cls.unsupported, *cls.hints}
        assert all(name.split(".")[0] in data for name in (*ignored.unknown, *ignored.hints))
        assert all(name in known or name in ignored.unknown for name in data)
        assert isinstance(request, cls)


@pytest.mark.parametrize("documents", [["a", {"text": "b", "title": "c"}], [{"text": "b", "title": "c"}, "a"]])
def test_objects_among_texts_are_checked(documents):
    unknown = parse_object({"query": "q", "documents": documents}, RerankRequest)[1].unknown
    assert unknown == [f"documents.{[isinstance(one, dict) for one in documents].index(True)}.title"]
