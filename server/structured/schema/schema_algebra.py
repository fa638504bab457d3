"""Complements and comparisons of normalized JSON schemas.

All are exact: what a keyword cannot express raises `Inexpressible`. `resolve` gives the schema that a `$ref` names.
llguidance lacks `not`, and with it whatever needs a complement; it finds fewer schemas to exclude each other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from quire.server.values import Json

ALL_TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})
MAX_RANGE = 64  # integers of a range that is treated as a set of values
_OF_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_OPPOSITES = {
    "minimum": "exclusiveMaximum",
    "maximum": "exclusiveMinimum",
    "exclusiveMinimum": "maximum",
    "exclusiveMaximum": "minimum",
}

Schema = dict[str, Any] | bool
Resolve = Callable[[str], Schema]


class Inexpressible(Exception):
    """The enforced keywords have no equivalent; the text says why."""


class Derived(dict):
    """A normalized schema with parts derived from other keywords: `allOf` of both."""

    def __init__(self, base: dict[str, Any], parts: list[Schema]):
        super().__init__(allOf=[base, *parts])
        self.base = base


def escaped(name: str) -> str:
    """Return a step of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def types_of(schema: Schema) -> frozenset[str]:
    """Return the types that the keyword `type` allows; `integer` stands for the numbers that it allows, without
    `number`.
    """
    names = schema.get("type", ALL_TYPES) if isinstance(schema, dict) else ALL_TYPES if schema else ()
    types = frozenset({names} if isinstance(names, str) else names)
    return types - {"integer"} if "number" in types else types


def common_types(some: frozenset[str], others: frozenset[str]) -> list[str]:
    found = set(some & others)
    if ("integer" in some and "number" in others) or ("integer" in others and "number" in some):
        found.add("integer")
    return sorted(found)


def is_free(schema: Schema) -> bool:
    return schema is True or schema == {}


def any_of(schemas: Iterable[Schema]) -> Schema:
    kept = [schema for schema in schemas if schema is not False]
    if any(map(is_free, kept)):
        return True
    return False if not kept else kept[0] if len(kept) == 1 else {"anyOf": kept}


def all_of(schemas: Iterable[Schema]) -> Schema:
    kept = [schema for schema in schemas if not is_free(schema)]
    if any(schema is False for schema in kept):
        return False
    return True if not kept else kept[0] if len(kept) == 1 else {"allOf": kept}


class Complement:
    """The values that a schema excludes."""

    def __init__(self, resolve: Resolve):
        self.resolve = resolve

    def negate(self, schema: Schema, types: Collection[str] = ALL_TYPES, seen: tuple[str, ...] = ()) -> Schema:
        """Return a schema of the values of `types` that `schema` excludes. Raises Inexpressible."""
        if isinstance(schema, bool):
            return {"type": sorted(types)} if not schema else False
        return any_of(
            part
            for keyword, value in schema.items()
            for part in self._negate_keyword(keyword, value, schema, frozenset(types), seen)
        )

    def _negate_keyword(
        self, keyword: str, value: Json, schema: dict[str, Any], types: frozenset[str], seen: tuple[str, ...]
    ) -> Iterator[Schema]:
        match keyword:
            case "type":
                yield _other_types(types_of(schema), types)
            case "const":
                yield self._other_values([value], types)
            case "enum":
                yield self._other_values(value, types)
            case "anyOf":
                yield all_of([self.negate(branch, types, seen) for branch in value])
            case "allOf":
                yield from (self.negate(branch, types, seen) for branch in value)
            case "$ref":
                if value in seen:
                    raise Inexpressible("the complement of a recursive schema is not supported")
                yield self.negate(self.resolve(value), types, (*seen, value))
            case "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum":
                yield from ({"type": kind, _OPPOSITES[keyword]: value} for kind in types & {"number", "integer"})
            case "multipleOf":
                _refuse_for(types, ("number", "integer"), keyword)
            case "minLength" | "maxLength" | "pattern" | "format":
                if "string" in types:
                    yield _other_strings(keyword, value)
            case "minItems" | "maxItems" | "items" | "prefixItems":
                if "array" in types:
                    yield from self._other_arrays(keyword, value, schema, seen)
            case _:
                if "object" in types:
                    yield from self._other_objects(keyword, value, seen)

    def _other_values(self, values: list[Any], types: frozenset[str]) -> Schema:
        parts: list[Schema] = []
        for kind in sorted(types):
            given = [value for value in values if _is(value, kind)]
            if not given:
                parts.append({"type": kind})
            elif kind == "boolean":
                parts.extend({"const": value} for value in (True, False) if value not in given)
            elif kind == "string":
                parts.append({"type": "string", "pattern": other_texts(given)})
            elif kind in ("number", "integer"):
                bounds = [{"exclusiveMinimum": low, "exclusiveMaximum": high} for low, high in _gaps(given)]
                parts.extend({"type": kind, **_finite(bound)} for bound in bounds)
            elif kind == "array":
                parts.append(all_of([self.negate(_array(value), ("array",)) for value in given]))
            elif kind == "object":
                if any(given):
                    raise Inexpressible("the complement of a constant object is not supported")
                parts.append({"type": "object", "minProperties": 1})
        return any_of(parts)

    def _other_arrays(
        self, keyword: str, value: Json, schema: dict[str, Any], seen: tuple[str, ...]
    ) -> Iterator[Schema]:
        if keyword == "minItems":
            if value > 0:
                yield {"type": "array", "maxItems": value - 1}
        elif keyword == "maxItems":
            yield {"type": "array", "minItems": value + 1}
        elif keyword == "prefixItems":
            for i, item in enumerate(value):
                if (other := self.negate(item, seen=seen)) is not False:
                    yield {"type": "array", "prefixItems": [*[True] * i, other], "minItems": i + 1}
        elif (other := self.negate(value, seen=seen)) is not False:
            first, most = len(schema.get("prefixItems", ())), schema.get("maxItems", math.inf)
            if value is False:
                yield {"type": "array", "minItems": first + 1}
            elif most > first + MAX_RANGE:
                raise Inexpressible(f"the complement of items needs maxItems of at most {first + MAX_RANGE}")
            else:
                for i in range(first, most):
                    yield {"type": "array", "prefixItems": [*[True] * i, other], "minItems": i + 1}

    def _other_objects(self, keyword: str, value: Json, seen: tuple[str, ...]) -> Iterator[Schema]:
        if keyword == "required":
            yield from ({"type": "object", "properties": {name: False}} for name in value)
        elif keyword == "properties":
            for name, child in value.items():
                if (other := self.negate(child, seen=seen)) is not False:
                    yield {"type": "object", "properties": {name: other}, "required": [name]}
        elif keyword == "minProperties":
            if value > 0:
                yield {"type": "object", "maxProperties": value - 1}
        elif keyword == "maxProperties" and value == 0:
            yield {"type": "object", "minProperties": 1}
        elif keyword == "maxProperties" or not all(
            map(is_free, value.values() if keyword == "patternProperties" else [value])
        ):
            raise Inexpressible(f"the complement of {keyword} is not supported")


