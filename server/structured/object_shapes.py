"""The schema of a call's parameters -> lists of properties; a call has those of one list.

For formats that write a call as one element per property: constraints on the object must follow from the names.
llguidance writes objects as JSON only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from quire.server.structured.lark import StructureError
from quire.server.structured.schema.keywords import SchemaError
from quire.server.structured.schema.schema import normalize
from quire.server.structured.schema.schema_algebra import Schema, common_types, is_free, types_of

MAX_SHAPES = 64
PLAIN = frozenset({"type", "properties", "required", "additionalProperties"})


@dataclass(frozen=True, slots=True)
class Shape:
    """The properties of an object, in order; `lists_all`: whether no others are possible."""

    properties: dict[str, Schema] = field(default_factory=dict)
    required: frozenset[str] = frozenset()
    lists_all: bool = False

    def and_(self, other: Shape) -> Shape:
        names = dict.fromkeys([*self.properties, *other.properties])
        properties = {name: _both(self._property(name), other._property(name)) for name in names}
        return Shape(properties, self.required | other.required, self.lists_all or other.lists_all)

    def _property(self, name: str) -> Schema:
        return self.properties.get(name, not self.lists_all)

    def all_named(self) -> list[tuple[str, Schema]]:
        """Return the properties, and those that are required without being described."""
        others = sorted(self.required - self.properties.keys())
        return [*self.properties.items(), *((name, True) for name in others)]

    def is_possible(self) -> bool:
        return all(self._property(name) is not False for name in self.required)


def shapes(schema: dict[str, Any], path: str, close: bool = True) -> tuple[list[Shape], dict[str, Any]]:
    """Return the alternatives, and the definitions that their properties refer to. Raises StructureError."""
    try:
        normal = normalize(schema, close)
    except SchemaError as error:
        raise StructureError(f"{path} {error}") from None
    definitions = normal.get("$defs", {}) if isinstance(normal, dict) else {}
    found = [shape for shape in _shapes(normal, definitions, path, ()) if shape.is_possible()]
    if not found:
        raise StructureError(f"{path} at #: no value is valid")
    return found, {"$defs": definitions}


def _shapes(schema: Schema, definitions: dict[str, Any], path: str, seen: tuple[str, ...]) -> list[Shape]:
    if isinstance(schema, bool):
        return [Shape()] if schema else []
    if "object" not in types_of(schema):
        return []
    properties, closed = schema.get("properties", {}), schema.get("additionalProperties", True)
    found = [Shape(properties, frozenset(schema.get("required", ())), closed is False)]
    for keyword, value in schema.items():
        if keyword == "allOf":
            parts = [_shapes(branch, definitions, path, seen) for branch in value]
        elif keyword == "anyOf":
            parts = [[shape for branch in value for shape in _shapes(branch, definitions, path, seen)]]
        elif keyword == "$ref" and value not in seen:
            parts = [_shapes(definitions[value.removeprefix("#/$defs/")], definitions, path, (*seen, value))]
        elif (
            keyword in PLAIN - {"additionalProperties"}
            or keyword == "$defs"
            or (keyword == "additionalProperties" and (closed is False or is_free(closed)))
        ):
            parts = []
        else:
            raise StructureError(
                f"{path} at #: {keyword}: the parameters cannot have it in this model's format of calls"
            )
        for part in parts:
            found = list(_combined(found, part, path))
    return found


def _combined(some: list[Shape], others: list[Shape], path: str) -> Iterator[Shape]:
    if len(some) * len(others) > MAX_SHAPES:
        raise StructureError(f"{path} at #: there are more than {MAX_SHAPES} choices of parameters")
    for one in some:
        for other in others:
            both = one.and_(other)
            if both.is_possible():
                yield both


def _both(one: Schema, other: Schema) -> Schema:
    if one is False or other is False:
        return False
    if is_free(one) or one == other:
        return other
    if is_free(other):
        return one
    types = common_types(types_of(one), types_of(other))
    return {"type": types[0] if len(types) == 1 else types, "allOf": [one, other]} if types else False
