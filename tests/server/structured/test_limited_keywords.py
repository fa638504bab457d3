"""Keywords that are enforced through others: exactly, by instances that the library jsonschema judges."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from quire.server.structured.schema.keywords import SchemaError
from quire.server.structured.schema.schema import normalize
from quire.server.structured.structure import Structure
from tests.server.structured.walk import ids, matcher, walk

NAMES = ["a", "b", "c"]
SCALARS = [None, True, False, -1, 0, 1, 2, 3, 0.5, "", "a", "b", "ab", "é"]
INSTANCES = st.recursive(
    st.sampled_from(SCALARS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from([*NAMES, "x1"]), inner, max_size=3)
    ),
    max_leaves=4,
)
LEAVES = st.one_of(
    st.sampled_from([True, {}, {"type": "string"}, {"type": "boolean"}, {"type": ["null", "integer"]}]),
    st.sampled_from([{"minimum": 1}, {"type": "integer", "exclusiveMaximum": 2}, {"minLength": 1}, {"maxLength": 1}]),
    st.sampled_from([{"required": ["a"]}, {"minItems": 2}, {"maxItems": 1}, {"type": "object", "maxProperties": 0}]),
    st.lists(st.sampled_from(SCALARS[:-1]), min_size=1, max_size=3, unique_by=str).map(lambda values: {"enum": values}),
    st.sampled_from([{"const": []}, {"const": ["a", 1]}, {"const": "a"}, {"const": 1}, {"const": {}}]),
)
FINITE = st.sampled_from(
    [{"enum": ["a", "b", 1]}, {"type": "boolean"}, {"type": "integer", "minimum": 0, "maximum": 2}, {"const": None}]
)


def described(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    properties = st.dictionaries(st.sampled_from(NAMES), inner, max_size=2).map(lambda value: {"properties": value})
    dependent = st.dictionaries(st.sampled_from(NAMES), inner, max_size=2).map(
        lambda value: {"dependentSchemas": value}
    )
    names = st.sampled_from([{"enum": ["a", "b"]}, {"pattern": "^[ab]"}, {"maxLength": 1}, {"const": "x1"}, False, {}])
    counts = st.fixed_dictionaries(
        {}, optional={"minProperties": st.integers(0, 3), "maxProperties": st.integers(0, 3)}
    )
    arrays = st.builds(
        lambda item, most, least, limit: {"type": "array", "contains": item, "maxItems": most, **least, **limit},
        inner,
        st.integers(0, 3),
        st.sampled_from([{}, {"minContains": 0}, {"minContains": 2}]),
        st.sampled_from([{}, {"maxContains": 1}, {"maxContains": 2}]),
    )
    unique = st.builds(
        lambda items, bounds: {"uniqueItems": True, "items": items, **bounds},
        FINITE,
        st.sampled_from([{}, {"minItems": 1}, {"maxItems": 2}, {"prefixItems": [{"const": "a"}]}]),
    )
    return st.one_of(
        properties,
        dependent,
        unique,
        arrays,
        st.builds(
            lambda base, closed, count: {**base, **closed, **count},
            properties,
            st.sampled_from(
                [
                    {},
                    {"additionalProperties": False},
                    {"required": ["a"]},
                    {"required": ["a"], "additionalProperties": False},
                ]
            ),
            counts,
        ),
        st.builds(lambda base, value: {**base, "propertyNames": value}, properties, names),
        st.just({"dependentRequired": {"a": ["b", "c"], "c": ["b"]}}),
        inner.map(lambda schema: {"not": schema}),
        st.lists(inner, min_size=1, max_size=3).map(lambda branches: {"oneOf": branches}),
        st.lists(inner, min_size=1, max_size=2).map(lambda branches: {"anyOf": branches}),
        st.lists(inner, min_size=1, max_size=2).map(lambda branches: {"allOf": branches}),
        st.builds(
            lambda condition, parts, kind: {"if": condition, **parts, **kind},
            inner,
            st.fixed_dictionaries({}, optional={"then": inner, "else": inner}),
            st.sampled_from([{}, {"type": "object"}]),
        ),
        st.builds(
            lambda base, branches: {**base, "allOf": branches, "unevaluatedProperties": False},
            properties,
            st.lists(properties, min_size=1, max_size=2),
        ),
        st.builds(
            lambda keyword, one, other: {
                keyword: [
                    {"properties": {"a": {"const": 1}, **one}, "required": ["a"]},
                    {"properties": {"a": {"const": "b"}, **other}, "required": ["a"]},
                ],
                "unevaluatedProperties": False,
            },
            st.sampled_from(["oneOf", "anyOf"]),
            st.dictionaries(st.sampled_from(["b", "c"]), inner, max_size=1),
            st.dictionaries(st.sampled_from(["b", "c"]), inner, max_size=1),
        ),
    )


SCHEMAS = described(st.recursive(LEAVES, described, max_leaves=3))


def texts(instance: Any) -> Iterator[str]:
    """The instance as JSON, with the properties of its objects in every order."""
    if isinstance(instance, list):
        for items in itertools.product(*(list(texts(item)) for item in instance)):
            yield f"[{','.join(items)}]"
    elif isinstance(instance, dict):
        members = [[f"{json.dumps(name)}:{text}" for text in texts(value)] for name, value in instance.items()]
        for chosen in itertools.product(*members):
            for order in itertools.permutations(chosen):
                yield f"{{{','.join(order)}}}"
    else:
        yield json.dumps(instance, ensure_ascii=False)


@pytest.mark.slow
@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(SCHEMAS, st.lists(INSTANCES, min_size=8, max_size=8), st.integers(0, 2**32))
def test_exactly_the_valid_instances_are_accepted(schema, instances, seed):
    judge = jsonschema.Draft202012Validator(schema)
    try:
        normalize(schema)
        start = matcher(Structure(kind="json_schema", value=schema, additional_properties=True))
    except SchemaError as error:
        assert error.keyword is not None
        assume(False)
    except ValueError as error:
        valid = [instance for instance in instances if judge.is_valid(instance)]
        # nothing is valid, or the library says what it cannot enforce
        assert not valid or "no value is valid" not in str(error), (schema, valid, error)
        assume(False)
    for instance in instances:
        accepted = []
        for text in texts(instance):
            state, tokens = start.deep_copy(), ids(text)
            if state.try_consume_tokens(tokens) == len(tokens) and state.is_accepting():
                accepted.append(text)
        assert bool(accepted) == judge.is_valid(instance), instance
    try:
        text, ended = walk(Structure(kind="json_schema", value=schema, compact=True), seed, 200)
    except ValueError as error:  # closed, its objects may have no value
        assert "no value is valid" in str(error), error
        return
    if ended:
        judge.validate(json.loads(text))
