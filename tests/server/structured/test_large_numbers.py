"""Bounds beyond those that the library holds exactly."""

from __future__ import annotations

import re
import sys
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.server.structured.schema import large_numbers
from quire.server.structured.structure import Structure
from tests.server.structured.walk import accepts

WHOLE = st.one_of(st.integers(-(10**21), 10**21), st.sampled_from([0, 2**53, 2**63, -(2**63), 2**64 - 1, 10**18, 99]))


@settings(max_examples=100, deadline=None)
@given(WHOLE, WHOLE, st.booleans(), st.booleans(), st.data())
def test_patterns_match_exactly_the_numbers_within(a, b, open_below, open_above, data):
    low, high = min(a, b), max(a, b)
    bounds = {
        "exclusiveMinimum" if open_below else "minimum": low,
        "exclusiveMaximum" if open_above else "maximum": high,
    }
    pattern = large_numbers.integers(bounds)
    decimals, inner = large_numbers.numbers(bounds)
    near = st.sampled_from([low, high, 0, 2**53, -(2**53)]).flatmap(lambda n: st.integers(n - 2, n + 2))
    for number in [data.draw(st.one_of(st.integers(low, high), near, WHOLE)) for _ in range(5)]:
        within = (low < number if open_below else low <= number) and (number < high if open_above else number <= high)
        assert (pattern is not None and re.fullmatch(pattern, str(number)) is not None) == within
        for text in (str(number), f"{number}.5", f"{number}.0", f"{number}.50"):
            value = Decimal(text)
            within = (low < value if open_below else low <= value) and (value < high if open_above else value <= high)
            large = decimals is not None and re.fullmatch(decimals, text) is not None
            small = inner is not None and all(
                {"minimum": value >= limit, "maximum": value <= limit}.get(
                    name, value > limit if name == "exclusiveMinimum" else value < limit
                )
                for name, limit in inner.items()
            )
            assert (large or small) == within, text
            assert not (large and small)


UINT64 = {"minimum": 0, "maximum": 2**64 - 1}
FLOAT32, DOUBLE = (
    {"minimum": -3.4e38, "maximum": 3.4e38},
    {"minimum": -sys.float_info.max, "maximum": sys.float_info.max},
)
ID, SIGNED = {"type": "integer", **UINT64}, {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schema", "yes", "no"),
    [
        ({"type": "integer", **UINT64}, ["0", "9223372036854775808", "18446744073709551615"], ["18446744073709551616"]),
        (SIGNED, ["-9223372036854775808", "9223372036854775807"], ["9223372036854775808", "1.5"]),
        ({"type": "integer", "minimum": 2**53 + 1}, ["9007199254740993"], ["9007199254740992", "0"]),
        ({"type": "number", **FLOAT32}, ["-0.5", "1", "3" + "0" * 38], ["4" + "0" * 38]),
        ({"minimum": -1.797e308}, ["-1797" + "0" * 300, "-1", "17" + "9" * 307], ["-1798" + "0" * 305]),
        ({"maximum": 1.234567e308}, ["1234567" + "0" * 302, "-1"], ["1234568" + "0" * 302]),
        ({"type": "integer", "minimum": -1.797e308, "maximum": 1.797e308}, ["0", "1" * 309], ["1798" + "0" * 305]),
        ({"minimum": 0.5, "exclusiveMaximum": 1e20}, ["0.5", "99999999999999999999.5"], ["0.4", "1" + "0" * 20]),
        ({"type": "number", **DOUBLE}, ["1e300", "-2"], ['"x"']),
        ({"type": ["integer", "null"], **UINT64}, ["null", "18446744073709551615"], ["-1", '"x"']),
        (UINT64, ['"x"', "18446744073709551615", "0.5", "[1]"], ["-1", "-0.5"]),
        ({"const": 2**70}, [str(2**70)], ["1"]),
        ({"enum": ["x", 2**70, 1]}, [str(2**70), '"x"', "1"], ["2"]),
        ({"type": "array", "items": ID, "maxItems": 2}, ["[]", "[ 1, 18446744073709551615]"], ["[1,1,1]", "[-1]"]),
        (
            {
                "type": "object",
                "properties": {
                    "a": {"type": "string"},
                    "id": {"type": "integer", **UINT64},
                    "n": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]},
                },
                "required": ["id"],
                "$defs": {"n": {"type": "object", "properties": {"v": SIGNED, "n": {"$ref": "#/$defs/n"}}}},
            },
            [
                '{"id":18446744073709551615}',
                '{"a": "x", "id": 1}',
                '{"a":"x","id":1,\n  "n":{"v":-9223372036854775808, "n":{}}}',
                '{"id":1,"n":null}',
            ],
            ["{}", '{"id":-1}', '{"a":"x"}', '{"id":1,"z":1}', '{"id":1,}', '{"id":1,"n":{"v":9223372036854775808}}'],
        ),
    ],
)  # fmt: skip
def test_schemas_with_large_bounds(schema, yes, no):
    structure = Structure(kind="json_schema", value=schema)
    assert [text for text in yes if not accepts(structure, text)] == []
    assert [text for text in no if accepts(structure, text)] == []


