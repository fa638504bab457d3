"""Answers to JSON schemas, checked by the library jsonschema."""

from __future__ import annotations

import json

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.server.structured.schema.keywords import SchemaError
from quire.server.structured.schema.schema import normalize
from quire.server.structured.structure import Structure
from tests.server.structured.walk import accepts, walk

KEYS = st.sampled_from(["a", "b", "name", "größe", "ключ", 'q"uote', "sp ace", "/~", "日本"])
NUMBERS = st.integers(-50, 50)


def bounded(kind: str) -> st.SearchStrategy[dict]:
    low = st.sampled_from(["minimum", "exclusiveMinimum"])
    high = st.sampled_from(["maximum", "exclusiveMaximum"])
    return st.builds(
        lambda low, high, a, size: {"type": kind, low: a, high: a + size}, low, high, NUMBERS, st.integers(2, 40)
    )


LEAVES = st.one_of(
    st.sampled_from([{"type": "null"}, {"type": "boolean"}, {"type": ["null", "boolean"]}, {"type": "integer"}]),
    bounded("integer"),
    bounded("number"),
    st.builds(lambda n: {"type": "integer", "multipleOf": n, "minimum": 0, "maximum": 100}, st.integers(1, 9)),
    st.builds(
        lambda a, n: {"type": "string", "minLength": a, "maxLength": a + n}, st.integers(0, 3), st.integers(0, 5)
    ),
    st.sampled_from(["^[a-c]{2,4}$", "^x+y?$", "[0-9]{3}", "^(foo|bär)-\\d\\d$", "^\\w{1,3}$"]).map(
        lambda pattern: {"type": "string", "pattern": pattern}
    ),
    st.lists(st.sampled_from([1, "x", None, "é\n", {"k": [1]}, [True], 2.5, 'a"b']), min_size=1, max_size=4).map(
        lambda values: {"enum": values}
    ),
    st.sampled_from([0, "c", False, None, [1, "z"], {"ü": {}}]).map(lambda value: {"const": value}),
    st.sampled_from([{"type": "string", "format": "date"}, {"type": "string", "format": "unheard-of", "maxLength": 3}]),
)


def containers(inner: st.SearchStrategy[dict]) -> st.SearchStrategy[dict]:
    arrays = st.builds(
        lambda items, a, n: {"type": "array", "items": items, "minItems": a, "maxItems": a + n},
        inner,
        st.integers(0, 2),
        st.integers(0, 3),
    )
    tuples = st.lists(inner, min_size=1, max_size=3).map(
        lambda items: {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    )

    @st.composite
    def objects(draw: st.DrawFn) -> dict:
        properties = draw(st.dictionaries(KEYS, inner, max_size=4))
        required = [name for name in properties if draw(st.booleans())]
        schema = {"type": "object", "properties": properties, "required": required, "title": "T", "$comment": "c"}
        extra = draw(st.sampled_from([None, False, "schema"]))
        if extra is not None:
            schema["additionalProperties"] = draw(inner) if extra == "schema" else extra
        return schema

    unions = st.lists(inner, min_size=1, max_size=3).map(lambda choices: {"anyOf": choices, "description": "either"})
    return st.one_of(arrays, tuples, objects(), unions)


@st.composite
def schemas(draw: st.DrawFn) -> dict:
    """A schema that may refer to a recursive one."""
    leaf = draw(st.recursive(LEAVES, containers, max_leaves=4))
    tree = {
        "type": "object",
        "properties": {"value": leaf, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}]}},
        "required": ["next"],
        "additionalProperties": False,
    }
    reference = {"$ref": "#/$defs/tree"}
    root = draw(st.recursive(st.one_of(LEAVES, st.just(reference)), containers, max_leaves=6))
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$defs": {"tree": tree}, **root}


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(schemas(), st.integers(0, 2**32), st.booleans())
def test_every_answer_that_ends_by_itself_is_valid(schema, seed, compact):
    try:
        text, ended = walk(Structure(kind="json_schema", value=schema, compact=compact), seed)
    except ValueError as error:
        # a union of properties that exclude each other, for example
        assert "no value is valid" in str(error), error
        return
    if ended:
        jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)


