"""A schema's promise holds for every spelling of a text, and objects have the properties that their schemas name."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from quire.server.structured.structure import Structure
from tests.server.structured.test_limited_keywords import INSTANCES, SCHEMAS, described
from tests.server.structured.walk import accepts, ids, matcher, walk

SPACES = ["", "", "", " ", "\n", "\n    ", "\n\t", "  ", "\t", "\r\n", "\n" + " " * 30, "\n\n"]
STRINGS = [
    {"enum": ["a/b", "ä", 'q"', "\n", "😀"]},
    {"const": "a\\b"},
    {"type": "string", "pattern": "^[a-c/\\n\U0001f600]{1,3}$"},
    {"type": "string", "minLength": 2, "maxLength": 2},
    {"type": "object", "properties": {"a/b": {"const": 1}, "ä": {"const": 2}}, "required": ["ä"]},
    {"type": "object", "patternProperties": {"^[aä]": {"type": "integer"}}, "additionalProperties": False},
    {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
    {"type": "object", "properties": {"a": {"type": "integer"}}, "minProperties": 2, "required": ["a"]},
    {"type": "object", "properties": {"a": False}, "maxProperties": 1},
    {"type": "object", "propertyNames": {"pattern": "^[b-d]$"}},
]
NUMBERS = [
    {"type": "integer"},
    {"type": "integer", "minimum": 0, "maximum": 3},
    {"type": "number", "exclusiveMinimum": 0, "maximum": 2.5},
    {"type": "number", "exclusiveMaximum": 0},
    {"type": "number", "multipleOf": 0.5},
    {"type": "integer", "multipleOf": 2},
    {"enum": [1, 0.5, -2, 0, 100]},
    {"not": {"const": 0}, "type": "number"},
]
VALUES = [
    "a/b",
    "a",
    "ä",
    "äb",
    'q"',
    "\n",
    "😀",
    "a\\b",
    "b",
    "cc",
    "a\U0001f600",
    0,
    1,
    -2,
    2,
    3,
    100,
    0.5,
    2.5,
    -0.5,
]
SCALARS = st.sampled_from(VALUES)
NAMED = st.recursive(
    SCALARS,
    lambda inner: st.dictionaries(st.sampled_from(["a", "a/b", "ä", "b", "\n"]), inner, max_size=3),
    max_leaves=4,
)


def respelled(value: Any, choose: random.Random) -> str:
    """A JSON text for the value, or for one with a name that is written twice."""
    match value:
        case bool() | None:
            return json.dumps(value)
        case str():
            return f'"{"".join(_character(char, choose) for char in value)}"'
        case int() | float():
            return _number(value, choose)
        case list():
            items = [f"{_space(choose)}{respelled(item, choose)}{_space(choose)}" for item in value]
            return f"[{','.join(items) or _space(choose)}]"
    members = list(value.items())
    if choose.random() < 0.3:
        choose.shuffle(members)
    if members and choose.random() < 0.3:
        members.insert(choose.randrange(len(members) + 1), (choose.choice(members)[0], choose.choice(VALUES)))
    pairs = [
        f"{_space(choose)}{respelled(name, choose)}{_space(choose)}:{_space(choose)}{respelled(one, choose)}"
        for name, one in members
    ]
    return f"{{{','.join(pairs)}{_space(choose)}}}"


def _space(choose: random.Random) -> str:
    return choose.choice(SPACES)


def _character(char: str, choose: random.Random) -> str:
    if choose.random() < 0.8:
        return json.dumps(char, ensure_ascii=False)[1:-1]
    if char == "/" and choose.random() < 0.5:
        return "\\/"
    units = char.encode("utf-16-be")
    escapes = [f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2)]
    if choose.random() < 0.2:
        escapes = escapes[:1]  # half of a pair
    return "".join(escape if choose.random() < 0.5 else f"\\u{escape[2:].upper()}" for escape in escapes)


def _number(value: float, choose: random.Random) -> str:
    forms = [repr(value), repr(value), repr(float(value)), f"{float(value)}0", f"{value}e0", f"{value * 10}e-1"]
    forms += [f"{value:.3E}", f"0{value}", f"+{value}", "-0" if value == 0 else f"{value}E+0"]
    return choose.choice(forms)


def readings(text: str) -> list[Any]:
    """The value for readers that take the last, and the first, of a name's values."""
    return [json.loads(text), json.loads(text, object_pairs_hook=lambda pairs: dict(reversed(pairs)))]


