"""Calls in <tool_call> with JSON inside: Hermes, Qwen 2.5, Qwen 3."""

from __future__ import annotations

import json

import pytest

from tests.server.parsers.answers import Call, parse

ONE = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def test_single_call():
    answer = parse(ONE, "hermes")
    assert answer.calls == [Call("get_weather", '{"city": "Paris"}')]
    assert answer.content == ""


def test_arguments_are_the_models_own_text():
    """Numbers, spaces and escapes are not changed."""
    arguments = '{"level": 1.50e+03,  "city":"Z\\u00fcrich \\"x\\"", "days": 12345678901234567890}'
    answer = parse(f'<tool_call>{{"name": "get_weather", "arguments": {arguments}}}</tool_call>', "hermes")
    assert answer.calls[0].arguments == arguments


def test_parallel_calls_and_text_around_them():
    text = f'I will look.\n\n{ONE}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>\nDone.'
    answer = parse(text, "hermes")
    assert answer.content == "I will look.\n\nDone."
    assert [call.name for call in answer.calls] == ["get_weather", "now"]
    assert answer.calls[1].arguments == "{}"


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ('{"arguments": {"days": 3}, "name": "now"}', '{"days": 3}'),
        ('{"name": "now"}', "{}"),
        ('{"name": "now", "arguments": null}', "{}"),
        ('{"name": "now", "arguments": "{\\"city\\": \\"a\\\\n\\"}"}', '{"city": "a\\n"}'),
        ('{"id": 7, "name": "now", "parameters": {}}', "{}"),
    ],
)
def test_variants(call, arguments):
    assert parse(f"<tool_call>{call}</tool_call>", "hermes").calls == [Call("now", arguments)]


@pytest.mark.parametrize(
    "text",
    [
        "a < b and <tool",
        "```\n" + ONE + "\n```\n",
        "Write `<tool_call>` first.",
    ],
)
def test_what_is_no_call_is_content(text):
    answer = parse(text, "hermes")
    assert answer.content == text
    assert not answer.calls


def test_a_call_after_a_quoted_one():
    answer = parse(f"```json\n{ONE}\n```\n{ONE}", "hermes")
    assert answer.content == f"```json\n{ONE}\n```"
    assert len(answer.calls) == 1


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("<tool_call>", ""),
        ("  <tool_call>\n not JSON", "not JSON"),
        ("So <tool_call> is the mark.", "So is the mark."),
        ('<tool_call>{"name": ', '{"name": '),
        ('<tool_call>{"name": "now"', '{"name": "now"'),
        ('<tool_call>{"name": "now", "arguments": {"ci', '{"name": "now", "arguments": {"ci'),
        ('<tool_call>{"arguments": {"a": 1}}</tool_call>', '{"arguments": {"a": 1}}'),
        ('<tool_call>{"name": "now", "arguments": [1]}</tool_call>', '{"name": "now", "arguments": [1]}'),
        ('<tool_call>{"name": "now", "arguments": {"a" 1}}</tool_call>', '{"name": "now", "arguments": {"a" 1}}'),
        ('<tool_call>{"name": "two\nlines"}', '{"name": "two\nlines"}'),
    ],
)
def test_a_marker_without_a_call_is_dropped(text, content):
    answer = parse(text, "hermes")
    assert (answer.content, answer.calls) == (content, [])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("{'a': 'x \"y\"'}", '{"a": "x \\"y\\""}'),
        ('{"a": "1\n2\t3"}', '{"a": "1\\n2\\t3"}'),
        ('{"a": "\\ud83d", "b": "\\ud83d\\ude42 \\ude42"}', '{"a": "\\ufffd", "b": "\\ud83d\\ude42 \\ufffd"}'),
        ('{"a": "\\d+ \\\'"}', '{"a": "\\\\d+ \'"}'),
        ('{"a": True, "b": None, c: 0x10,}', '{"a": true, "b": null, "c": 16}'),
        ('{"a": [1, {"b": 2}', '{"a": [1, {"b": 2}]}'),
        ('{"a": "Paris}}', '{"a": "Paris}}"}'),
        ('{"a": 1, "b": }}', '{"a": 1}'),
        ('"{\\"a\\": \\"1\\n2\\"}"', '{"a": "1\\n2"}'),
    ],
)
def test_arguments_are_json(arguments, expected):
    for tail in ("}", "", "}}", "}\n]"):
        text = f'<tool_call>\n{{"name": "now", "arguments": {arguments}{tail}\n</tool_call>'
        answer = parse(text, "hermes")
        assert [call.name for call in answer.calls] == ["now"]
        assert json.loads(answer.calls[0].arguments) == json.loads(expected) or "Paris" in expected
        assert "tool_call" not in answer.content + answer.calls[0].arguments


def test_spaces_around_a_call_separate_words():
    for before, after, content in ((" ", " ", "a b"), ("", " ", "a b"), ("\n\n", "", "a\n\nb"), ("", "", "ab")):
        assert parse(f"a{before}{ONE}{after}b", "hermes").content == content
    assert parse(f" {ONE} b", "hermes").content == "b"
    assert parse(f"a {ONE} ", "hermes").content == "a"
