"""JSON Schema keywords that are enforced only where other keywords can express them, one function each.

llguidance refuses all of them, except for the simplest cases of `oneOf` and of the counts (see `rewriting.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from quire.server.structured.schema import rewriting
from quire.server.structured.schema.schema_algebra import (
    Complement,
    Inexpressible,
    Resolve,
    Schema,
    escaped,
    is_free,
    types_of,
)

Inner = Callable[[str, Any], Schema]  # normalizes a subschema, at a path
_Part = Callable[[dict[str, Any], dict[str, Any], Inner, Resolve], Schema]


def part_of(keyword: str, schema: dict[str, Any], base: dict[str, Any], inner: Inner, resolve: Resolve) -> Schema:
    """Return the constraint of `keyword` in `schema`; True if there is none, or `base` implies it. Raises
    Inexpressible.

    `base` has the normalized keywords; those that the part replaces are removed.
    """
    return LIMITED[keyword](schema, base, inner, resolve) if keyword in schema else True


def _one_of(schema: dict[str, Any], base: dict[str, Any], inner: Inner, resolve: Resolve) -> Schema:
    if "oneOf" not in base:
        return True  # part of unevaluatedProperties
    return rewriting.exactly_one(base.pop("oneOf"), types_of(base), resolve)


def _not(schema: dict[str, Any], base: dict[str, Any], inner: Inner, resolve: Resolve) -> Schema:
    return Complement(resolve).negate(inner("not", schema["not"]), types_of(base))


def _if(schema: dict[str, Any], base: dict[str, Any], inner: Inner, resolve: Resolve) -> Schema:
    if "then" not in schema and "else" not in schema:
        return True
    condition, then, otherwise = (inner(keyword, schema.get(keyword, True)) for keyword in ("if", "then", "else"))
    return rewriting.if_then_else(condition, then, otherwise, types_of(base), resolve)


def _contains(schema: dict[str, Any], base: dict[str, Any], inner: Inner, resolve: Resolve) -> Schema:
    least, most = int(schema.get("minContains", 1)), schema.get("maxContains", math.inf)
    if least == 0 and most == math.inf:
        return True
    return rewriting.containing(inner("contains", schema["contains"]), least, most, base, types_of(base), resolve)


def _unique_items(schema: dict[str, Any], base: dict[str, Any], inner: Inner, resolve: Resolve) -> Schema:
    part = rewriting.unique(base, types_of(base), resolve) if schema["uniqueItems"] else True
    if part is not True:  # lists whole arrays
        for keyword in ("items", "prefixItems", "minItems", "maxItems"):
            base.pop(keyword, None)
    return part


def _property_names(schema: dict[str, Any], base: dict[str, Any], inner: Inner, resolve: Resolve) -> Schema:
    return rewriting.named(inner("propertyNames", schema["propertyNames"]), types_of(base), resolve)


def _dependent_required(schema: dict[str, Any], base: dict[str, Any], inner: Inner, resolve: Resolve) -> Schema:
    conditions = {name: {"required": names} for name, names in schema["dependentRequired"].items()}
    return rewriting.dependent(conditions, types_of(base))


def _dependent_schemas(schema: dict[str, Any], base: dict[str, Any], inner: Inner, resolve: Resolve) -> Schema:
    conditions = {
        name: inner(f"dependentSchemas/{escaped(name)}", child) for name, child in schema["dependentSchemas"].items()
    }
    return rewriting.dependent(conditions, types_of(base))


def _unevaluated_properties(schema: dict[str, Any], base: dict[str, Any], inner: Inner, resolve: Resolve) -> Schema:
    if is_free(schema["unevaluatedProperties"]):
        return True
    for keyword in ("if", "dependentSchemas"):
        if keyword in schema:
            raise Inexpressible(f"which properties {keyword} evaluates depends on the object")
    others = inner("unevaluatedProperties", schema["unevaluatedProperties"])
    return rewriting.unevaluated(others, base, resolve)


def _num_properties(schema: dict[str, Any], base: dict[str, Any], inner: Inner, resolve: Resolve) -> Schema:
    """Enforce minProperties and maxProperties of an object with optional properties."""
    if not rewriting.needs_counting(base):
        return True
    part = rewriting.counted(base, types_of(base))
    for keyword in ("minProperties", "maxProperties"):
        base.pop(keyword, None)
    return part


LIMITED: dict[str, _Part] = {
    "unevaluatedProperties": _unevaluated_properties,  # before oneOf is replaced
    "oneOf": _one_of,
    "not": _not,
    "if": _if,
    "contains": _contains,
    "uniqueItems": _unique_items,
    "propertyNames": _property_names,
    "dependentRequired": _dependent_required,
    "dependentSchemas": _dependent_schemas,
    "minProperties": _num_properties,
    "maxProperties": _num_properties,
}
