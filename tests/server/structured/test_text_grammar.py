"""Lark grammars of custom tools: a text written as a JSON string, or in tags, matches the tool's own grammar."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.server.parsers.registry import TOOL_FORMATS, tool_format
from quire.server.parsers.tools.base import Tool
from quire.server.request.custom_input import CustomInput
from quire.server.structured.schema.escaped_pattern import IN_JSON
from quire.server.structured.structure import Structure
from quire.server.structured.text_grammar import LARK
from tests.server.parsers.answers import add_up, events_of, parser
from tests.server.structured.walk import accepts, matcher, walk

SUM = """
start: expr ("\\n" expr)* // lines
expr: NUMBER (OP NUMBER)*
OP: "+" | "\\\\" | "\\"" | "<"
NUMBER: /[0-9]{1,3}/
"""
QUOTED = """
start: (STRING | WORD | "ÄB"i | "a".."c")+ %ignore_
STRING: /"(\\\\.|[^"\\\\])*"/
WORD: /[^\\s"'a-cäb]+/i
%import common.WS
%ignore WS
""".replace(" %ignore_", "")
IMPORTS = """
start: (ESCAPED_STRING | n | COMMENT NEWLINE)~1..3
n: INT
%import common (ESCAPED_STRING, INT, NEWLINE)
%import common.SH_COMMENT -> COMMENT
"""
TEXTS = {
    SUM: (["1", "1+2\n3", '12\\3"4', "1<2"], ["", "1+", "1\n", "1+2 ", "1\\n2", "1234"]),
    QUOTED: (['"x\\n"', '"a b" xy', "äb ÄB", "a\tb\n\\", '"\x01\x7f🙂"'], ['"x', "'", "ä", '"\\"']),
    IMPORTS: (['"a\\"b"', "12", '# no "\\\n'], ["", "# x", '"a" "b" "c" "d"', '"a\nb']),
}


def arguments(grammar: str) -> Structure:
    properties = {"input": {"type": "string", LARK: grammar}}
    return Structure(kind="json_schema", value={"type": "object", "properties": properties, "required": ["input"]})


def as_json(text: str) -> str:
    return f'{{"input": "{"".join(IN_JSON.get(char) or char for char in text)}"}}'


def matches(grammar: str, text: str) -> bool:
    return accepts(Structure(kind="grammar", value=grammar), text)


@pytest.mark.parametrize("grammar", TEXTS)
def test_a_json_string_matches_where_its_value_does(grammar):
    yes, no = TEXTS[grammar]
    for text in yes + no:
        assert matches(grammar, text) == (text in yes), text
        written = as_json(text)
        assert accepts(arguments(grammar), written) == (text in yes), text


@pytest.mark.slow
@pytest.mark.parametrize("grammar", TEXTS)
@settings(max_examples=40)
@given(seed=st.integers(0, 2**30))
def test_the_value_of_any_answer_matches_the_grammar(grammar, seed):
    written, ended = walk(arguments(grammar), seed, 200)
    if ended:
        text = json.loads(written, strict=False)["input"]
        assert matches(grammar, text)
        assert CustomInput().push(written.decode()) == text


PATTERNS = [r"a|[^b]c", r'[^\n"]*', r"\S\W?\d+", r".+", r"(?s:.)x", r"(?i)é[a-c]\\", r"[\x00-#]{2,3}", r"[^\\]\\[\]\-]"]


@pytest.mark.slow
@pytest.mark.parametrize("pattern", PATTERNS)
@settings(max_examples=40)
@given(text=st.text(st.sampled_from('abcCÉé"\\\n\t\0\x01\x7f #1-]x/🙂'), max_size=4))
def test_patterns_match_as_without_json(pattern, text):
    slashed = pattern.replace("/", "\\/")
    expected = re.fullmatch(pattern, text) is not None
    assert accepts(arguments(f"start: /{slashed}/"), as_json(text)) == expected


@pytest.mark.parametrize(
    "definition,named",
    [
        ("/a(?=b)/", "look-around"),
        ("/a+?/", "lazy"),
        ("/^a$/", "anchor"),
        ("/[[:alpha:]]/", "nested set"),
        ("<|eos|>", "not supported"),
        ('~"a"', "not supported"),
        ('%json {"type": "object"}', "not supported"),
        ("unknown", "unknown"),
        ('"\\x"', "not a string"),
    ],
)
def test_what_cannot_be_enforced_is_named(definition, named):
    with pytest.raises(ValueError, match=named):
        matcher(arguments(f"start: {definition}"))


@pytest.mark.slow
@pytest.mark.parametrize("name", [candidate.name for candidate in TOOL_FORMATS])
def test_calls_in_every_format(name):
    """A model that knows nothing, held by the grammar, writes calls that parse to texts of the tool's grammar."""
    grammar = 'start: WORD ("<" | "\\"" | "\\n") WORD\nWORD: /[a-c\\\\]{1,2}/'
    (tool,) = [Tool("run", arguments(grammar).value, True)]
    tag = tool_format(name).structure([tool], required=True, parallel=False)
    found = 0
    for seed in range(12):
        text, ended = walk(Structure(kind="structural_tag", value=tag), seed)
        if ended:
            calls = add_up(events_of(parser(name, functions=[tool]), text.decode())).calls
            (call,) = calls
            assert matches(grammar, CustomInput().push(call.arguments)), text
            found += 1
    assert found
