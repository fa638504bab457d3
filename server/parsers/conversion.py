"""Converts a model's plain text to a JSON value, by the schema of the argument."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from quire.server.parsers.json_writer import repaired
from quire.server.parsers.literals import to_json
from quire.server.parsers.model_json import NUMBER, WORDS, json_string
from quire.server.values import Json

_QUOTE = re.compile("[\"']")
_MAX_DEPTH = 16  # nested references and alternatives in a schema
_NAMES = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
    list: "array",
    dict: "object",
}


class ArgumentTypes:
    """The JSON types of a function's arguments, from the JSON Schema of its parameters."""

    def __init__(self, parameters: Mapping[str, Any]):
        self._root = parameters
        properties = parameters.get("properties")
        self._properties: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}

    @property
    def names(self) -> list[str]:
        return list(self._properties)

    def types(self, name: str) -> frozenset[str]:
        """Return the types that the schema allows; empty if it allows any or names none."""
        return self._types(self._properties.get(name), _MAX_DEPTH)

    def is_text(self, name: str) -> bool:
        """Return whether the argument is always a string, so that its text can be handed out as it arrives."""
        return self.types(name) == {"string"}

    def _types(self, schema: Json, depth: int) -> frozenset[str]:
        if not isinstance(schema, Mapping) or not depth:
            return frozenset()
        if isinstance(reference := schema.get("$ref"), str):
            return self._types(self._resolve(reference), depth - 1)
        if "type" in schema:
            declared = schema["type"]
            return frozenset([declared] if isinstance(declared, str) else filter(_is_text, declared))
        if isinstance(values := schema.get("enum", [schema["const"]] if "const" in schema else None), list):
            return frozenset(_NAMES[type(value)] for value in values)
        for keyword in ("anyOf", "oneOf"):
            if isinstance(branches := schema.get(keyword), list):
                found = [self._types(branch, depth - 1) for branch in branches]
                return frozenset().union(*found) if all(found) else frozenset()
        if isinstance(parts := schema.get("allOf"), list):
            return next(filter(None, (self._types(part, depth - 1) for part in parts)), frozenset())
        return frozenset(["object"] if "properties" in schema else ["array"] if "items" in schema else [])

    def _resolve(self, reference: str) -> Any:
        """Return the schema at a JSON pointer into the parameters; None if it is not there."""
        place: Json = self._root
        for part in reference.removeprefix("#").split("/")[1:]:
            place = place.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(place, Mapping) else None
        return place if reference.startswith("#") else None

    def convert(self, name: str, text: str) -> str:
        """Return the JSON text of the value that `text` means for this argument: the first allowed type that fits, else
        a string.
        """
        types, stripped = self.types(name), text.strip()
        if types == {"string"} or not stripped:
            return json_string(text)
        candidate = literal(stripped)
        if candidate is None and types and "string" not in types and stripped[0] in "{[":
            candidate = repaired(stripped, close=True)
        if not candidate or (kind := _kind(candidate)) == "string":
            return json_string(text)
        allowed = not types or kind in types or (kind == "number" and "integer" in types and _is_integer(candidate))
        return candidate if allowed or (kind == "integer" and "number" in types) else json_string(text)

    def truncated(self, name: str, text: str) -> str:
        """Return the usable part of a value that was cut off after `text`."""
        stripped, types = text.lstrip(), self.types(name)
        if stripped[:1] in "{[-0123456789":
            return stripped
        if any(word.startswith(stripped.lower()) for word in WORDS):
            return ""
        return json_string(text)[:-1] if "string" in types or not types else ""


def _is_text(value: Json) -> bool:
    return isinstance(value, str)


def literal(text: str) -> str | None:
    """Return the JSON of the value that `text` is in JSON or Python; None if it is plain text. The first quote decides
    which escapes apply.
    """
    if NUMBER.fullmatch(text):
        return text
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    if not text or text[0] not in "{[(\"'":
        return None
    quote = _QUOTE.search(text)
    if quote is None or quote.group() == '"':
        return repaired(text) or to_json(text)
    return to_json(text) or repaired(text)


def _kind(text: str) -> str:
    """Return the type of a JSON text."""
    first = text[0]
    if first in '"{[':
        return {'"': "string", "{": "object", "[": "array"}[first]
    if first in "tf":
        return "boolean"
    if first == "n":
        return "null"
    return "integer" if text.lstrip("-").isdigit() else "number"


def _is_integer(text: str) -> bool:
    return float(text).is_integer()
