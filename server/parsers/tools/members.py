"""The structural format of an object's members, in formats whose objects are not JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quire.server.parsers.tools.base import Format, sequence, text
from quire.server.values import Json

Member = Callable[[str, Any], Format]  # name and schema of a property -> its format


def members(schema: Mapping[str, Any], member: Member, separator: str, free: Format) -> Format:
    """Members of an object in the order of its properties, the required ones first, with `separator` between them;
    `free` if the schema does not say which.
    """
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return text("") if schema.get("additionalProperties") is False else free
    names = schema.get("required")
    names = names if isinstance(names, list) else ()
    required = [name for name in properties if name in names]
    optional = [name for name in properties if name not in names]
    formats = {name: member(name, with_definitions(properties[name], schema)) for name in properties}
    if required:
        elements = [formats[required[0]]]
        elements += [sequence(text(separator), formats[name]) for name in required[1:]]
        return sequence(*elements, *_optionally([sequence(text(separator), formats[name]) for name in optional]))
    # the first that is there has no separator before it
    starts = [
        sequence(
            formats[name], *_optionally([sequence(text(separator), formats[later]) for later in optional[place + 1 :]])
        )
        for place, name in enumerate(optional)
    ]
    if not starts:
        return text("")
    return {"type": "optional", "content": {"type": "or", "elements": starts}}


def _optionally(formats: list[Format]) -> list[Format]:
    return [{"type": "optional", "content": one} for one in formats]


def with_definitions(value: Json, schema: Mapping[str, Any]) -> Any:
    """The schema of a property with the definitions that its references may name."""
    if not isinstance(value, Mapping):
        return value
    return {**{key: schema[key] for key in ("$defs", "definitions") if key in schema}, **value}
