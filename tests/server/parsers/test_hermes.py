"""Calls in <tool_call> with JSON inside: Hermes, Qwen 2.5, Qwen 3."""

from __future__ import annotations

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
    assert answer.content == "I will look.Done."
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
        "<tool_call>",
        "  <tool_call>\n not JSON",
        '<tool_call>{"name": ',
        '<tool_call>{"arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"name": "two\nlines"}',
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


def test_broken_arguments_end_the_call():
    answer = parse('<tool_call>{"name": "now", "arguments": {"a": \'x\'}}\n</tool_call>', "hermes")
    assert answer.calls == [Call("now", '{"a": ')]
    assert answer.content == "'x'}}\n</tool_call>"
