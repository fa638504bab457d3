"""Invalid schemas: each is refused with its place in the schema, in every format, and without the grammar's insides."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from quire.server.parsers.registry import TOOL_FORMATS, tool_format
from quire.server.parsers.tools.base import Tool
from quire.server.structured.schema.keywords import SchemaError, check
from quire.server.structured.structure import MAX_BYTES, Structure, encoded
from tests.server.structured.walk import COMPILER

META = jsonschema.Draft202012Validator(jsonschema.Draft202012Validator.META_SCHEMA)
KEYWORDS = [
    *("type", "enum", "const", "minLength", "maxLength", "pattern", "format", "minimum", "maximum", "multipleOf"),
    *("exclusiveMinimum", "exclusiveMaximum", "minItems", "maxItems", "required", "minProperties", "maxProperties"),
    *("minContains", "maxContains", "uniqueItems", "dependentRequired", "dependentSchemas", "dependencies"),
    *("properties", "patternProperties", "anyOf", "oneOf", "allOf", "prefixItems", "items", "additionalProperties"),
    *("contains", "not", "if", "then", "else", "propertyNames", "unevaluatedItems", "unevaluatedProperties"),
    *("$ref", "$defs", "definitions", "$anchor", "$id", "$schema", "$dynamicRef", "$dynamicAnchor", "$vocabulary"),
    *("title", "description", "default", "examples", "$comment", "readOnly", "writeOnly", "deprecated"),
    *("contentMediaType", "contentEncoding", "contentSchema"),
]
VALUES = [
    *(1, -1, 0, 1.5, True, None, "x", "", [], [1], ["x"], [None], [{}, 1], {}),
    *({"a": 1}, {"a": None}, {"a": "x"}, {"a": ["x", 1]}, {"a": {}}, {"a": {"type": "nonsense"}}),
]
NOTES = ("title", "description", "examples", "$comment", "readOnly", "writeOnly", "deprecated", "contentMediaType")


def is_lenient(keyword: str, value: Any) -> bool:
    """What is taken although the draft's schema of schemas refuses it."""
    return (
        (keyword in ("exclusiveMinimum", "exclusiveMaximum") and value is True)  # draft 4
        or (keyword in ("items", "prefixItems") and value == [])  # drafts 4 to 7, tuples without items
        or (keyword == "items" and isinstance(value, list) and all(isinstance(one, dict) for one in value))
        or (keyword in (*NOTES, "contentEncoding") and value is None)  # serializers write it for what is not set
        or (keyword == "$anchor" and value == "")
        or (keyword == "$dynamicAnchor" and value == "")
        or (keyword == "$vocabulary" and isinstance(value, dict))
    )


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_exactly_the_invalid_schemas_are_refused(keyword):
    """By the draft's own schema of schemas."""
    for value in VALUES:
        valid = META.is_valid({keyword: value}) or is_lenient(keyword, value)
        valid = valid and (keyword, value) != ("enum", [])  # which the draft allows, and no value satisfies
        for place, schema in (
            ("#", {keyword: value}),
            ("#/properties/a~1b", {"type": "object", "properties": {"a/b": {keyword: value}}}),
            ("#/$defs/d/anyOf/1", {"$defs": {"d": {"anyOf": [{}, {keyword: value}]}}}),
        ):
            if valid:
                check(schema)
                continue
            with pytest.raises(SchemaError) as caught:
                check(schema)
            assert str(caught.value).startswith(f"at {place}"), (schema, caught.value)


@pytest.mark.parametrize("value", [10**400, float("inf"), [10**400]])
def test_numbers_that_no_double_holds(value):
    for keyword in KEYWORDS:
        if keyword not in ("default", "examples"):
            with pytest.raises(SchemaError, match="at #"):
                check({keyword: value})


