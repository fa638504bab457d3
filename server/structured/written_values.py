"""Regular expressions for the values of a schema that are written as plain text if they are strings, else as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from llguidance import regex_to_lark

from quire.server.structured.lark import ANY_TEXT, StructureError, quoted
from quire.server.structured.schema.keywords import MAX_DEPTH, SchemaError
from quire.server.structured.schema.limited_keywords import LIMITED
from quire.server.structured.schema.schema import ENFORCED, MAPS, REFUSED, normalize
from quire.server.structured.schema.schema_algebra import Derived, types_of
from quire.server.structured.text_grammar import LARK
from quire.server.values import Json

VALIDATING = frozenset({*ENFORCED, *LIMITED, *REFUSED, LARK})
_NOT_FOR_TEXTS = ("$ref", "anyOf", "oneOf", "allOf")
_GENERAL = {"integer": "number"}
_KEYWORDS = {  # that constrain values of one type only
    "string": ("minLength", "maxLength", "pattern", "format", LARK),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "object": (*MAPS, "additionalProperties", "required", "minProperties", "maxProperties"),
}
_PLAIN = {
    "null": "/null/",
    "boolean": "/true|false/",
    "integer": "/-?(0|[1-9][0-9]*)/",
    "number": r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/",
}
_BEGINNINGS = {
    "object": r"/(?s:[\s(\[{].*)/",
    "array": r"/(?s:[\s(\[{].*)/",
    "integer": r"/(?s:[\s\-0-9].*)/",
    "number": r"/(?s:[\s\-0-9].*)/",
}


def alternatives(schema: Json, root: Json, path: str, depth: int = 0) -> Iterator[Any]:
    """Yield schemas, without annotations, of which a value matches one; texts apart from others where possible.

    `root` has the definitions. Raises StructureError.
    """
    if depth > MAX_DEPTH:
        raise StructureError(f"{path}: the schema is nested more than {MAX_DEPTH} levels deep")
    if not isinstance(schema, dict):
        yield schema
        return
    bare = {key: value for key, value in schema.items() if key in VALIDATING}
    if bare.keys() == {"anyOf"}:
        for branch in bare["anyOf"]:
            yield from alternatives(branch, root, path, depth + 1)
    elif bare.keys() == {"$ref"} and (target := _target(bare["$ref"], root)) is not None:
        yield from alternatives(target, root, path, depth + 1)
    elif (values := constants(bare)) is not None and len({isinstance(value, str) for value in values}) == 2:
        for group in (
            [value for value in values if isinstance(value, str) and "string" in bare.get("type", "string")],
            [value for value in values if not isinstance(value, str)],
        ):
            if group:
                yield {**bare, "enum": group}
    elif values is None and isinstance(types := bare.get("type"), list) and "string" in types:
        for one in types:
            others = {key for kind, keys in _KEYWORDS.items() if kind != _GENERAL.get(one, one) for key in keys}
            yield {**{key: value for key, value in bare.items() if key not in others}, "type": one}
    else:
        yield bare


def constants(schema: dict[str, Any]) -> list[Any] | None:
    """Return the values of `enum` or `const`."""
    return schema.get("enum", [schema["const"]] if "const" in schema else None)


def _target(reference: Json, root: Json) -> Any:
    """Return the definition that a reference names; None if it names something else."""
    match reference.split("/"):
        case ["#", "$defs" | "definitions" as where, name]:
            return root.get(where, {}).get(name)
    return None


def is_text(schema: Json) -> bool:
    """Return whether all values of one of the `alternatives` are strings."""
    if not isinstance(schema, dict):
        return False
    if (values := constants(schema)) is not None:
        return all(isinstance(value, str) for value in values)
    return schema.get("type") in ("string", ["string"])


def may_be_text(schema: Json) -> bool:
    """Return whether an alternative that is no text may also have strings as values, judging by `type`."""
    return isinstance(schema, dict) and constants(schema) is None and "string" in types_of(schema)


def plain_terminal(schema: Json) -> str | None:
    """Return the body of a terminal for a non-text schema's values; None if there is no simple one."""
    if not isinstance(schema, dict):
        return None
    if schema.keys() == {"type"}:
        return _PLAIN.get(schema["type"]) if isinstance(schema["type"], str) else None
    values = constants(schema)
    if values is None or not schema.keys() <= {"type", "enum", "const"}:
        return None
    return (
        None
        if any(isinstance(value, list | dict) for value in values)
        else " | ".join(quoted(json.dumps(value)) for value in values)
    )


def beginning(schema: Json, path: str) -> str:
    """Return the terminal of the texts that the parsers would read as values of a non-text schema.

    Raises StructureError if they cannot be determined.
    """
    kind = schema.get("type") if isinstance(schema, dict) else None
    if isinstance(kind, str) and kind in _BEGINNINGS:
        return _BEGINNINGS[kind]
    raise StructureError(f"{path}: without one type, it cannot be told from a string in this model's format of calls")


def terminal_of_texts(schema: dict[str, Any], path: str) -> str:
    """Return the body of a terminal for the strings of a schema. Raises StructureError."""
    try:
        normal = normalize(schema)
    except SchemaError as error:
        raise StructureError(f"{path} {error}") from None
    if normal is False:
        raise StructureError(f"{path} at #: no value is valid")
    given = schema.keys() & LIMITED.keys() if isinstance(normal, Derived) else ()
    for keyword in (*given, *_NOT_FOR_TEXTS):
        if keyword in given or keyword in normal:
            raise StructureError(f"{path} at #: {keyword}: a string cannot have it in this model's format of calls")
    parts = []
    if (values := constants(normal)) is not None:
        parts.append(" | ".join(map(quoted, values)))
    if "pattern" in normal:
        parts.append(f"/{regex_to_lark(whole_pattern(normal['pattern']), 'd') or '(?:)'}/")
    if "minLength" in normal or "maxLength" in normal:
        parts.append(f"/(?s:.){{{normal.get('minLength', 0)},{normal.get('maxLength', '')}}}/")
    return " & ".join(f"({part})" for part in parts) or ANY_TEXT


def whole_pattern(pattern: str) -> str:
    """Return the pattern of whole texts in which `pattern`, which JSON Schema does not anchor, is found."""
    return "|".join(_unanchored(branch) for branch in _branches(pattern))


def _unanchored(branch: str) -> str:
    begin = "" if branch.startswith("^") else "(?s:.*)"
    branch = branch.removeprefix("^")
    num_backslashes = len(branch[:-1]) - len(branch[:-1].rstrip("\\"))
    if branch.endswith("$") and num_backslashes % 2 == 0:
        return f"{begin}(?:{branch[:-1]})"
    return f"{begin}(?:{branch})(?s:.*)"


def _branches(pattern: str) -> list[str]:
    """Return the alternatives of a pattern that are not in a group."""
    branches, begin, depth, in_set, escaped = [], 0, 0, False, False
    for i, char in enumerate(pattern):
        if escaped or char == "\\":
            escaped = not escaped
        elif in_set:
            in_set = char != "]" or pattern[i - 1] == "["
        elif char == "[":
            in_set = True
        elif char in "()":
            depth += 1 if char == "(" else -1
        elif char == "|" and depth == 0:
            branches.append(pattern[begin:i])
            begin = i + 1
    return [*branches, pattern[begin:]]
