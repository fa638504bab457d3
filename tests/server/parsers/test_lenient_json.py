"""JSON as models write it is read alike in every format that carries JSON."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from quire.server.parsers.conversion import ArgumentTypes
from quire.server.parsers.json_writer import repaired
from quire.server.parsers.registry import TOOL_FORMATS, tool_format
from quire.server.parsers.tools.base import Tool
from quire.server.text.chat_template import _parsed
from tests.helpers.server.templates import TEMPLATES
from tests.server.parsers.answers import AnswerParser, add_up, events_of, parser
from tests.server.parsers.renderers import RENDERERS

TOOLS = [
    Tool(
        "save-note",
        {
            "type": "object",
            "properties": {"text": {"type": "string"}, "n": {"type": "number"}, "where": {"type": "object"}},
        },
    ),
    Tool("save_note", {"type": "object", "properties": {"where": {"type": "object"}}}),
]
DSML = "｜DSML｜"
# formats that write a whole call as JSON: what is around it
CALLS: dict[str, Callable[[str], str]] = {
    "hermes": lambda call: f"<tool_call>\n{call}\n</tool_call>",
    "mistral_json": lambda call: f"[TOOL_CALLS] [{call}]",
    "mistral": lambda call: f"[TOOL_CALLS][{call}]",
    "llama3_json": lambda call: call,
    "granite": lambda call: f"<|tool_call|>[{call}]",
    "granite4": lambda call: f"<tool_call>\n{call}\n</tool_call>",
    "phi4_mini_json": lambda call: f"<|tool_call|>[{call}]<|/tool_call|>",
    "json": lambda call: f"[{call}]",
    "llama4_pythonic": lambda call: call,
    "gemma3": lambda call: f"```json\n{call}\n```",
}
OTHERS: dict[str, Callable[[str], str]] = {  # the same calls in the formats' other spellings
    "granite": lambda call: f"<tool_call>\n{call}\n</tool_call>",
    "granite4": lambda call: f"<|tool_call|>[{call}]",
    "phi4_mini_json": lambda call: f"functools[{call}]",
    "json": lambda call: f"```json\n{call}\n```",
    "llama3_json": lambda call: f"<|python_tag|>{call}",
}
# formats that write the arguments of a call as JSON
ARGUMENTS: dict[str, Callable[[str], str]] = {
    "gpt_oss": lambda text: f"<|channel|>commentary to=functions.save-note <|constrain|>json<|message|>{text}<|call|>",
    "deepseek_v3": lambda text: (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>save-note\n```json\n{text}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "deepseek_v31": lambda text: (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>save-note<｜tool▁sep｜>{text}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "kimi_k2": lambda text: (
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.save-note:0<|tool_call_argument_begin|>{text}"
        "<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "mistral": lambda text: f"[TOOL_CALLS]save-note[ARGS]{text}",
    "gemma4": lambda text: f"<|tool_call>call:save-note{text}<tool_call|>",
    "functiongemma": lambda text: f"<start_function_call>call:save-note{text}<end_function_call>",
}
# formats that write the value of an argument as JSON
VALUES: dict[str, Callable[[str], str]] = {
    "qwen3_coder": lambda text: (
        f"<tool_call>\n<function=save-note>\n<parameter=where>\n{text}\n</parameter>\n</function>\n</tool_call>"
    ),
    "glm45": lambda text: (
        f"<tool_call>save-note\n<arg_key>where</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"
    ),
    "minimax_m2": lambda text: (
        f'<minimax:tool_call>\n<invoke name="save-note">\n<parameter name="where">{text}</parameter>\n</invoke>\n'
        "</minimax:tool_call>"
    ),
    **{
        name: lambda text, section=section: (
            f'<{DSML}{section}>\n<{DSML}invoke name="save-note">\n<{DSML}parameter name="where" string="false">{text}'
            f"</{DSML}parameter>\n</{DSML}invoke>\n</{DSML}{section}>"
        )
        for name, section in (("deepseek_v32", "function_calls"), ("deepseek_v4", "tool_calls"))
    },
    "pythonic": lambda text: f"[save_note(where={text})]",
}
PLAIN = '{"name": "save-note", "arguments": %s}'
BREAKS = ["\n", "\t", "\r", "\r\n", "\n\n\t", "\x0b", "\x1b", "\x00", "\u2028"]


def check(text: str, name: str, *arguments: dict, cuts: bool = False) -> None:
    """The text is read as calls with these arguments: whole, character by character, with `cuts` in any two pieces."""
    pieces = [[text], text, *([text[:cut], text[cut:]] for cut in range(1, len(text) if cuts else 1))]
    for answer in (add_up(events_of(parser(name, functions=TOOLS), one)) for one in pieces):
        assert [json.loads(call.arguments) for call in answer.calls] == list(arguments), text
        assert answer.content == "" and {call.name for call in answer.calls} <= {tool.name for tool in TOOLS}


def check_arguments(name: str, text: str, value: dict, cuts: bool = False) -> None:
    """The text of an object is read as `value`, wherever the format has such a text."""
    for spellings in (CALLS, OTHERS):
        if name in spellings:
            check(spellings[name](PLAIN % text), name, value, cuts=cuts)
    if name in ARGUMENTS:
        check(ARGUMENTS[name](text), name, value, cuts=cuts)
    if name in VALUES:
        check(VALUES[name](text), name, {"where": value}, cuts=cuts)


NAMES = sorted({*CALLS, *ARGUMENTS, *VALUES})


def test_every_format_is_here():
    assert sorted(candidate.name for candidate in TOOL_FORMATS) == NAMES


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_control_characters_in_strings(name):
    for characters in BREAKS:
        check_arguments(name, f'{{"text": "a{characters}b"}}', {"text": f"a{characters}b"}, cuts=len(characters) < 3)
    nested = '{"where": {"a\nb": ["x\ty", "\\u00e9\r"]}, "text": "\n"}'
    check_arguments(name, nested, {"where": {"a\nb": ["x\ty", "é\r"]}, "text": "\n"}, cuts=True)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{\r\n\t"text" :\n"a"\t,\n"n": 1\n}\n\t ', {"text": "a", "n": 1}),
        ('{"text": "a", "where": {"b": [1, 2,],},}', {"text": "a", "where": {"b": [1, 2]}}),
        ("{'text': 'a \"b\"\n', 'n': 1}", {"text": 'a "b"\n', "n": 1}),
        ('{text: "a", n: 1}', {"text": "a", "n": 1}),
        ('{"text": None, "where": {"a": [True, False]}}', {"text": None, "where": {"a": [True, False]}}),
        ('{"text": "C:\\dir \\/ \\ud83e\\udd99"}', {"text": "C:\\dir / 🦙"}),
        ('{"text": "it\'s"}', {"text": "it's"}),
        ('{"text": ""}', {"text": ""}),
        ('{"n": 1.50}', {"n": 1.5}),
        ('{"where": {"a": [1, 2}}', {"where": {"a": [1, 2]}}),
        ("{}", {}),
    ],
)
def test_other_notations(text, value):
    for name in NAMES:
        check_arguments(name, text, value)
        if name != "pythonic" and value != {"where": {"a": [1, 2]}}:  # which has round brackets around its values
            check_arguments(name, text.rstrip() + "}]", value)


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    "call",
    [
        '{"arguments": %s, "name": "save-note"}',
        '{\n"name" :\t"save-note"\r\n,\n"arguments":\n%s\n}\n',
        '{"name": "save-note", "parameters": %s,}',
        '{"id": 1, "type": "function", "name": "save-note", "arguments": %s}',
        "{'name': 'save-note', 'arguments': %s}",
        '{name: "save-note", arguments: %s}',
        '{"name": "save-note", "arguments": %s}}',
    ],
)
def test_notations_of_calls(name, call):
    value = {"text": "line 1\nline\t2 'x'"}
    whole = '{"text": "line 1\nline\t2 \'x\'"}'
    in_string, in_quotes = json.dumps(whole), "'" + whole.replace("'", "\\'") + "'"
    for text in (whole, in_string, in_string.replace("\\n", "\n"), in_quotes):
        for spellings in (CALLS, OTHERS):
            if name in spellings:
                check(spellings[name](call % text), name, value)


@pytest.mark.parametrize("name", ["mistral_json", "mistral", "granite", "granite4", "phi4_mini_json", "json"])
def test_lists_of_calls(name):
    one = PLAIN % '{"text": "a\nb"}'
    wrap = OTHERS[name] if name == "granite4" else CALLS[name]
    for separator in (", ", ",\n", " ,\t"):
        for end in ("", ",", ",\n", "\n"):
            check(wrap(one + separator + one + end), name, {"text": "a\nb"}, {"text": "a\nb"})
    check(
        "[save_note(where={'a': 1}), save_note(where={'a': 2}),\n]", "pythonic", *[{"where": {"a": i}} for i in (1, 2)]
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_format_that_is_named_is_read_whatever_the_template(name):
    calls = [
        ("save-note" if name not in ("pythonic", "llama4_pythonic", "gemma3") else "save_note", {"where": {"a": "b"}})
    ]
    for template in TEMPLATES.values():
        chosen = tool_format(name, template)
        answer = add_up(events_of(AnswerParser(chosen, None, TOOLS), [RENDERERS[name](calls)]))
        assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == calls, chosen.name


def test_a_value_that_is_not_closed():
    """Where the schema leaves no other meaning."""
    types = ArgumentTypes(
        {"properties": {"where": {"type": "object"}, "any": {}, "text": {"type": ["string", "object"]}}}
    )
    assert json.loads(types.convert("where", '{"a": ["b\nc"')) == {"a": ["b\nc"]}
    for name in ("any", "text"):
        assert json.loads(types.convert(name, '{"a": ["b')) == '{"a": ["b'
    assert repaired('{"a": 1} and more') is None and repaired("[" * 100) is None and repaired("") is None


def test_arguments_of_the_history():
    """A client sends them as the model or another server wrote them."""
    assert _parsed('{"text": "line 1\nline\t2"}') == {"text": "line 1\nline\t2"}
    assert _parsed("{'text': None,}") == {"text": None}
    assert _parsed('{"n": 12345678901234567890123}') == {"n": 12345678901234567890123}
    for text in ("plain", "[1]", '{"a" 1}', '{"n": 1e999}'):
        assert _parsed(text) == text
    assert _parsed(" \n") == {}
