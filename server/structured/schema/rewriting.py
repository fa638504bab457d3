"""Keywords of JSON Schema that the grammar compiler does not have, in terms of those that it has.

Each function takes normalized subschemas and returns a schema that applies in addition to the other keywords. Results
are exact; one that would be too large or has no equivalent raises `Inexpressible`.

llguidance lacks `if`, `contains`, `uniqueItems`, `propertyNames`, `dependentRequired`, `dependentSchemas` and
`unevaluatedProperties`. It takes `oneOf` only where its branches, which may not be references, differ in their types or
in a required constant. It counts properties only where all named ones are required, or a bound is 0 or 1; a free name
that is written twice counts twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from quire.server.structured.schema.schema_algebra import (
    Complement,
    Derived,
    Inexpressible,
    Resolve,
    Schema,
    all_of,
    any_of,
    disjoint,
    exact_text,
    identity,
    is_free,
    types_of,
    values_of,
)

MAX_ALTERNATIVES = 400  # per keyword


def if_then_else(condition: Schema, then: Schema, otherwise: Schema, types: frozenset[str], resolve: Resolve) -> Schema:
    """Return the schema of `if`, `then` and `else`."""
    return any_of([all_of([condition, then]), all_of([Complement(resolve).negate(condition, types), otherwise])])


def exactly_one(branches: list[Schema], types: frozenset[str], resolve: Resolve) -> Schema:
    """Return the schema of `oneOf`."""
    typed = [
        {"type": sorted(types), **branch} if isinstance(branch, dict) and "type" not in branch else branch
        for branch in branches
    ]
    if all(disjoint(a, b, resolve) for a, b in combinations(typed, 2)):
        return any_of(branches)
    complement = Complement(resolve)
    others = [complement.negate(branch, types) for branch in branches]
    return any_of(
        all_of([branch, *(other for j, other in enumerate(others) if j != i)]) for i, branch in enumerate(branches)
    )


def dependent(conditions: dict[str, Schema], types: frozenset[str]) -> Schema:
    """Return the schema of `dependentSchemas`: a condition per property name."""
    return all_of(
        _for_type("object", [{"properties": {name: False}}, all_of([{"required": [name]}, schema])], types)
        for name, schema in conditions.items()
    )


def named(names: Schema, types: frozenset[str], resolve: Resolve) -> Schema:
    """Return the schema of `propertyNames`."""
    if "object" not in types:
        return True
    values = values_of(names, resolve)
    if values is not None:
        names_given = [value for value in values if isinstance(value, str)]
        closed = {"properties": dict.fromkeys(names_given, True), "additionalProperties": False}
        return _for_type("object", [closed], types)
    pattern = _pattern(names, resolve)
    if pattern is None:
        return True
    if pattern == "":
        return _for_type("object", [{"maxProperties": 0}], types)
    return _for_type("object", [{"patternProperties": {pattern: True}, "additionalProperties": False}], types)


def _pattern(names: Schema, resolve: Resolve, seen: tuple[str, ...] = ()) -> str | None:
    """Return the pattern of a schema's strings; None: all, "": none."""
    if isinstance(names, bool):
        return None if names else ""
    if "string" not in types_of(names):
        return ""
    rules = {keyword: value for keyword, value in names.items() if keyword in _OF_NAMES}
    if not rules:
        return None
    if set(rules) == {"pattern"}:
        return rules["pattern"]
    if set(rules) <= {"minLength", "maxLength"}:
        return f"^(?s:.{{{rules.get('minLength', 0)},{rules.get('maxLength', '')}}})$"
    if set(rules) <= {"enum", "const"}:
        return exact_text(value for value in values_of(names, resolve) or () if isinstance(value, str))
    if set(rules) == {"anyOf"}:
        patterns = [_pattern(branch, resolve, seen) for branch in rules["anyOf"]]
        return None if None in patterns else "|".join(f"(?:{pattern})" for pattern in patterns if pattern)
    if set(rules) == {"$ref"} and rules["$ref"] not in seen:
        return _pattern(resolve(rules["$ref"]), resolve, (*seen, rules["$ref"]))
    raise Inexpressible(f"{' and '.join(sorted(rules))} of names are not supported together")


_OF_NAMES = ("pattern", "minLength", "maxLength", "enum", "const", "format", "anyOf", "allOf", "oneOf", "$ref")


