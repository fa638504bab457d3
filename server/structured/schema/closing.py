"""Close objects: small models invent undeclared properties until they are cut.

An object is closed where its schema describes properties and does not mention others. All subschemas of the same value
(`allOf`, `$ref`, ...) describe the object together, so none of several is closed alone. A condition or a complemented
schema is not closed at all. llguidance leaves every object open unless its schema says otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from quire.server.structured.schema.schema_algebra import Schema

_OPENS = ("additionalProperties", "unevaluatedProperties")
_ONE = ("if", "then", "else", "not")  # keywords of one subschema of the same value
_UNIONS = ("anyOf", "oneOf")
_APPLICATORS = ("$ref", "allOf", *_UNIONS, *_ONE, "dependentSchemas")
_NAMING = ("properties", "patternProperties", "required", "dependentRequired", "minProperties", "maxProperties")


class Closing(Enum):
    """The treatment of a subschema: left open with all below it, part of an object closed elsewhere, or closed."""

    OPEN = 0
    PART = 1
    CLOSED = 2

    @property
    def for_children(self) -> Closing:
        return Closing.OPEN if self is Closing.OPEN else Closing.CLOSED


@dataclass(slots=True)
class Described:
    """The properties of an object that a schema describes."""

    names: dict[str, None] = field(default_factory=dict)
    patterns: dict[str, None] = field(default_factory=dict)
    describes: bool = False
    is_explicit: bool = False  # the schema constrains other properties

    def closes(self) -> bool:
        return self.describes and not self.is_explicit

    def schema(self) -> dict[str, Any]:
        """Return the schema of objects without other properties."""
        result: dict[str, Any] = {"properties": dict.fromkeys(self.unmatched(), True)}
        if self.patterns:
            result["patternProperties"] = dict.fromkeys(self.patterns, True)
        return {**result, "additionalProperties": False}

    def unmatched(self) -> list[str]:
        """Return the property names that no pattern matches."""
        return [name for name in self.names if not any(_found(pattern, name) for pattern in self.patterns)]

    def __or__(self, other: Described) -> Described:
        return Described(
            self.names | other.names,
            self.patterns | other.patterns,
            self.describes or other.describes,
            self.is_explicit or other.is_explicit,
        )


def described(schemas: Iterable[Any], resolve: Callable[[Any], Any]) -> Described:
    """Return the properties that `schemas`, as given, describe; they all apply to one value, in their order. `resolve`
    returns the schema that a `$ref` names.
    """
    found = Described()
    pending, seen = list(schemas)[::-1], set()
    while pending:
        schema = pending.pop()
        if not isinstance(schema, dict) or id(schema) in seen:
            continue
        seen.add(id(schema))
        found.is_explicit |= any(keyword in schema for keyword in _OPENS)
        found.describes |= "properties" in schema or "patternProperties" in schema
        found.names |= dict.fromkeys(_names(schema))
        found.patterns |= dict.fromkeys(schema.get("patternProperties", ()))
        parts = list(_parts(schema))
        if "$ref" in schema:
            parts.insert(0, resolve(schema["$ref"]))
        pending.extend(parts[::-1])
    return found


def own(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema without its alternatives."""
    return {keyword: value for keyword, value in schema.items() if keyword not in _UNIONS}


def has_parts(schema: dict[str, Any]) -> bool:
    return any(keyword in schema for keyword in _APPLICATORS)


def how_parts(schema: dict[str, Any], closing: Closing) -> Closing:
    """Return the mode for the subschemas that apply to the same value as `schema`: closed if any single one of them
    describes the whole object.
    """
    if closing is not Closing.CLOSED:
        return closing
    given = [keyword for keyword in (*_APPLICATORS, *_OPENS, *_NAMING) if keyword in schema]
    alone = len(given) == 1 and given[0] in ("$ref", "allOf", *_UNIONS)
    if alone and given[0] == "allOf":
        alone = len(schema["allOf"]) == 1
    return Closing.CLOSED if alone else Closing.PART


def closed_alternative(branch: Schema, seen: Described) -> Schema:
    """Return a normalized alternative, closed."""
    if branch is False or not seen.closes():
        return branch
    return seen.schema() if branch is True else {"allOf": [seen.schema(), branch]}


def _names(schema: dict[str, Any]) -> Iterator[str]:
    yield from schema.get("properties", ())
    yield from schema.get("required", ())
    for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
        for name, value in schema.get(keyword, {}).items():
            yield name
            yield from value if isinstance(value, list) else ()


def _parts(schema: dict[str, Any]) -> Iterator[Any]:
    for keyword in ("allOf", *_UNIONS):
        yield from schema.get(keyword, ())
    yield from (schema[keyword] for keyword in _ONE if keyword in schema)
    for keyword in ("dependentSchemas", "dependencies"):
        yield from schema.get(keyword, {}).values()


def _found(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error:  # the compiler's syntax differs in rare cases, and its errors explain the difference
        return False
