"""Keywords of JSON Schema: their valid values, and the places of their subschemas.

`check` refuses an invalid schema with the place of its first mistake, so that other modules only read valid schemas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

from quire.server.structured.schema.large_numbers import is_finite
from quire.server.structured.schema.schema_algebra import escaped
from quire.server.values import Json

MAX_DEPTH = 64
MAX_SUBSCHEMAS = 20_000
MAX_DIVISOR = 1_100_000  # for multipleOf, without its decimal point: the library's automaton has as many states

_Check = tuple[Callable[[Any], bool], str]  # a test of a value, and the right values in words

_TYPES = {"null", "boolean", "integer", "number", "string", "array", "object"}


class SchemaError(ValueError):
    """A schema is invalid, or has a keyword that cannot be enforced. `path` is a JSON pointer to the subschema."""

    def __init__(self, path: str, keyword: str | None, reason: str):
        self.path, self.keyword = path or "#", keyword
        super().__init__(f"at {self.path}: {f'{keyword}: ' if keyword else ''}{reason}")


def check(schema: Json, path: str = "#", seen: set[int] | None = None) -> None:
    """Check a schema and all schemas within it. `seen` has the ids of those that were checked. Raises SchemaError."""
    seen = set() if seen is None else seen
    pending: list[tuple[Any, str, int]] = [(schema, path, 0)]
    while pending:
        one, at, depth = pending.pop()
        if isinstance(one, bool) or id(one) in seen:
            continue
        if not isinstance(one, dict):
            raise SchemaError(at, None, "a schema must be an object or a boolean")
        seen.add(id(one))
        if len(seen) > MAX_SUBSCHEMAS:
            raise SchemaError(at, None, f"the schema has more than {MAX_SUBSCHEMAS} subschemas")
        if depth > MAX_DEPTH:
            raise SchemaError(at, None, f"the schema is nested more than {MAX_DEPTH} levels deep")
        for keyword, value in one.items():
            if (rule := _RULES.get(keyword)) is not None and not rule[0](value):
                raise SchemaError(at, keyword, f"must be {rule[1]}")
        pending.extend((child, f"{at}/{step}", depth + 1) for step, child in reversed(list(_subschemas(one))))


def _subschemas(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for keyword, value in schema.items():
        if keyword in MAPS_OF_SCHEMAS and keyword != "dependencies":
            yield from ((f"{keyword}/{escaped(name)}", child) for name, child in value.items())
        elif keyword == "dependencies":
            named = value.items()
            yield from ((f"{keyword}/{escaped(name)}", one) for name, one in named if not isinstance(one, list))
        elif keyword in LISTS_OF_SCHEMAS or (keyword == "items" and isinstance(value, list)):
            yield from ((f"{keyword}/{i}", child) for i, child in enumerate(value))
        elif keyword in ONE_SCHEMA:
            yield keyword, value


# ---- values


def is_count(value: Json) -> bool:
    return _is_number(value) and value >= 0 and value == int(value)


def _is_number(value: Json) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and is_finite(value)


def _is_text(value: Json) -> bool:
    return isinstance(value, str)


def _are_texts(value: Json) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_type(value: Json) -> bool:
    names = [value] if isinstance(value, str) else value
    return isinstance(names, list) and bool(names) and all(_is_text(name) and name in _TYPES for name in names)


def _is_bound(value: Json) -> bool:
    return isinstance(value, bool) or _is_number(value)  # a boolean in draft 4


def _is_short_divisor(value: Json) -> bool:
    if not _is_number(value) or value <= 0:
        return False
    _, digits, exponent = Decimal(str(value)).normalize().as_tuple()
    return exponent >= -9 and int("".join(map(str, digits))) * 10 ** max(exponent, 0) <= MAX_DIVISOR


def _has_finite_numbers(value: Json) -> bool:
    pending = [value]
    while pending:
        one = pending.pop()
        if isinstance(one, list | dict):
            pending.extend(one.values() if isinstance(one, dict) else one)
        elif isinstance(one, int | float) and not is_finite(one):
            return False
    return True


def _is_map(value: Json) -> bool:
    return isinstance(value, dict)


def _is_map_of_texts(value: Json) -> bool:
    return isinstance(value, dict) and all(map(_are_texts, value.values()))


def _is_map_of_dependencies(value: Json) -> bool:
    return isinstance(value, dict) and all(_are_texts(one) for one in value.values() if isinstance(one, list))


_NUMBER: _Check = (_is_number, "a number within ±1.797e308")
_BOUND: _Check = (_is_bound, "a number within ±1.797e308")
_COUNT: _Check = (is_count, "a non-negative integer")
_STRING: _Check = (_is_text, "a string")
_NOTE: _Check = (lambda value: value is None or isinstance(value, str), "a string")
_BOOLEAN: _Check = (lambda value: isinstance(value, bool), "true or false")
_FLAG: _Check = (lambda value: value is None or isinstance(value, bool), "true or false")

# the enforced keywords whose values are no schemas
VALUES: dict[str, _Check] = {
    "type": (_is_type, f"one of {', '.join(sorted(_TYPES))}, or a list of them"),
    "enum": (
        lambda value: isinstance(value, list) and bool(value) and _has_finite_numbers(value),
        "a list that is not empty, of numbers within ±1.797e308 and other values",
    ),
    "const": (_has_finite_numbers, "without numbers beyond ±1.797e308"),
    "minLength": _COUNT,
    "maxLength": _COUNT,
    "pattern": _STRING,
    "format": _STRING,
    "minimum": _NUMBER,
    "maximum": _NUMBER,
    "exclusiveMinimum": _BOUND,
    "exclusiveMaximum": _BOUND,
    "multipleOf": (
        _is_short_divisor,
        f"a number above 0 that is at most {MAX_DIVISOR:,} times a power of ten down to 1e-9",
    ),
    "minItems": _COUNT,
    "maxItems": _COUNT,
    "required": (_are_texts, "a list of strings"),
    "minProperties": _COUNT,
    "maxProperties": _COUNT,
}
_OTHERS: dict[str, _Check] = {
    "minContains": _COUNT,
    "maxContains": _COUNT,
    "uniqueItems": _BOOLEAN,
    "dependentRequired": (_is_map_of_texts, "an object of lists of strings"),
    "$ref": _STRING,
    "$dynamicRef": _STRING,
    "$recursiveRef": _STRING,
    "$anchor": _STRING,
    "$dynamicAnchor": _STRING,
    "$id": _STRING,
    "$schema": _STRING,
    "$vocabulary": (_is_map, "an object"),
    # annotations; serializers write null for one that is not set
    "title": _NOTE,
    "description": _NOTE,
    "$comment": _NOTE,
    "contentMediaType": _NOTE,
    "contentEncoding": _NOTE,
    "deprecated": _FLAG,
    "readOnly": _FLAG,
    "writeOnly": _FLAG,
    "examples": (lambda value: value is None or isinstance(value, list), "a list"),
}
MAPS_OF_SCHEMAS = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions", "dependencies")
LISTS_OF_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
ONE_SCHEMA = (
    *("items", "additionalItems", "contains", "unevaluatedItems", "contentSchema"),
    *("additionalProperties", "propertyNames", "unevaluatedProperties"),
    *("not", "if", "then", "else"),
)
_RULES: dict[str, _Check] = {
    **VALUES,
    **_OTHERS,
    **dict.fromkeys(MAPS_OF_SCHEMAS, (_is_map, "an object of schemas")),
    "dependencies": (_is_map_of_dependencies, "an object of schemas and lists of strings"),
    **dict.fromkeys(
        LISTS_OF_SCHEMAS, (lambda value: isinstance(value, list) and bool(value), "a list of schemas that is not empty")
    ),
    # a tuple without items
    "prefixItems": (lambda value: isinstance(value, list), "a list of schemas"),
}
