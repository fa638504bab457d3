"""JSON Schema (draft 2020-12) -> an equivalent schema in the subset that the grammar compiler takes.

Annotations and unknown keywords are dropped, as the specification asks. A validating keyword that cannot be enforced is
an error, so that every answer that ends by itself is valid. References become `#/$defs/...` of the result.

llguidance refuses a schema for an unknown format, for a count written as 2.0 and for a count beyond 32 bits, and takes
a reference that leads only to itself (`tests/server/structured/test_library.py` has a schema for each difference).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from quire.server.structured.schema.closing import Closing, closed_alternative, described, has_parts, how_parts, own
from quire.server.structured.schema.keywords import MAX_SUBSCHEMAS, VALUES, SchemaError, check
from quire.server.structured.schema.large_numbers import BOUNDS, are_large, without_vacuous
from quire.server.structured.schema.limited_keywords import LIMITED, part_of
from quire.server.structured.schema.schema_algebra import Derived, Inexpressible, Schema, escaped, may_be
from quire.server.values import Json

MAX_COUNT = 2**31 - 1  # for characters, items or properties: no answer has more

MAPS = ("properties", "patternProperties")  # names to schemas
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")  # for schemas
SCHEMAS = ("items", "additionalProperties")
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
ENFORCED = (*VALUES, *MAPS, *LISTS, *SCHEMAS, "$ref")
# the formats that are enforced; others are annotations
FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"},
)
# keywords that validate and cannot be enforced
REFUSED: dict[str, tuple] = {"unevaluatedItems": (True, {}), "$dynamicRef": (), "$recursiveRef": ()}
_COMPLEMENTED = ("not", "if", "contains", "propertyNames")  # closed schemas have no complement
_Place = tuple[str, Closing]  # a decoded JSON pointer, and how its schema is normalized
_APPLICATORS = ("$ref", "anyOf", "oneOf", "allOf", "if", "not", "dependentSchemas", "contains")


def structured_output() -> dict[str, str | list[str]]:
    """Return keyword -> enforced, partly (only where the other keywords can express it), or refused; formats likewise.
    Others are annotations.
    """
    return {
        "library": "llguidance",
        "enforced": sorted({*ENFORCED} - {*LIMITED}),
        "formats": sorted(FORMATS),
        "limited": sorted(LIMITED),
        "refused": sorted(REFUSED),
    }


def normalize(schema: Json, close: bool = False) -> dict[str, Any] | bool:
    """Return the schema in the compiler's subset. `close`: objects that it describes have no other properties, unless
    it says which. Raises SchemaError.
    """
    return _Normalizer(schema).run(Closing.CLOSED if close else Closing.OPEN)


def children(schema: Json) -> Iterator[tuple[str, Any]]:
    """Yield the subschemas of a normalized schema with their paths; `$ref` has none."""
    if isinstance(schema, Derived):
        schema = schema.base
    for keyword, value in schema.items() if isinstance(schema, dict) else ():
        if keyword in MAPS:
            yield from ((f"{keyword}/{escaped(name)}", child) for name, child in value.items())
        elif keyword in LISTS:
            yield from ((f"{keyword}/{i}", child) for i, child in enumerate(value))
        elif keyword in SCHEMAS:
            yield keyword, value


class _Normalizer:
    def __init__(self, root: Json):
        self.root = root
        self.checked: set[int] = set()
        check(root, "#", self.checked)
        self.names: dict[_Place, str] = {}  # -> the name below $defs
        self.pending: list[tuple[_Place, Any]] = []  # places and subschemas whose definitions are not yet made
        self.definitions: dict[str, Schema] = {}
        self.defining: set[str] = set()
        self.num_subschemas = 0
        self.anchors = {f"#{name}": path for name, path in _anchors(root, "#")}

    def run(self, closing: Closing) -> dict[str, Any] | bool:
        result = self._schema(self.root, "#", closing)
        while self.pending:
            self._define(*self.pending.pop())
        self._refuse_endless(result)
        if self.definitions:
            return {"$defs": self.definitions, **result}  # only an object has references
        return result

    def _refuse_endless(self, root: Schema) -> None:
        """Refuse references that lead only to themselves."""
        for path, schema in [("#", root), *((place[0], self.definitions[name]) for place, name in self.names.items())]:
            seen: set[str] = set()
            while isinstance(schema, dict) and (schema.keys() == {"$ref"} or _is_wrapped(schema)):
                if _is_wrapped(schema):
                    schema = schema["allOf"][0]
                    continue
                if schema["$ref"] in seen:
                    raise SchemaError(path, "$ref", "it refers to itself and to nothing else")
                seen.add(schema["$ref"])
                schema = self.definitions[schema["$ref"].removeprefix("#/$defs/")]

    def _define(self, place: _Place, target: Json) -> None:
        name = self.names[place]
        if name not in self.definitions:
            self.defining.add(name)
            self.definitions[name] = self._schema(target, place[0], place[1])
            self.defining.remove(name)

    def _target(self, reference: str) -> Schema:
        """Return the normalized schema that a normalized `$ref` names."""
        name = reference.removeprefix("#/$defs/")
        if name in self.defining:
            raise Inexpressible("it would need the schema that it is part of")
        for place, target in self.pending:
            if self.names[place] == name:
                self._define(place, target)
                break
        return self.definitions[name]

    def _schema(self, schema: Json, path: str, closing: Closing) -> dict[str, Any] | bool:
        self.num_subschemas += 1
        if self.num_subschemas > MAX_SUBSCHEMAS:
            raise SchemaError(path, None, f"the schema has more than {MAX_SUBSCHEMAS} subschemas")
        if isinstance(schema, bool):
            return schema
        if path != "#" and "$id" in schema and any(_references(schema)):
            raise SchemaError(path, "$id", "references within an embedded schema resource are not supported")
        schema = _modern(schema)
        self._refuse(schema, path)
        try:
            return self._whole(schema, path, closing, {})
        except SchemaError as error:
            if closing is Closing.OPEN or (error.path, error.keyword) != (path, "oneOf"):
                raise
            return self._whole(schema, path, closing, {"oneOf": Closing.OPEN})  # as its complement must be

    def _whole(
        self, schema: dict[str, Any], path: str, closing: Closing, of_parts: dict[str, Closing]
    ) -> dict[str, Any] | bool:
        """Return a normalized schema. `of_parts`: the mode of a keyword's subschemas, if not the usual one."""
        usual = how_parts(schema, closing)
        result: dict[str, Any] = {}
        for keyword, value in schema.items():  # in order: properties are generated in the order of the schema
            at, parts = f"{path}/{keyword}", of_parts.get(keyword, usual)
            if keyword in VALUES:
                if keyword in COUNTS:
                    result.update(_count(keyword, int(value), path))
                elif keyword != "format" or value in FORMATS:
                    result[keyword] = value
            elif keyword in MAPS:
                result[keyword] = {
                    name: self._schema(child, f"{at}/{escaped(name)}", closing.for_children)
                    for name, child in value.items()
                }
            elif keyword in LISTS:
                how = closing.for_children if keyword == "prefixItems" else parts
                result[keyword] = [self._schema(child, f"{at}/{i}", how) for i, child in enumerate(value)]
            elif keyword in SCHEMAS:
                result[keyword] = self._schema(value, at, closing.for_children)
            elif keyword == "$ref":
                result[keyword] = f"#/$defs/{self._definition(value, path, parts)}"
        values = result.get("enum", [result["const"]] if "const" in result else None)
        if values is not None and not any(may_be(value, result) for value in values):
            return False
        self._bound(result, path)
        closed = []
        if closing is Closing.CLOSED and (usual is not Closing.CLOSED or Closing.OPEN in of_parts.values()):
            closed = self._close(schema, result)
        parts = [*self._parts(schema, result, path, closing), *closed]
        return False if False in parts else Derived(result, parts) if parts else result

    def _bound(self, result: dict[str, Any], path: str) -> None:
        """Drop the bounds that exclude nothing."""
        given = {name: result.pop(name) for name in BOUNDS if name in result}
        if not given:
            return
        kept = without_vacuous(given)
        if are_large(kept) and "multipleOf" in result:
            raise SchemaError(path, "multipleOf", "it cannot be enforced together with bounds beyond ±2^53")
        result.update(kept)

    def _close(self, schema: dict[str, Any], base: dict[str, Any]) -> list[Schema]:
        """Return the keywords that close the object that `schema` describes; may change `base` instead."""
        if not has_parts(schema):
            known = described([schema], self._place_of)
            if known.closes():
                given = base.get("properties", {})
                base["properties"] = given | {name: True for name in known.unmatched() if name not in given}
                base["additionalProperties"] = False
            return []
        shared = described([own(schema)], self._place_of)
        if "anyOf" in base and "oneOf" not in base and not shared.is_explicit:
            branches = [shared | described([branch], self._place_of) for branch in schema["anyOf"]]
            base["anyOf"] = [closed_alternative(branch, known) for branch, known in zip(base["anyOf"], branches)]
            return []
        known = described([schema], self._place_of)
        return [known.schema()] if known.closes() else []

    def _parts(self, schema: dict[str, Any], base: dict[str, Any], path: str, closing: Closing) -> list[Schema]:
        """Return the constraints of the keywords that `base` lacks; removes replaced ones from `base`."""

        def inner(step: str, child: Json) -> Schema:
            keyword = step.split("/")[0]
            how = Closing.OPEN if keyword in _COMPLEMENTED else how_parts(schema, closing)
            if keyword == "unevaluatedProperties":
                how = closing.for_children
            return self._schema(child, f"{path}/{step}", how)

        parts = []
        for keyword in LIMITED:
            try:
                parts.append(part_of(keyword, schema, base, inner, self._target))
            except Inexpressible as error:
                raise SchemaError(path, keyword, f"this cannot be enforced: {error}") from None
        return [part for part in parts if part is not True]

    def _refuse(self, schema: dict[str, Any], path: str) -> None:
        for keyword, harmless in REFUSED.items():
            if keyword in schema and schema[keyword] not in harmless:
                raise SchemaError(path, keyword, "this keyword cannot be enforced; remove it or express it otherwise")

    def _definition(self, reference: Json, path: str, closing: Closing) -> str:
        """Return the name below $defs of the schema that `reference` names."""
        pointer = self._pointer(reference, path)
        place = pointer, closing
        if place not in self.names:
            self.names[place] = f"d{len(self.names)}"
            self.pending.append((place, self._resolved(pointer, path)))
        return self.names[place]

    def _pointer(self, reference: Json, path: str) -> str:
        reference = self.anchors.get(reference, reference)
        if reference != "#" and not reference.startswith("#/"):
            raise SchemaError(path, "$ref", f"{reference[:100]!r} is not a reference of the form #/path in this schema")
        return unquote(reference)

    def _place_of(self, reference: Json) -> Any:
        """Return the original schema that a reference names; None for a mistake, reported by its keyword."""
        try:
            return self._resolved(self._pointer(reference, "#"), "#")
        except SchemaError:
            return None

    def _resolved(self, pointer: str, path: str) -> Any:
        target = self.root
        for part in pointer.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(target, dict) and key in target:
                target = target[key]
            elif isinstance(target, list) and key.isdigit() and int(key) < len(target):
                target = target[int(key)]
            else:
                raise SchemaError(path, "$ref", f"there is nothing at {pointer[:200]!r}")
        check(target, pointer, self.checked)
        return target


