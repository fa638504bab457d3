"""Strings between the tags of XML-like calls: what the grammar accepts, against jsonschema and the formats' parsers."""

from __future__ import annotations

import json

import pytest
from jsonschema import Draft202012Validator

from quire.server.parsers.registry import tool_format
from quire.server.parsers.tools.base import Tool
from quire.server.structured.structure import Structure
from quire.server.structured.written_values import whole_pattern
from tests.server.parsers.answers import add_up, events_of, parser
from tests.server.structured.walk import accepts, matcher, walk

FORMATS = ["qwen3_coder", "glm45", "minimax_m2", "deepseek_v32"]
COLOR = {"$defs": {"color": {"enum": ["red", "blue"]}}}
NULLABLE_COLOR = {"anyOf": [{"$ref": "#/$defs/color"}, {"type": "null"}]}
STRING_OR_LIST = {"type": ["string", "array"], "items": {"type": "integer"}, "maxItems": 2, "maxLength": 4}


def parameters(value: dict) -> dict:
    return {"type": "object", "properties": {"a": value}, "required": ["a"], "additionalProperties": False, **COLOR}


def structure(name: str, value: dict) -> Structure:
    tag = tool_format(name).structure([Tool("f", parameters(value), strict=True)], required=True, parallel=False)
    return Structure(kind="structural_tag", value=tag)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("value", "yes", "no"),
    [
        ({"type": "string", "pattern": "^[A-Z]{3}$"}, ["ABC"], ["AB", "ABCD", "abc"]),
        ({"type": "string", "pattern": "b+"}, ["abc", "b<d"], ["ac"]),
        ({"type": "string", "pattern": "^a|b$", "title": "x"}, ["ax", "xb"], ["xa"]),
        ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "äöü", "a<b"], ["a", "abcd"]),
        ({"type": ["string", "null"]}, ["abc", "null", "2 a"], []),
        ({"type": ["string", "null"], "pattern": "^x"}, ["xbc", "null"], ["abc", "nul"]),
        ({"anyOf": [{"type": "string", "maxLength": 2}, {"type": "null"}]}, ["ab", "null"], ["abc"]),
        (NULLABLE_COLOR, ["red", "null"], ["redd", '"red"']),
        ({"$ref": "#/$defs/color"}, ["red"], ['"red"', "null"]),
        ({"enum": ["a", 1, None]}, ["a", "1", "null"], ["b", "2"]),
        (STRING_OR_LIST, ["abc", "[1]", "[1,2]"], ["[x]", "[1", "[1,2,3]"]),
        ({"anyOf": [{"type": "integer", "minimum": 5}, {"type": "string"}]}, ["abc", "7"], ["3"]),
        ({"type": "string", "pattern": "^a$", "enum": ["a", "b"]}, ["a"], ["b"]),
        ({"type": "string", "const": "x y"}, ["x y"], ["x", '"x y"']),
        ({}, ["abc", "1", "[1]"], []),
    ],
)
def test_values(value, yes, no):
    for before, after, name in (
        ("<tool_call>\n<function=f>\n<parameter=a>\n", "\n</parameter>\n</function>\n</tool_call>", "qwen3_coder"),
        ('<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">',
         "</parameter>\n</invoke>\n</minimax:tool_call>", "minimax_m2"),
    ):  # fmt: skip
        held = structure(name, value)
        assert [text for text in yes if not accepts(held, before + text + after)] == [], name
        assert [text for text in no if accepts(held, before + text + after)] == [], name


VALUES = [
    {"type": "string", "pattern": "^[a-c]{1,3}$"},
    {"type": "string", "minLength": 1, "maxLength": 4},
    {"type": ["string", "null"], "maxLength": 3},
    {"type": ["string", "integer", "boolean"], "maxLength": 3},
    NULLABLE_COLOR,
    STRING_OR_LIST,
    {"enum": ["a", 1, None]},
]


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("value", VALUES)
def test_arguments_of_any_answer_are_valid(name, value):
    tool, held, found = Tool("f", parameters(value), strict=True), structure(name, value), 0
    for seed in range(6):
        text, ended = walk(held, seed)
        if ended:
            (call,) = add_up(events_of(parser(name, functions=[tool]), text.decode(errors="replace"))).calls
            Draft202012Validator(tool.parameters).validate(json.loads(call.arguments))
            found += 1
    assert found