INVALID = [
    ({"enum": [1, 2]}, "#: no value is valid"),
    ({"type": ["object", "nonsense"]}, "#: type: must be one of"),
    ({"properties": 5}, "#: properties: must be an object of schemas"),
    ({"properties": {"p": {"type": "strng"}}}, "#/properties/p: type: "),
    ({"properties": {"p": {"type": "array", "items": {"minLength": -1}}}}, "#/properties/p/items: minLength: "),
    ({"properties": {"p": {"type": "string", "pattern": "("}}}, "#/properties/p: pattern: invalid regex"),
    ({"properties": {"p": {"type": "string", "enum": []}}}, "#/properties/p: enum: must be a list"),
    ({"properties": {"p": {"$ref": 5}}}, "#/properties/p: $ref: must be a string"),
    ({"properties": {"p": {"anyOf": [{"type": "null"}, 3]}}}, "#/properties/p/anyOf/1: a schema must be"),
    ({"required": [1]}, "#: required: must be a list of strings"),
    ({"additionalProperties": 1}, "#/additionalProperties: a schema must be"),
    ({"properties": {"p": {"type": "object"}}, "$defs": {"d": {"type": 1}}}, "#/$defs/d: type: "),
    ({"dependencies": {"a": [1]}}, "#: dependencies: must be"),
    ({"then": 1}, "#/then: a schema must be"),
]
INSIDES = ("%json", "x-guidance", "llguidance", "format.", "<state>", "json_schema", "cannot be compiled", "at 3(")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name if isinstance(name, str) else name.name for name in TOOL_FORMATS])
def test_a_strict_tool_with_an_invalid_schema(name):
    for schema, message in INVALID:
        tools = [Tool("other", {"type": "object"}), Tool("f", schema, strict=True)]
        for required in (False, True):
            tag = tool_format(name).structure(tools, required=required, parallel=True)
            answer = COMPILER.compile(Structure(kind="structural_tag", value=tag))
            assert answer.grammar is None, (schema, required)
            assert answer.error.startswith(f"parameters of f at {message}"), (schema, answer.error)
            assert not [word for word in INSIDES if word in answer.error], answer.error


@pytest.mark.parametrize("name", [name if isinstance(name, str) else name.name for name in TOOL_FORMATS])
def test_a_schema_does_not_grow_in_a_format(name):
    """Arrays of arrays, objects of optional properties in each other, and definitions."""
    arrays: dict[str, Any] = {"type": "string"}
    for _ in range(40):
        arrays = {"type": "array", "items": arrays}
    objects: dict[str, Any] = {"type": "string"}
    for _ in range(5):
        objects = {"type": "object", "properties": {"a": objects, **{f"p{i}": {"type": "null"} for i in range(12)}}}
    shared = {"$defs": {"d": {"enum": ["x" * 5000]}}, "properties": {f"p{i}": {"$ref": "#/$defs/d"} for i in range(50)}}
    deep: dict[str, Any] = {}
    for _ in range(300):
        deep = {"type": "object", "properties": {"a": deep}}
    for schema in ({"properties": {"a": arrays}}, objects, shared, deep):
        tag = tool_format(name).structure([Tool("f", schema, strict=True)], required=False, parallel=True)
        size = len(encoded(Structure(kind="structural_tag", value=tag)))
        assert size < 16 * len(json.dumps(schema)) + 5000


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("json_schema", {"enum": ["a"], "type": "integer"}, "at #: no value is valid"),
        ("json_schema", {"properties": {"a": {"patternProperties": {"a": {}, "b+": {}}}}}, "at #/properties/a: "),
        ("grammar", "start: foo\nfoo: bar\n", 'at line 2: unknown name: "bar"'),
        ("grammar", 'start: foo\nfoo: %json {"type": 5}\n', "at line 2: type must be a string"),
        ("grammar", "start: start start", "it refers to itself without an end"),
        ("regex", "(", "invalid regex: unclosed group"),
        (
            "structural_tag",
            {"type": "sequence", "elements": [{"type": "const_string", "value": "<"}] * 6
             + [{"type": "json_schema", "json_schema": {"allOf": [{"const": 1}, {"const": 2}]}}]},
            "elements.6.json_schema at #: no value is valid",
        ),
    ],
)  # fmt: skip
def test_messages_show_no_insides(kind, value, message):
    error = COMPILER.compile(Structure(kind=kind, value=value)).error
    assert message in error
    assert not [word for word in ("x-guidance", "%llguidance", " | ", "<state>") if word in error], error


def test_the_pattern_of_white_space_is_named():
    error = COMPILER.compile(Structure(kind="json_schema", value={"type": "object"}, whitespace="(")).error
    assert error == "whitespace_pattern: invalid regex: unclosed group"


def test_the_largest_structures_are_checked_in_time():
    """As large as one may be."""
    schema = {"properties": {f"p{i}": {} for i in range(MAX_BYTES // 14)}}
    with pytest.raises(SchemaError):
        check({**schema, "anyOf": [schema, {"items": 5}]})