def check(schema: Any, instances: list[Any], seed: int, open: bool) -> None:
    structure = Structure(kind="json_schema", value=schema, additional_properties=open)
    try:
        start = matcher(structure)
    except ValueError:
        assume(False)
    judge, choose = jsonschema.Draft202012Validator(schema), random.Random(seed)
    for instance in instances:
        for text in (respelled(instance, choose) for _ in range(6)):
            state, tokens = start.deep_copy(), ids(text)
            if state.try_consume_tokens(tokens) == len(tokens) and state.is_accepting():
                keeps(judge, text)
    text, ended = walk(structure, seed, 300)
    if ended:
        keeps(judge, text.decode())


def keeps(judge: jsonschema.Draft202012Validator, text: str) -> None:
    for value in readings(text):
        judge.validate(value)
        json.dumps(value, ensure_ascii=False).encode()  # no half of a surrogate pair
    for space in re.findall(r"\s+", re.sub(r'"(?:[^"\\]|\\.)*"', "", text)):
        assert re.fullmatch(r"( |\n[ \t]{0,20}){1,2}", space), text  # between two braces there are two places


@pytest.mark.slow
@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.one_of(st.sampled_from([*STRINGS, *NUMBERS]), described(st.sampled_from([*STRINGS, *NUMBERS]))),
    st.lists(NAMED, min_size=10, max_size=10),
    st.integers(0, 2**32),
    st.booleans(),
)
def test_the_promise_holds_for_every_spelling(schema, instances, seed, open):
    check(schema, instances, seed, open)


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(SCHEMAS, st.lists(INSTANCES, min_size=8, max_size=8), st.integers(0, 2**32))
def test_the_promise_of_rewritten_keywords_holds_for_every_spelling(schema, instances, seed):
    check(schema, instances, seed, False)


@pytest.mark.parametrize(
    "text",
    [
        r'{"a":1,"\u0061":"x"}',
        r'{"a":1,"\ud83d":2}',
        r'{"a":1,"a":2}',
        r'{"a":1,"b":"\ud83d"}',
        r'{"a":1,"b":{"\udc00":1}}',
    ],
)
def test_names_of_free_properties_have_one_spelling(text):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": True}
    assert not accepts(Structure(kind="json_schema", value=schema), text)
    assert accepts(Structure(kind="json_schema", value=schema), '{"a":1,"b":{"é\\n😀":2}}')


def test_characters_that_only_unicode_escapes_can_write():
    structure = Structure(kind="json_schema", value={"enum": ["a\x00b", "c"]})
    assert accepts(structure, r'"a\u0000b"')
    assert accepts(structure, '"c"')
    opened = {"properties": {"\x01": {}}, "additionalProperties": {}}
    with pytest.raises(ValueError, match="additionalProperties: it must be false"):
        accepts(Structure(kind="json_schema", value=opened), "{}")


# ---- closed objects