def _array(values: list[Any]) -> Schema:
    return {"prefixItems": [{"const": value} for value in values], "minItems": len(values), "maxItems": len(values)}


def _refuse_for(types: Collection[str], affected: Collection[str], keyword: str) -> None:
    if not set(affected).isdisjoint(types):
        raise Inexpressible(f"the complement of {keyword} is not supported")


def _other_types(given: frozenset[str], types: frozenset[str]) -> Schema:
    if "integer" in given and "number" in types:
        raise Inexpressible("numbers without integers are not supported")
    excluded = types - given - ({"integer"} if "number" in given else set())
    return {"type": sorted(excluded)} if excluded else False


def _other_strings(keyword: str, value: Json) -> Schema:
    if keyword == "minLength":
        return {"type": "string", "maxLength": value - 1} if value > 0 else False
    if keyword == "maxLength":
        return {"type": "string", "minLength": value + 1}
    raise Inexpressible(f"the complement of {keyword} is not supported")


def _is(value: Json, kind: str) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    match kind:
        case "number":
            return number
        case "integer":
            return number and _is_whole(value)
    return isinstance(value, {"boolean": bool, "string": str, "array": list, "object": dict}.get(kind, type(None)))


def _is_whole(number: float) -> bool:
    return isinstance(number, int) or number.is_integer()


def _gaps(numbers: list[float]) -> list[tuple[float, float]]:
    ordered = sorted(set(numbers))
    return list(zip([-math.inf, *ordered], [*ordered, math.inf]))


def _finite(bounds: dict[str, float]) -> dict[str, float]:
    return {keyword: value for keyword, value in bounds.items() if abs(value) < math.inf}


def other_texts(texts: list[str]) -> str:
    """Return a pattern of all texts but `texts`."""
    return f"^(?:{_other_endings(sorted(set(texts)))})$"


def _other_endings(texts: list[str]) -> str:
    first: dict[str, list[str]] = {}
    for text in texts:
        if text:
            first.setdefault(text[0], []).append(text[1:])
    others = f"[^{''.join(map(_escaped, first))}]" if first else "(?s:.)"
    branches = [f"{others}(?s:.)*", *(f"{_escaped(char)}(?:{_other_endings(rest)})" for char, rest in first.items())]
    return "|".join(branches if "" in texts else ["", *branches])


def _escaped(char: str) -> str:
    return f"\\u{{{ord(char):x}}}"


def exact_text(texts: Iterable[str]) -> str:
    """Return a pattern of `texts`."""
    return f"^(?:{'|'.join(''.join(map(_escaped, text)) for text in texts)})$"


