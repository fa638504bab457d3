"""Additions of a name to the files of its model: system prompt, parameters, adapters, first messages. They come from
`quire create` (`aliases.py` keeps them) or from the layers of a model in Ollama's store.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class Entry:
    """`base` is a name or path that commands take; `parameters` have Ollama's names, `stop` as a list."""

    base: str
    system: str = ""
    template: str = ""  # in Jinja, or in Ollama's language, which is only shown
    parameters: dict[str, Any] = field(default_factory=dict)
    adapters: tuple[str, ...] = ()  # paths, or ids of the Hub
    messages: tuple[dict[str, str], ...] = ()  # role and content
    licenses: tuple[str, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Return whether the entry is only another name of its base."""
        return self == Entry(self.base)

    @property
    def is_jinja(self) -> bool:
        return "{%" in self.template

    def over(self, below: Entry) -> Entry:
        """Return the entry with missing values from `below`, on the base of `below`."""
        given = {one.name: getattr(self, one.name) or getattr(below, one.name) for one in fields(Entry)}
        return Entry(**given | {"base": below.base, "parameters": below.parameters | self.parameters})


def from_json(found: object) -> Entry | None:
    """Return the entry of a value of aliases.json, None if the value is invalid."""
    if isinstance(found, str):
        return Entry(found)
    types = {"base": str, "system": str, "template": str, "parameters": dict}
    lists = {"adapters": str, "messages": dict, "licenses": str}
    if not isinstance(found, dict) or "base" not in found or found.keys() - types.keys() - lists.keys():
        return None
    if not all(isinstance(found[key], cls) for key, cls in types.items() if key in found):
        return None
    for key, cls in lists.items():
        if not isinstance(found.get(key, []), list) or not all(isinstance(one, cls) for one in found.get(key, [])):
            return None
    return Entry(**found | {key: tuple(found.get(key, ())) for key in lists})


def to_json(entry: Entry) -> str | dict[str, Any]:
    """Return the value for aliases.json: the base alone if there are no other values."""
    if entry.is_plain:
        return entry.base
    found = {one.name: getattr(entry, one.name) for one in fields(Entry)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items() if value}
