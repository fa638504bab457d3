"""The structural format of an object's members, for formats whose objects are not JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quire.server.parsers.tools.base import Format, text

Member = Callable[[str, Any], Format]  # name and schema of a property -> its format


def members(schema: Mapping[str, Any], member: Member, separator: str, free: Format) -> Format:
    """Return the members of an object in the order of its properties, required ones first, joined by `separator`;
    `free` if the schema lists none.
    """
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return text("") if schema.get("additionalProperties") is False else free
    names = schema.get("required")
    names = names if isinstance(names, list) else ()
    found = [{"required": name in names, "content": member(name, properties[name])} for name in properties]
    return {"type": "members", "members": sorted(found, key=lambda one: not one["required"]), "separator": separator}