@pytest.mark.parametrize(
    ("schema", "error"),
    [
        ({"type": "integer", "multipleOf": 2147483647}, "at #: multipleOf: "),
        ({"properties": {"a": {"type": "integer", "multipleOf": 1e20}}}, "at #/properties/a: multipleOf: "),
        ({"type": "number", "multipleOf": 1e-12}, "at #: multipleOf: "),
        ({"type": "integer", **UINT64, "multipleOf": 3}, "at #: multipleOf: it cannot be enforced together"),
        ({"properties": {"a": {"minimum": 10**400}}}, "at #/properties/a: minimum: must be a number"),
        ({"type": "string", "minLength": 2**32}, "at #: minLength: must be at most 2,147,483,647"),
        ({"properties": {"a": {"minItems": 10**30}}}, "at #/properties/a: minItems: must be at most 2,147,483,647"),
        ({"minProperties": 10**30}, "at #: minProperties: must be at most 2,147,483,647"),
        ({"const": [10**400]}, "at #: const: "),
        ({"$ref": "#"}, "at #: $ref: it refers to itself"),
        ({"allOf": [{"$ref": "#"}]}, "at #: $ref: it refers to itself"),
        ({"type": "integer", "minimum": 5, "maximum": 2}, "no value is valid"),
        ({"type": "integer", "minimum": 2**60, "maximum": 2**59}, "no value is valid"),
    ],
)
def test_errors_are_in_our_words(schema, error):
    with pytest.raises(ValueError) as caught:
        accepts(Structure(kind="json_schema", value=schema), "1")
    assert error in str(caught.value)
    for theirs in ("regex", "fuel", "NoExtension", "Value for", "Failed", "%json"):
        assert theirs not in str(caught.value)


@pytest.mark.parametrize("count", [2**31, 2**32, 10**12, 1e30])
def test_counts_that_exclude_nothing_are_dropped(count):
    schema = {"maxLength": count, "maxItems": count, "maxProperties": count}
    structure = Structure(kind="json_schema", value=schema)
    assert [text for text in ('"word"', "[1,2]", '{"a":1}') if not accepts(structure, text)] == []


@pytest.mark.parametrize(
    ("schema", "error"),
    [
        ({"type": "string", "minLength": 1, "pattern": "["}, "at #: pattern: invalid regex: unclosed character class"),
        ({"properties": {"a": {"type": "string", "pattern": "(?=a)b"}}}, "at #/properties/a: pattern: invalid regex"),
        ({"type": "object", "patternProperties": {"(": {}}}, "at #: patternProperties: invalid regex: unclosed group"),
    ],
)
def test_errors_name_the_keyword_that_is_their_cause(schema, error):
    with pytest.raises(ValueError, match=re.escape(error)):
        accepts(Structure(kind="json_schema", value=schema), "1")
