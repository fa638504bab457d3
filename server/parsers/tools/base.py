"""A tool format: how one family of models writes calls."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from quire.server.parsers.markers import Markers
from quire.server.parsers.reader import Reader, Wait
from quire.server.parsers.recognition import HasToken
from quire.server.values import Json

Format = dict[str, Any]  # a part of a structural tag, in xgrammar's JSON form


@dataclass(frozen=True)
class Tool:
    """A function that the model may call. `parameters` is the JSON Schema of its arguments; with `best_effort`, any
    arguments are accepted if it cannot be enforced.
    """

    name: str
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object"})
    strict: bool = False
    best_effort: bool = False


class ToolFormat(ABC):
    """A tool format. Stateless: one object serves all requests."""

    name: str
    markers: tuple[str, ...] = ()  # special tokens that detokenized text must show
    begins: tuple[str, ...] = ()  # strings that begin calls wherever they are in the content
    first: tuple[str, ...] = ()  # strings that begin calls only as the first text of an answer, or after a call

    covers_reasoning = False  # whether `structure` describes the thoughts, too: then it applies from the first token

    @property
    def strays(self) -> tuple[str, ...]:
        """Return the markers that reach neither content nor thoughts, even where no call can be read."""
        return self.markers

    @cached_property
    def boundaries(self) -> Markers:
        """Return the markers at which the JSON of a call ends, complete or not."""
        return Markers(self.markers)

    @abstractmethod
    def recognize(self, template: str, has_token: HasToken) -> str | None:
        """Return why this chat template's models write calls in this format; None if they do not."""

    @abstractmethod
    def read(self, reader: Reader, begin: str, tools: Sequence[Tool]) -> Wait[None]:
        """Read one call, or one section of calls, from `begin` on, which is next. Raises Malformed."""

    @abstractmethod
    def structure(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> dict[str, Any] | None:
        """Return the structural tag of answers that call `tools`; None if any text will do.

        With `required`, at least one call, and every call's arguments fit the tool's schema. Without, text and calls,
        and the schema is enforced for strict tools. Without `parallel`, at most one call. A named call is `required`
        with one tool.
        """

    def call_id(self, name: str, index: int) -> str | None:
        """Return an id for call `index` of a conversation that the model's template accepts; None if any will do."""
        return None


def needs_structure(tools: Sequence[Tool], required: bool, parallel: bool) -> bool:
    return required or not parallel or any(tool.strict for tool in tools)


def arguments(tool: Tool, required: bool, write: Callable[[dict[str, Any]], Format]) -> Format:
    """Return the arguments of a call; `write` gives the format of an object by its schema. Any object is allowed for
    non-strict tools, if the model calls them by its own choice.
    """
    free = write({"type": "object"})
    if not (required or tool.strict):
        return free
    schema = dict(tool.parameters)
    content = write({**schema, "type": "object"})
    enforced = {"type": "arguments", "schema": schema, "name": tool.name, "content": content}
    return {"type": "best_effort", "elements": [enforced, free], "name": tool.name} if tool.best_effort else enforced


def text(value: str) -> Format:
    return {"type": "const_string", "value": value}


def tag(begin: str, content: Format, end: str) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def json_schema(schema: Json, style: str = "json") -> Format:
    return {"type": "json_schema", "json_schema": schema, "style": style}


def sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def optional_space() -> Format:
    """Return white space that a model may write before its first call, for example after its thoughts."""
    return {"type": "regex", "pattern": r"[ \n]{0,2}"}


def separated(tags: Sequence[Format], separator: str, parallel: bool) -> Format:
    """Return a format of one or more tags only."""
    return {
        "type": "tags_with_separator",
        "tags": list(tags),
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }


def among_text(trigger: str, tags: Sequence[Format], parallel: bool) -> Format:
    """Return the format of any text in which `trigger` can only begin one of the tags."""
    return {"type": "triggered_tags", "triggers": [trigger], "tags": list(tags), "stop_after_first": not parallel}


def structural_tag(content: Format) -> dict[str, Any]:
    return {"type": "structural_tag", "format": content}


def marked_calls(
    tags: Sequence[Format], trigger: str, *, separator: str, required: bool, parallel: bool
) -> dict[str, Any]:
    """Return the structural tag of a format in which every call is a tag that begins with `trigger`."""
    if required:
        return structural_tag(sequence(optional_space(), separated(tags, separator, parallel)))
    return structural_tag(among_text(trigger, tags, parallel))


def read_section(reader: Reader, section: str, call: str, end: str, read: Callable[[Reader], Wait[None]]) -> Wait[None]:
    """Read calls, which begin with `call`, between `section` and `end`."""
    yield from reader.expect(section)
    while True:
        yield from reader.skip_space()
        yield from read(reader)
        yield from reader.skip_space()
        if not (yield from reader.starts_with(call)):
            break
        reader.hold()
    yield from reader.close(end)


def section_of_calls(
    tags: Sequence[Format],
    trigger: str,
    opening: str,
    closing: str,
    *,
    separator: str = "",
    required: bool,
    parallel: bool,
) -> dict[str, Any]:
    """Return the structural tag of a format that writes all calls of an answer into one section."""
    section = tag(opening, separated(tags, separator, parallel), closing)
    if required:
        return structural_tag(sequence(optional_space(), section))
    return structural_tag(among_text(trigger, [section], parallel))


def first_calls(calls: Format, forbidden: str, excludes: Sequence[str], *, required: bool) -> dict[str, Any]:
    """Return the structural tag of a format whose calls begin the answer without a marker: other text may not begin
    with white space or one of the characters `forbidden`, and has none of `excludes`.
    """
    if required:
        return structural_tag(sequence(optional_space(), calls))
    begin = {"type": "regex", "pattern": rf"[^\s{re.escape(forbidden)}]"}
    content = sequence(begin, {"type": "any_text", "excludes": list(excludes)})
    return structural_tag({"type": "or", "elements": [calls, content]})


def json_calls(
    tools: Sequence[Tool], required: bool, *, key: str = "arguments", opening: str = "", closing: str = ""
) -> list[Format]:
    """Return a tag `opening {"name": ..., "arguments": {...}} closing` for every tool."""
    return [
        tag(
            f'{opening}{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{key}": ',
            arguments(tool, required, json_schema),
            "}" + closing,
        )
        for tool in tools
    ]