INT = {"type": "integer"}
OBJECTS = [
    {"properties": {"a": INT, "b": INT, "c": False}, "dependentRequired": {"a": ["b"]}},
    {"properties": {"a": INT}, "anyOf": [{"required": ["a"]}, {"required": ["b"], "properties": {"b": {"const": 1}}}]},
    {"properties": {"a": {"type": "boolean"}, "b": INT}, "required": ["a"],
     "if": {"properties": {"a": {"const": True}}}, "then": {"required": ["b"]}, "else": {"properties": {"b": False}}},
    {"$ref": "#/$defs/ab", "$defs": {"ab": {"properties": {"a": INT, "b": {"$ref": "#/$defs/i"}}, "required": ["b"]},
                                     "i": INT}},
    {"allOf": [{"properties": {"a": {"type": "boolean"}}}, {"required": ["a"]}], "unevaluatedProperties": False},
    {"properties": {"a": INT, "b": INT}, "not": {"required": ["a", "b"]}, "additionalProperties": False},
    {"properties": {"a": INT, "b": INT, "c": INT}, "minProperties": 2, "additionalProperties": False},
]  # fmt: skip


def test_what_is_required_without_a_schema_must_be_there():
    for schema in ({"properties": {"a": INT}, "required": ["b"]}, {"required": ["b"]}):
        tag = tool_format("minimax_m2").structure([Tool("f", schema, strict=True)], required=True, parallel=False)
        held = Structure(kind="structural_tag", value=tag)
        call = '<minimax:tool_call>\n<invoke name="f">\n{}</invoke>\n</minimax:tool_call>'
        assert accepts(held, call.format('<parameter name="b">x</parameter>\n'))
        assert not accepts(held, call.format(""))


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("schema", OBJECTS)
def test_parameters_of_any_answer_are_valid(name, schema):
    tool, found = Tool("f", {"type": "object", **schema}, strict=True), 0
    tag = tool_format(name).structure([tool], required=True, parallel=False)
    for seed in range(8):
        text, ended = walk(Structure(kind="structural_tag", value=tag), seed)
        if ended:
            (call,) = add_up(events_of(parser(name, functions=[tool]), text.decode(errors="replace"))).calls
            Draft202012Validator(tool.parameters).validate(json.loads(call.arguments))
            found += 1
    assert found


@pytest.mark.parametrize("name", FORMATS[:-1])
def test_what_parameters_cannot_have(name):
    for schema, word in (
        ({"patternProperties": {"^a": {}}}, "patternProperties"),
        ({"properties": {"a": {}}, "required": ["b"], "additionalProperties": False}, "no value"),
        ({"allOf": [{"properties": {"a": False}}, {"required": ["a"]}]}, "no value"),
        ({"allOf": [{"properties": {"a": {"enum": ["x", "y"]}}}, {"properties": {"a": {"pattern": "x"}}}]}, "allOf"),
    ):
        tag = tool_format(name).structure([Tool("f", schema, strict=True)], required=True, parallel=False)
        with pytest.raises(ValueError, match=word):
            matcher(Structure(kind="structural_tag", value=tag))


def test_what_strings_cannot_have():
    for value in ({"type": "string", "allOf": [{"minLength": 1}]}, {"type": "string", "not": {"const": "a"}}):
        with pytest.raises(ValueError, match=r"properties\.a .*(allOf|not): "):
            matcher(structure("qwen3_coder", value))
    with pytest.raises(ValueError, match="without one type"):
        matcher(structure("qwen3_coder", {"anyOf": [{"type": "string"}, {"minimum": 3}]}))


def test_patterns_are_searched_for():
    assert whole_pattern(r"^a(b|c)$") == "(?:a(b|c))"
    assert whole_pattern(r"[|]\||^x\$") == r"(?s:.*)(?:[|]\|)(?s:.*)|(?:x\$)(?s:.*)"
