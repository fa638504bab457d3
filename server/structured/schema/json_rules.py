"""Rules for the JSON of normalized schemas with numbers that the library does not represent exactly.

Schemas without them go to the library; around those, objects, arrays and alternatives are written here as by the
library, because its schemas cannot refer to a rule.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from quire.server.structured.schema import large_numbers
from quire.server.structured.schema.large_numbers import BOUNDS
from quire.server.structured.schema.schema_algebra import Schema, escaped, types_of
from quire.server.values import Json

_PARTS = ("properties", "patternProperties", "anyOf", "allOf", "prefixItems", "items", "additionalProperties")
_OBJECT = frozenset({"type", "properties", "required", "additionalProperties"})
_ARRAY = frozenset({"type", "items", "minItems", "maxItems"})


class RulesError(ValueError):
    """A number cannot be enforced here. The text begins with the place."""


class Rules(Protocol):
    """The part of `lark.Builder` that rules use."""

    def name(self, prefix: str) -> str: ...
    def named(self, name: str, body: str) -> None: ...
    def rule(self, body: str) -> str: ...
    def terminal(self, body: str) -> str: ...
    def members(self, members: Sequence[tuple[bool, str]], separator: str) -> str: ...


def are_needed(schema: Schema) -> bool:
    """Return whether the whole normalized schema needs these rules."""
    return isinstance(schema, dict) and (
        _is_large(schema) or any(map(are_needed, [*_children(schema), *schema.get("$defs", {}).values()]))
    )


class JsonRules:
    """`library` gives an expression for a schema without such numbers; `space` is one for white space."""

    def __init__(self, builder: Rules, definitions: dict[str, Schema], library: Callable[[Schema], str], space: str):
        self.builder, self.library, self.space = builder, library, space
        self.definitions = definitions
        self.names: dict[str, str] = {}  # reference -> its rule
        self.pending: list[str] = []
        self.needed = _needed(definitions)

    def whole(self, schema: Schema) -> str:
        """Return the name of a rule for the schema. Raises RulesError."""
        start = self.builder.rule(self.expression({key: schema[key] for key in schema if key != "$defs"}, "#"))
        while self.pending:
            reference = self.pending.pop()
            target = self.definitions[reference.removeprefix("#/$defs/")]
            self.builder.named(self.names[reference], self.expression(target, reference))
        return start

    def expression(self, schema: Schema, path: str) -> str:
        if not isinstance(schema, dict) or not self._has_large(schema):
            return self.library(schema)
        keywords = schema.keys()
        if keywords == {"$ref"}:
            return self._reference(schema["$ref"])
        if keywords == {"anyOf"}:
            parts = [
                self.expression(one, f"{path}/anyOf/{i}") for i, one in enumerate(schema["anyOf"]) if one is not False
            ]
            return f"({' | '.join(parts)})"
        if keywords == {"allOf"} and len(schema["allOf"]) == 1:
            return self.expression(schema["allOf"][0], f"{path}/allOf/0")
        if keywords & {"enum", "const"}:
            return self._constants(schema, path)
        if keywords & set(BOUNDS) and keywords <= {"type", *BOUNDS}:
            return self._number(schema, path)
        if types_of(schema) == {"object"} and keywords <= _OBJECT and schema.get("additionalProperties") is False:
            return self._object(schema, path)
        if types_of(schema) == {"array"} and keywords <= _ARRAY:
            return self._array(schema, path)
        others = sorted(keywords - set(BOUNDS) - {"type", "properties", "items"}) or sorted(keywords - set(BOUNDS))
        raise RulesError(f"at {path}: {others[0]}: it cannot be enforced together with numbers beyond ±2^53")

    def _has_large(self, schema: Schema) -> bool:
        return isinstance(schema, dict) and (
            _is_large(schema) or schema.get("$ref") in self.needed or any(map(self._has_large, _children(schema)))
        )

    def _reference(self, reference: str) -> str:
        if reference not in self.names:
            self.names[reference] = self.builder.name("r")
            self.pending.append(reference)
        return self.names[reference]

    def _constants(self, schema: dict[str, Any], path: str) -> str:
        if schema.keys() - {"type"} not in ({"enum"}, {"const"}):
            raise RulesError(f"at {path}: enum: it cannot be enforced together with numbers beyond ±2^53")
        values = schema.get("enum", [schema.get("const")])
        kept = [value for value in values if not _is_large_number(value) or types_of(schema) & {"number", "integer"}]
        texts = [_quoted(json.dumps(value)) for value in kept if _is_large_number(value)]
        others = [value for value in kept if not _is_large_number(value)]
        if others:
            texts.append(self.library({**{"type": sorted(types_of(schema))}, "enum": others}))
        return f"({' | '.join(texts)})"

    def _number(self, schema: dict[str, Any], path: str) -> str:
        types, bounds = types_of(schema), {name: schema[name] for name in BOUNDS if name in schema}
        parts = []
        if "number" in types:
            pattern, inner = large_numbers.numbers(bounds)
            if inner is not None:
                parts.append(self.library({"type": "number", **inner}))
        else:
            pattern = large_numbers.integers(bounds) if "integer" in types else None
        if pattern is not None:
            parts.append(self.builder.terminal(f"/{pattern}/"))
        if others := sorted(types - {"number", "integer"}):
            parts.append(self.library({"type": others}))
        if not parts:
            raise RulesError(f"at {path}: no value is valid")
        return f"({' | '.join(parts)})"

    def _object(self, schema: dict[str, Any], path: str) -> str:
        required, space = set(schema.get("required", ())), self.space
        properties = {**schema.get("properties", {})}
        properties.update({name: False for name in required if name not in properties})
        members = []
        for name, child in properties.items():
            if child is False:
                if name in required:
                    raise RulesError(f"at {path}: no value is valid")
                continue
            value = self.expression(child, f"{path}/properties/{escaped(name)}")
            member = f'{_quoted(json.dumps(name, ensure_ascii=False))} {space} ":" {space} {value} {space}'
            members.append((name in required, member))
        inner = self.builder.members(members, f'"," {space}')
        return f'"{{" {space} {inner} "}}"'

    def _array(self, schema: dict[str, Any], path: str) -> str:
        least, most, space = schema.get("minItems", 0), schema.get("maxItems"), self.space
        if most is not None and most < least:
            raise RulesError(f"at {path}: no value is valid")
        if most == 0 or schema["items"] is False:
            return f'"[" {space} "]"'
        item = self.builder.rule(f"{self.expression(schema['items'], f'{path}/items')} {space}")
        count = f"{max(least - 1, 0)},{'' if most is None else most - 1}"
        items = f'{item} ("," {space} {item}){{{count}}}'
        return f'"[" {space} {items if least else f"({items})?"} "]"'


def _children(schema: dict[str, Any]) -> Iterator[Schema]:
    for keyword in _PARTS:
        value = schema.get(keyword)
        if isinstance(value, list):
            yield from value
        elif keyword in ("properties", "patternProperties"):
            yield from (value or {}).values()
        elif value is not None:
            yield value


def _needed(definitions: dict[str, Schema]) -> set[str]:
    """Return the references to definitions that have such numbers, in themselves or in others."""
    found: set[str] = set()
    while True:
        more = {
            f"#/$defs/{name}"
            for name, schema in definitions.items()
            if f"#/$defs/{name}" not in found and _leads_to(schema, found)
        }
        if not more:
            return found
        found |= more


def _leads_to(schema: Schema, found: set[str]) -> bool:
    return isinstance(schema, dict) and (
        _is_large(schema) or schema.get("$ref") in found or any(_leads_to(child, found) for child in _children(schema))
    )


def _is_large(schema: dict[str, Any]) -> bool:
    constants = [*schema.get("enum", ()), schema.get("const")]
    return large_numbers.are_large(schema) or any(map(_is_large_number, constants))


def _is_large_number(value: Json) -> bool:
    return isinstance(value, int) and not -(2**63) <= value < 2**64


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