OBJECT = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "Person",
    "type": "object",
    "properties": {"name": {"type": "string", "default": "x", "examples": ["y"]}, "age": {"type": "integer"}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("schema", "yes", "no"),
    [
        (OBJECT, '{"name": "a", "age": 3}', '{"age": 3}'),
        ({"items": [{"type": "null"}], "additionalItems": False, "type": "array"}, "[null]", "[null,null]"),  # draft 7
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, "4", "3"),  # draft 4
        ({"$ref": "#node", "$defs": {"n": {"$anchor": "node", "type": "null"}}}, "null", "1"),
        ({"components": {"a/b": {"const": 1}}, "$ref": "#/components/a~1b"}, "1", "2"),
        ({"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False}, '{"a":1}', '{"b":1}'),
        ({"type": "string", "maxLength": 2.0}, '"ab"', '"abc"'),
        ({"type": "string", "format": "color", "x-vendor": {"$ref": 5}}, '"red"', "1"),
        (True, '{"a": [1, null]}', "{"),
        (
            {"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False},
            '{"next": {"next": {}}}',
            '{"next": 1}',
        ),
    ],
)
def test_annotations_and_older_spellings(schema, yes, no):
    structure = Structure(kind="json_schema", value=schema)
    assert accepts(structure, yes)
    assert not accepts(structure, no)


@pytest.mark.parametrize(
    ("schema", "path", "keyword"),
    [
        ({"properties": {"a": {"uniqueItems": True}}}, "#/properties/a", "uniqueItems"),
        ({"items": {"if": {"pattern": "a"}, "then": {}}}, "#/items", "if"),
        ({"not": {"type": "integer"}}, "#", "not"),
        ({"properties": {"a": {"contains": {}, "minContains": -1}}}, "#/properties/a", "minContains"),
        ({"dependentRequired": {"a": "b"}}, "#", "dependentRequired"),
        ({"dependentSchemas": {"a/b": {"type": "strng"}}}, "#/dependentSchemas/a~1b", "type"),
        ({"contains": {"type": "string"}}, "#", "contains"),
        ({"propertyNames": {"pattern": "^a", "maxLength": 3}}, "#", "propertyNames"),
        ({"minProperties": 2}, "#", "minProperties"),
        ({"if": {"not": {"format": "date"}}, "else": {}}, "#/if", "not"),
        ({"anyOf": [{"required": ["a"]}, {}], "unevaluatedProperties": False}, "#", "unevaluatedProperties"),
        ({"items": {"unevaluatedItems": False, "contains": {}}}, "#/items", "unevaluatedItems"),
        ({"type": "object", "properties": {"x/y": {"type": "strng"}}}, "#/properties/x~1y", "type"),
        ({"anyOf": [{}, {"minLength": -1}]}, "#/anyOf/1", "minLength"),
        ({"$ref": "https://example.com/x.json"}, "#", "$ref"),
        ({"$ref": "#/$defs/none"}, "#", "$ref"),
        ({"required": "a"}, "#", "required"),
        ({"properties": []}, "#", "properties"),
        ({"prefixItems": [5]}, "#/prefixItems/0", None),
    ],
)
def test_a_wrong_schema_is_refused_with_its_place(schema, path, keyword):
    with pytest.raises(SchemaError) as caught:
        normalize(schema)
    assert (caught.value.path, caught.value.keyword) == (path, keyword)


def test_the_place_of_what_only_the_library_finds():
    schema = {"properties": {"a": {"type": "array", "items": {"type": "string", "pattern": "(?=x)"}}}}
    with pytest.raises(ValueError, match=r"at #/properties/a/items: .*look-around"):
        accepts(Structure(kind="json_schema", value=schema), "")


def test_the_place_is_looked_for_beside_subschemas_without_a_value():
    schema = {
        "type": "object",
        "properties": {"a": False, "b": {"allOf": [{"const": 1}, {"const": 2}]}},
        "required": ["b"],
    }
    with pytest.raises(ValueError, match="at #/properties/b: no value is valid"):
        accepts(Structure(kind="json_schema", value=schema), "")


def test_a_name_that_is_written_twice_counts_once():
    schema = {"type": "object", "minProperties": 2, "required": ["a"]}
    assert accepts(Structure(kind="json_schema", value=schema), '{"a":1,"b":2}')
    assert not accepts(Structure(kind="json_schema", value=schema), '{"a":1,"a":2}')


def test_alternatives_are_bounded():
    for schema in (
        {"type": "array", "items": {"enum": list("abcdefgh")}, "uniqueItems": True},
        {"type": "array", "contains": {"type": "null"}, "minContains": 10, "maxItems": 20},
        {"properties": {name: {} for name in "abcdefghijkl"}, "additionalProperties": False, "minProperties": 6},
    ):
        with pytest.raises(SchemaError, match="more than 400"):
            normalize(schema)


def test_depth_and_size_are_bounded():
    deep: dict = {}
    for _ in range(100):
        deep = {"items": deep}
    with pytest.raises(SchemaError, match="more than 64 levels"):
        normalize(deep)
    with pytest.raises(SchemaError, match="more than 20000 subschemas"):
        normalize({"anyOf": [{}] * 30_000})
