"""Plain text and literals become JSON: against Python's own reading of literals."""

from __future__ import annotations

import ast
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.server.parsers.conversion import ArgumentTypes
from quire.server.parsers.literals import to_json
from quire.server.parsers.markers import CodeSpans, Markers

LITERALS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(LITERALS)
def test_python_literals(value):
    assert json.loads(to_json(repr(value))) == value
    assert json.loads(to_json(json.dumps(value))) == value


@pytest.mark.parametrize(
    "text",
    [
        "(1, 2,)",
        "'a\\x41\\u00e9\\U0001F600\\'\\n'",
        '"""a"b\n"""',
        "r'\\d'",
        "0x1F",
        "1_000",
        ".5",
        "1e5",
        "[[], {}, ()]",
    ],
)
def test_notations_of_python(text):
    value = ast.literal_eval(text)
    assert json.loads(to_json(text)) == json.loads(json.dumps(value))


@pytest.mark.parametrize("text", ["", "[1 2]", "[1", "'a", "{1}", "]", "[,]", "f(x)", "inf inf", "[" * 100_000])
def test_what_is_no_literal(text):
    assert to_json(text) is None


TYPES = ArgumentTypes(
    {
        "properties": {
            "text": {"type": "string"},
            "whole": {"type": "integer"},
            "real": {"type": "number"},
            "flag": {"type": "boolean"},
            "maybe": {"type": ["string", "null"]},
            "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
            "any": {},
            "object": {"type": "object"},
            "named": {"$ref": "#/$defs/list"},
            "endless": {"$ref": "#/properties/endless"},
            "choice": {"enum": ["1", "2"]},
        },
        "$defs": {"list": {"type": "array"}},
    }
)


@pytest.mark.parametrize(
    ("name", "text", "converted"),
    [
        ("text", "5", '"5"'),
        ("text", ' "x"\n', '" \\"x\\"\\n"'),
        ("whole", "5", "5"),
        ("whole", "3.0", "3.0"),
        ("whole", "3.5", '"3.5"'),
        ("whole", "12345678901234567890123", "12345678901234567890123"),
        ("whole", "five", '"five"'),
        ("real", " 1.50e3 ", "1.50e3"),
        ("real", "7", "7"),
        ("flag", "True", "true"),
        ("flag", "false", "false"),
        ("flag", "1", '"1"'),
        ("maybe", "null", "null"),
        ("maybe", "none of it", '"none of it"'),
        ("maybe", "5", '"5"'),
        ("either", "7", "7"),
        ("either", "7a", '"7a"'),
        ("any", "[1, 2.50]", "[1, 2.50]"),
        ("any", "words", '"words"'),
        ("unknown", "true", "true"),
        ("object", "{'a': None}", '{"a": null}'),
        ("object", '{"a":  1.0}', '{"a":  1.0}'),
        ("object", "[1]", '"[1]"'),
        ("named", "[1]", "[1]"),
        ("endless", "1", "1"),
        ("choice", "1", '"1"'),
        ("object", "{" * 100_000, '"' + "{" * 100_000 + '"'),
        ("real", "9" * 5000, "9" * 5000),
    ],
)
def test_the_schema_says_what_text_means(name, text, converted):
    assert TYPES.convert(name, text) == converted


def test_markers_across_pieces():
    markers = Markers(("<tool>", "<|end|>"))
    assert markers.find("a<tool>b<|end|>", 0) == (1, "<tool>")
    assert markers.find("a<tool>b<|end|>", 2) == (8, "<|end|>")
    assert [markers.num_partial(text, 0) for text in ("a<", "a<to", "a<b", "<<|en", "tool>", "")] == [1, 3, 0, 4, 0, 0]


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("a `b", True),
        ("a `b` c", False),
        ("a ``b` c", True),
        ("a `b\nc", False),
        ("```\ncode", True),
        ("```python\ncode\n```\n", False),
        ("  ~~~\n```\n", True),
        ("````\n```\n", True),
        ("```\n```json\n", True),
        ("text ``` ", True),
    ],
)
def test_code_spans(text, inside):
    for size in (1, 2, len(text)):
        spans = CodeSpans()
        for start in range(0, len(text), size):
            spans.push(text[start : start + size])
        assert spans.is_inside("") is inside