A = {"properties": {"a": {"type": "integer"}}}
B = {"properties": {"b": {"type": "integer"}}}
C = {"properties": {"a": {"type": "string"}}}
REF = {"$defs": {"a": {"type": "object", **A}}, "$ref": "#/$defs/a"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schema", "yes", "no"),
    [
        (A, ['{"a":1}', "{}"], ['{"b":1}', '{"a":1,"b":1}']),
        ({**A, "required": ["a", "c"]}, ['{"a":1,"c":[]}'], ['{"a":1,"c":1,"b":1}']),
        ({**A, "additionalProperties": {"type": "null"}}, ['{"a":1,"b":null}'], ['{"a":1,"b":1}']),
        ({**A, "additionalProperties": True}, ['{"a":1,"b":1}'], ['{"a":"x"}']),
        ({**A, "patternProperties": {"^x": {"type": "null"}}}, ['{"a":1,"x1":null}'], ['{"b":1}', '{"x1":1}']),
        ({**A, "unevaluatedProperties": True}, ['{"a":1,"b":1}'], []),
        ({"type": "object", "properties": {}}, ["{}"], ['{"b":1}']),
        ({"type": "object"}, ['{"b":1}'], []),
        ({"required": ["b"]}, ['{"b":1,"c":2}'], ["{}"]),
        ({"type": "array", "items": A}, ['[{"a":1}]'], ['[{"b":1}]']),
        ({"properties": {"o": A}}, ['{"o":{"a":1}}'], ['{"o":{"b":1}}']),
        ({"type": "object", "additionalProperties": A}, ['{"x":{"a":1}}'], ['{"x":{"b":1}}']),
        ({"allOf": [A, B]}, ['{"a":1,"b":2}'], ['{"a":1,"c":2}', '{"a":"x"}']),
        ({"allOf": [A]}, ['{"a":1}'], ['{"b":2}']),
        (REF, ['{"a":1}'], ['{"b":2}']),
        ({**REF, **B}, ['{"a":1,"b":2}', '{"a":1}'], ['{"a":1,"c":2}']),
        ({**REF, "required": ["b"]}, ['{"a":1,"b":2}'], ['{"a":1,"b":2,"c":3}']),
        ({"anyOf": [A, {"type": "null"}]}, ["null", '{"a":1}'], ['{"b":1}']),
        ({"type": "object", "anyOf": [A, B]}, ['{"a":1}', '{"b":1}'], ['{"a":1,"b":1}', '{"c":1}']),
        (
            {"properties": {"k": {}}, "anyOf": [A, B]},
            ['{"k":1,"a":1}', '{"k":1,"b":1}'],
            ['{"k":1,"a":1,"b":1}', '{"k":1,"c":1}'],
        ),
        (
            {"anyOf": [{**A, "additionalProperties": True}, B]},
            ['{"a":1,"z":1}', '{"b":1}'],
            ['{"a":"x"}'],
        ),
        (
            {"oneOf": [{**C, "required": ["a"]}, {"properties": {"b": {"const": 1}}, "required": ["b"]}]},
            ['{"a":"x"}', '{"b":1}'],
            ['{"a":"x","b":1}', '{"a":"x","c":1}'],
        ),
        ({"if": C, "then": B}, ['{"a":"x","b":2}', '{"a":1}'], ['{"a":"x","b":"x"}', '{"c":1}']),
        ({**A, "not": {"required": ["a", "b"]}}, ['{"a":1}', "{}"], ['{"a":1,"b":1}', '{"c":1}']),
        ({**A, "dependentRequired": {"a": ["b"]}}, ['{"a":1,"b":1}', "{}"], ['{"a":1}', '{"c":1}']),
        ({**A, "dependentSchemas": {"a": {**B, "required": ["b"]}}}, ['{"a":1,"b":1}'], ['{"a":1}', '{"c":1}']),
        (
            {"properties": {"next": {"$ref": "#"}, "v": {}}},
            ['{"next":{"next":{}}}'],
            ['{"next":{"x":1}}'],
        ),
    ],
)
def test_objects_are_closed_unless_the_schema_opens_them(schema, yes, no):
    schema = {"type": "object", **schema} if schema.keys() & {"properties", "required", "if"} else schema
    structure = Structure(kind="json_schema", value=schema)
    assert [text for text in yes if not accepts(structure, text)] == []
    assert [text for text in no if accepts(structure, text)] == []


def test_the_request_may_open_them():
    structure = Structure(kind="json_schema", value={"type": "object", **A}, additional_properties=True)
    assert accepts(structure, '{"a":1,"b":1}')
    assert not accepts(structure, '{"a":"x"}')


def test_white_space_is_none_a_blank_or_an_indented_line():
    structure = Structure(kind="json_schema", value={"type": "object", **A})
    for space in ("", " ", "\n", "\n  ", "\n\t\t", "\n" + " " * 20):
        assert accepts(structure, f'{{{space}"a"{space}:{space}1{space}}}')
    for space in ("  ", "\t", "\r\n", "\n\n", " \n", "\n" + " " * 21):
        assert not accepts(structure, f'{{{space}"a":1}}')