def identity(value: Json) -> str:
    """Return a text that is equal for equal values of JSON."""
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Json) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return int(value) if isinstance(value, float) and _is_whole(value) else value


def values_of(schema: Schema, resolve: Resolve, seen: tuple[str, ...] = ()) -> list[Any] | None:
    """Return the distinct values of a schema that enumerates a few; else None."""
    if schema is False:
        return []
    if schema is True:
        return None
    keywords = schema.keys()
    found: list[Any] | None = None
    if keywords == {"$ref"} and schema["$ref"] not in seen:
        return values_of(resolve(schema["$ref"]), resolve, (*seen, schema["$ref"]))
    if keywords == {"anyOf"}:
        branches = [values_of(branch, resolve, seen) for branch in schema["anyOf"]]
        found = None if None in branches else [value for branch in branches for value in branch]
    elif keywords and keywords <= {"type", "enum", "const"} and keywords != {"type"}:
        given = schema.get("enum", [schema.get("const")])
        if "const" in schema:
            given = [value for value in given if identity(value) == identity(schema["const"])]
        found = [value for value in given if any(_is(value, kind) for kind in types_of(schema))]
    elif keywords == {"type"} and types_of(schema) <= {"null", "boolean"}:
        found = [value for value in (None, True, False) if any(_is(value, kind) for kind in types_of(schema))]
    elif types_of(schema) == {"integer"} and keywords <= {"type", *_OF_NUMBERS} and "multipleOf" not in keywords:
        found = _integers(schema)
    return None if found is None else list({identity(value): value for value in found}.values())


def _integers(schema: dict[str, Any]) -> list[Any] | None:
    low = max(schema.get("minimum", -math.inf), _next(schema.get("exclusiveMinimum", -math.inf), math.floor, 1))
    high = min(schema.get("maximum", math.inf), _next(schema.get("exclusiveMaximum", math.inf), math.ceil, -1))
    if abs(low) == math.inf or abs(high) == math.inf or high - low > MAX_RANGE:
        return None
    return list(range(math.ceil(low), math.floor(high) + 1))


def _next(bound: float, rounded: Callable[[float], int], step: int) -> float:
    return bound if abs(bound) == math.inf else rounded(bound) + step


def disjoint(a: Schema, b: Schema, resolve: Resolve, seen: frozenset[str] = frozenset()) -> bool:
    """Return whether no value is valid for both, judging by types, constants and properties."""
    for one, other in ((a, b), (b, a)):
        if one is False:
            return True
        if one is True:
            continue
        reference = one.get("$ref")
        if reference not in (None, *seen) and disjoint(resolve(reference), other, resolve, seen | {reference}):
            return True
        if any(disjoint(part, other, resolve, seen) for part in one.get("allOf", ())):
            return True
        if "anyOf" in one and all(disjoint(branch, other, resolve, seen) for branch in one["anyOf"]):
            return True
    if a is True or b is True:
        return False
    return _disjoint_values(a, b) or _disjoint_types(a, b) or _disjoint_properties(a, b, resolve, seen)


def _disjoint_values(a: dict[str, Any], b: dict[str, Any]) -> bool:
    for one, other in ((a, b), (b, a)):
        given = one.get("enum", [one["const"]] if "const" in one else None)
        if given is not None and not any(may_be(value, other) for value in given):
            return True
    return False


def may_be(value: Json, schema: dict[str, Any]) -> bool:
    """Return whether a value has one of the types of `schema` and is one of its constants."""
    if not any(_is(value, kind) for kind in types_of(schema)):
        return False
    given = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return given is None or identity(value) in map(identity, given)


def _disjoint_types(a: dict[str, Any], b: dict[str, Any]) -> bool:
    def wide(schema: dict[str, Any]) -> set[str]:
        return {"number" if kind == "integer" else kind for kind in types_of(schema)}

    common = wide(a) & wide(b)
    return not common or (common == {"number"} and (_upper(a) < _lower(b) or _upper(b) < _lower(a)))


def _lower(schema: dict[str, Any]) -> float:
    return max(schema.get("minimum", -math.inf), schema.get("exclusiveMinimum", -math.inf))


def _upper(schema: dict[str, Any]) -> float:
    return min(schema.get("maximum", math.inf), schema.get("exclusiveMaximum", math.inf))


def _disjoint_properties(a: dict[str, Any], b: dict[str, Any], resolve: Resolve, seen: frozenset[str]) -> bool:
    if types_of(a) & types_of(b) != {"object"}:
        return False
    return any(
        disjoint(_property(a, name), _property(b, name), resolve, seen)
        for name in {*a.get("required", ()), *b.get("required", ())}
    )


def _property(schema: dict[str, Any], name: str) -> Schema:
    if name in schema.get("properties", {}):
        return schema["properties"][name]
    return True if schema.get("patternProperties") else schema.get("additionalProperties", True)