def needs_counting(base: dict[str, Any]) -> bool:
    """Return whether the compiler cannot count an object's properties: some are optional, or free names may repeat."""
    least, required = base.get("minProperties", 0), set(base.get("required", ()))
    if least == 0 and "maxProperties" not in base:
        return False
    return least > len(required) + 1 or any(name not in required for name in base.get("properties", {}))


def counted(base: dict[str, Any], types: frozenset[str]) -> Schema:
    """Return the schema of `minProperties` and `maxProperties`, by the optional properties present."""
    required, named = set(base.get("required", ())), base.get("properties", {})
    optional = [name for name, child in named.items() if name not in required and child is not False]
    least = max(base.get("minProperties", 0) - len(required), 0)
    most = base.get("maxProperties", math.inf) - len(required)
    is_closed = base.get("additionalProperties") is False and not base.get("patternProperties")
    if least > 1 and not is_closed:  # a free property's name may be written twice, but counts once
        raise Inexpressible("more than one property that is not required needs additionalProperties: false")
    if is_closed and most >= len(optional):  # other properties may be present as well
        choices: Iterable[Schema] = ({"required": list(chosen)} for chosen in combinations(optional, least))
    elif not is_closed and most == math.inf:
        free = {"properties": dict.fromkeys(optional, False), "minProperties": base.get("minProperties", 0)}
        choices = [*({"required": [name]} for name in optional), free]
    else:
        choices = _exact_choices(base, optional, least if is_closed else 0, most, is_closed)
    return _for_type("object", choices, types)


def _exact_choices(
    base: dict[str, Any], optional: list[str], least: int, most: float, is_closed: bool
) -> Iterator[dict[str, Any]]:
    """Yield objects with each choice of optional properties, without the others; free names make up the rest."""
    bounds = {} if is_closed else {key: base[key] for key in ("minProperties", "maxProperties") if key in base}
    for size in range(least, len(optional) + 1):
        if size > most:
            return
        for chosen in combinations(optional, size):
            absent = {name: False for name in optional if name not in chosen}
            yield {"required": list(chosen), "properties": absent, **bounds}


def containing(
    item: Schema, least: int, most: float, base: dict[str, Any], types: frozenset[str], resolve: Resolve
) -> Schema:
    """Return the schema of `contains`, with `minContains` and `maxContains`."""
    if "array" not in types:
        return True
    if is_free(item):
        bounds = {"minItems": least} | ({"maxItems": int(most)} if most < math.inf else {})
        return _for_type("array", [bounds], types)
    if most < least or (least and item is False):
        return _for_type("array", [], types)
    length = base.get("maxItems", math.inf)
    if base.get("items") is False:
        length = min(length, len(base.get("prefixItems", ())))
    other = Complement(resolve).negate(item) if most < length else True
    if (least or most) and length > MAX_ALTERNATIVES:
        raise Inexpressible("without a small maxItems, it is not supported")
    return _for_type("array", _placements(item, other, least, most, length), types)


def _placements(item: Schema, other: Schema, least: int, most: float, length: float) -> Iterator[dict[str, Any]]:
    """Yield arrays with the matching items at every choice of places; `other` is the schema of other items, used if
    `most` limits.
    """
    if most >= length:  # items at other places may match as well
        places = combinations(range(int(length)), least) if least else [()]
    elif most == 0:
        places = [()]
    else:
        sizes = range(least, int(min(most, length)) + 1)
        places = (chosen for size in sizes for chosen in combinations(range(int(length)), size))
    for chosen in places:
        end = chosen[-1] + 1 if chosen else 0
        prefix = [item if i in chosen else other for i in range(end)]
        yield {"minItems": end, **({"prefixItems": prefix} if prefix else {}), "items": other}


def unique(base: dict[str, Any], types: frozenset[str], resolve: Resolve) -> Schema:
    """Return the schema of `uniqueItems: true`, for items with few values."""
    if "array" not in types or base.get("maxItems", math.inf) <= 1:
        return True
    if base.get("items") is False and len(base.get("prefixItems", ())) <= 1:
        return True
    arrays = list(_arrangements(base, resolve))
    others = sorted(types - {"array"})
    return any_of([{"enum": arrays} if arrays else False, {"type": others} if others else False])