def _count(keyword: str, value: int, path: str) -> dict[str, int]:
    """Return the keyword with its value; empty if it excludes nothing."""
    if value <= MAX_COUNT:
        return {keyword: value}
    if keyword.startswith("min"):
        raise SchemaError(path, keyword, f"must be at most {MAX_COUNT:,}")
    return {}


def _is_wrapped(schema: dict[str, Any]) -> bool:
    return schema.keys() == {"allOf"} and len(schema["allOf"]) == 1


def _modern(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with spellings of older drafts, and a few equivalents, in terms of enforced keywords."""
    changed = dict(schema)
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):  # draft 4
        if isinstance(flag := changed.get(exclusive), bool):
            del changed[exclusive]
            if flag and bound in changed:
                changed[exclusive] = changed.pop(bound)
    if isinstance(changed.get("items"), list):  # draft 7
        changed["prefixItems"] = changed.pop("items")
        if "additionalItems" in changed:
            changed["items"] = changed.pop("additionalItems")
    if not any(keyword in changed for keyword in _APPLICATORS):
        for keyword, equal in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
            if keyword in changed:
                value = changed.pop(keyword)
                changed.setdefault(equal, value)
    if changed.get("prefixItems") == []:
        del changed["prefixItems"]
    if isinstance(dependencies := changed.get("dependencies"), dict):  # draft 7
        del changed["dependencies"]
        for keyword, is_list in (("dependentRequired", True), ("dependentSchemas", False)):
            some = {name: value for name, value in dependencies.items() if isinstance(value, list) == is_list}
            if some:
                changed[keyword] = {**some, **changed.get(keyword, {})}
    return changed


def _anchors(schema: Json, path: str) -> Iterator[tuple[str, str]]:
    """Yield the $anchor of every subschema, with its path."""
    if isinstance(schema, dict):
        if isinstance(schema.get("$anchor"), str):
            yield schema["$anchor"], path
        for name, value in schema.items():
            yield from _anchors(value, f"{path}/{escaped(name)}")
    elif isinstance(schema, list):
        for i, value in enumerate(schema):
            yield from _anchors(value, f"{path}/{i}")


def _references(schema: Json) -> Iterator[str]:
    if isinstance(schema, dict):
        yield from (keyword for keyword in schema if keyword == "$ref")
        for value in schema.values():
            yield from _references(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _references(value)
