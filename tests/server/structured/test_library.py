"""What llguidance does not do by itself: each piece of rewriting has a schema that shows it.

A test that fails with a newer release says which piece is no longer needed.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLParserLimits

from quire.engine.messages import GRAMMAR_LIMITS
from quire.server.structured.lark import ESCAPES, WHITESPACE
from quire.server.structured.structure import Structure
from tests.server.structured.walk import TOKENIZER, accepts, ids

A = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
CLOSED = {**A, "additionalProperties": False}
ENDLESS = {"properties": {"a": {"$ref": "#/$defs/x"}, "b": {}}, "$defs": {"x": {"$ref": "#/$defs/x"}}}


def alone(schema: Any) -> LLMatcher:
    """The library with the schema as it is, and the server's options."""
    options = {"whitespace_pattern": WHITESPACE, "json_allowed_escapes": ESCAPES}
    whole = json.dumps({"x-guidance": options, **schema})
    grammar = '%llguidance {"no_forcing": true}\nstart: %json ' + whole
    return LLMatcher(TOKENIZER, grammar, log_level=0, limits=LLParserLimits(**GRAMMAR_LIMITS))


def accepts_alone(schema: Any, text: str) -> bool | None:
    """None: the library refuses the schema."""
    state = alone(schema)
    if not state.is_error():
        state.compute_bitmask()
    if state.is_error():
        return None
    state = alone(schema)
    return state.try_consume_tokens(ids(text)) == len(ids(text)) and state.is_accepting()


# the piece of ours -> a schema, a valid text, and an invalid one
DIFFERENCES: dict[str, tuple[dict[str, Any], str, str]] = {
    "closing": (A, '{"a":1}', '{"a":1,"c":2}'),
    "closing.described: allOf": ({"allOf": [A, {"required": ["a"]}]}, '{"a":1}', '{"a":1,"c":1}'),
    "schema: a format that is an annotation": ({"type": "string", "format": "color"}, '"red"', "1"),
    "schema: counts as decimals": ({"type": "string", "maxLength": 2.0}, '"ab"', '"abc"'),
    "schema: counts without an effect": ({"type": "string", "maxLength": 10**12}, '"ab"', "1"),
    "schema: an applicator that is closed elsewhere": (
        {"$ref": "#/$defs/a", "required": ["a"], "$defs": {"a": A}},
        '{"a":1}',
        '{"a":1,"c":1}',
    ),
    "rewriting.if_then_else": (
        {**CLOSED, "if": {"required": ["a"]}, "then": {"required": ["b"]}},
        '{"a":1,"b":1}',
        '{"a":1}',
    ),
    "rewriting.exactly_one: constants": ({"oneOf": [{"const": 1}, {"const": 2}]}, "1", "3"),
    "rewriting.exactly_one: references": (
        {"oneOf": [{"$ref": "#/$defs/s"}, {"type": "null"}], "$defs": {"s": {"type": "string"}}},
        '"x"',
        "1",
    ),
    "rewriting.exactly_one: references to objects with a constant": (
        {
            "oneOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}],
            "$defs": {
                name: {"type": "object", "properties": {"k": {"const": name}}, "required": ["k"]} for name in ("x", "y")
            },
        },
        '{"k":"x"}',
        '{"k":"z"}',
    ),
    "rewriting.exactly_one: branches that overlap": (
        {"oneOf": [{"type": "string", "minLength": 2}, {"type": "string", "maxLength": 3}]},
        '"a"',
        '"ab"',
    ),
    "rewriting.dependent: names": ({**CLOSED, "dependentRequired": {"a": ["b"]}}, '{"b":1}', '{"a":1}'),
    "rewriting.dependent: schemas": (
        {**CLOSED, "dependentSchemas": {"a": {"required": ["b"]}}},
        '{"a":1,"b":1}',
        '{"a":1}',
    ),
    "rewriting.named": ({"type": "object", "propertyNames": {"pattern": "^a"}}, '{"ab":1}', '{"b":1}'),
    "rewriting.counted: at least": ({**CLOSED, "minProperties": 2}, '{"a":1,"b":1}', '{"a":1}'),
    "rewriting.counted: at most": (
        {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "maxProperties": 2},
        '{"a":1,"b":1}',
        '{"a":1,"b":1,"c":1}',
    ),
    "rewriting.containing": (
        {"type": "array", "contains": {"const": 1}, "maxItems": 3},
        "[2,1]",
        "[2]",
    ),
    "rewriting.unique": ({"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}, "[1,2]", "[1,1]"),
    "rewriting.unevaluated": (
        {"allOf": [A], "unevaluatedProperties": False},
        '{"a":1}',
        '{"c":1}',
    ),
    "schema_algebra.Complement": ({"type": ["string", "null"], "not": {"enum": ["x", None]}}, '"y"', '"x"'),
    "large_numbers.integers: 64 bits": (
        {"type": "integer", "minimum": 0, "maximum": 2**64 - 1},
        str(2**64 - 1),
        str(2**64),
    ),
    "large_numbers.integers: beyond doubles": ({"type": "integer", "minimum": 2**53 + 1}, str(2**53 + 1), str(2**53)),
    "large_numbers.numbers": ({"type": "number", "maximum": 3.4e38}, "1", "4" + "0" * 38),
    "large_numbers.without_vacuous": ({"type": "number", "minimum": -1.797693134862315708e308}, "1", '"x"'),
    "json_rules: constants": ({"const": 2**70}, str(2**70), "1"),
    "json_rules: objects and arrays": (
        {"type": "object", "properties": {"a": {"type": "array", "items": {"const": 2**64}}}, "required": ["a"]},
        f'{{"a":[{2**64}]}}',
        '{"a":[1]}',
    ),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_the_library_alone_refuses_the_schema_or_errs(name):
    schema, yes, no = DIFFERENCES[name]
    structure = Structure(kind="json_schema", value=schema)
    assert accepts(structure, yes)
    assert not accepts(structure, no)
    assert accepts_alone(schema, yes) is not True or accepts_alone(schema, no) is not False


def test_the_library_alone_lets_an_endless_reference_begin():
    state = alone({**ENDLESS, "additionalProperties": False})
    assert state.try_consume_tokens(ids('{"a":')) == 5  # and no token can follow
    with pytest.raises(ValueError, match=r"at #/\$defs/x: \$ref: it refers to itself"):
        accepts(Structure(kind="json_schema", value=ENDLESS), "{}")


def test_the_library_alone_counts_a_free_name_that_is_written_twice():
    assert accepts_alone({"type": "object", "minProperties": 2}, '{"a":1,"a":2}')
    with pytest.raises(ValueError, match="minProperties"):
        accepts(Structure(kind="json_schema", value={"type": "object", "minProperties": 2}), "{}")