def _arrangements(base: dict[str, Any], resolve: Resolve) -> Iterator[list[Any]]:
    prefix, rest = [values_of(item, resolve) for item in base.get("prefixItems", ())], base.get("items", True)
    items = values_of(rest, resolve)
    least, most = base.get("minItems", 0), base.get("maxItems", math.inf)
    if most > len(prefix) and items is None:
        raise Inexpressible("it is supported for items of few values: enum, const, boolean, small ranges")
    if None in prefix[: len(prefix) if most > len(prefix) else int(most)]:
        raise Inexpressible("it is supported for items of few values: enum, const, boolean, small ranges")
    count, pending = 0, [((), frozenset())]
    while pending:
        chosen, used = pending.pop()
        if len(chosen) >= least:
            count += 1
            yield list(chosen)
        if count + len(pending) > MAX_ALTERNATIVES:
            raise Inexpressible(f"there are more than {MAX_ALTERNATIVES} such arrays")
        if len(chosen) < most:
            values = prefix[len(chosen)] if len(chosen) < len(prefix) else items
            pending.extend(
                ((*chosen, value), used | {identity(value)}) for value in values or () if identity(value) not in used
            )


def unevaluated(others: Schema, base: dict[str, Any], resolve: Resolve) -> Schema:
    """Return the schema of `unevaluatedProperties`; take from `base` a list of mutually exclusive alternatives."""
    unions = [keyword for keyword in ("anyOf", "oneOf") if keyword in base]
    own = {keyword: value for keyword, value in base.items() if keyword not in unions}
    if not unions:
        return _closed([own], others, resolve)
    branches = base[unions[0]]
    if len(unions) > 1 or not all(disjoint(a, b, resolve) for a, b in combinations(branches, 2)):
        raise Inexpressible(f"which properties {unions[0]} evaluates depends on the object")
    part = any_of([all_of([branch, _closed([own, branch], others, resolve)]) for branch in branches])
    del base[unions[0]]
    return part


def _closed(schemas: list[Schema], others: Schema, resolve: Resolve) -> Schema:
    """Return objects whose properties that `schemas` do not evaluate match `others`."""
    found = _Evaluated()
    for schema in schemas:
        found.add(schema, resolve)
    if found.everything:
        return True
    properties = {"properties": dict.fromkeys(sorted(found.names), True), "additionalProperties": others}
    patterns = dict.fromkeys(sorted(found.patterns), True)
    return {**properties, "patternProperties": patterns} if patterns else properties


@dataclass(slots=True)
class _Evaluated:
    """The names and patterns of the properties that schemas evaluate in every object, or all."""

    names: set[str] = field(default_factory=set)
    patterns: set[str] = field(default_factory=set)
    everything: bool = False

    def add(self, schema: Schema, resolve: Resolve, seen: tuple[str, ...] = ()) -> None:
        """Add the properties of a schema. Raises Inexpressible if they depend on the object."""
        if isinstance(schema, Derived):
            raise Inexpressible("which properties are evaluated may depend on the object")
        for keyword, value in schema.items() if isinstance(schema, dict) else ():
            match keyword:
                case "properties":
                    self.names |= value.keys()
                case "patternProperties":
                    self.patterns |= value.keys()
                case "additionalProperties":
                    self.everything = True
                case "anyOf" | "oneOf":
                    raise Inexpressible(f"which properties {keyword} evaluates depends on the object")
                case "allOf":
                    for branch in value:
                        self.add(branch, resolve, seen)
                case "$ref":
                    if value in seen:
                        raise Inexpressible("recursive schemas are not supported")
                    self.add(resolve(value), resolve, (*seen, value))


def _for_type(kind: str, alternatives: Iterable[Schema], types: frozenset[str]) -> Schema:
    """Return values of `kind` that match one of the alternatives, and those of the other types."""
    branches: list[Schema] = []
    for alternative in alternatives:
        if len(branches) >= MAX_ALTERNATIVES:
            raise Inexpressible(f"there are more than {MAX_ALTERNATIVES} alternatives")
        if alternative is not False:
            branches.append({"type": kind} if alternative is True else {"type": kind, **alternative})
    others = sorted(types - {kind})
    return any_of([*branches, {"type": others} if others else False]) if kind in types else True
