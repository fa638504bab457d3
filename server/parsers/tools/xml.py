"""Formats that write every argument between tags, as plain text: strings without quotes, other values as JSON."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from quire.server.parsers.conversion import ArgumentTypes
from quire.server.parsers.markers import Markers
from quire.server.parsers.model_json import escaped, json_string
from quire.server.parsers.reader import Cut, Malformed, Reader, Wait
from quire.server.parsers.tools.base import (
    Format,
    Tool,
    ToolFormat,
    arguments,
    json_schema,
    marked_calls,
    needs_structure,
    section_of_calls,
    tag,
)


class XmlCalls(ToolFormat):
    """A section of calls, which are tags with one tag per argument. Subclasses define the spelling of the tags.

        section[0]  call[0] NAME call[1]  argument[0] KEY argument[1] VALUE argument[2] ...  call[2]  section[1]

    An end tag ends a value only if another tag follows, so that code may contain it.
    """

    style: str  # for xgrammar's json_schema format
    section: tuple[str, str]
    call: tuple[str, str, str]
    argument: tuple[str, str, str]
    one_call_per_section = False
    newlines = False  # one newline at either end of a value belongs to the tags
    layout: tuple[str, str, str, str]  # white space after section[0], after call[1], before call[2], after call[2]

    def __init__(self) -> None:
        opening, _, closing = self.call
        after_argument = tuple(filter(None, (self.argument[0], closing, self.section[1])))
        self._followers = {self.argument[2]: after_argument}
        if closing:  # a call's end tag ends a value whose own end tag is missing
            self._followers[closing] = (self.section[1], opening)
        ends = list(self._followers)
        # tags that cannot occur in a value: its own end tag is missing
        openers = tuple(filter(None, (self.argument[0], opening, self.section[0])))
        if self.newlines:
            ends += ["\n" + end for end in ends]
            openers = tuple("\n" + tag for tag in openers)
        self._openers = (*openers, *(mark for mark in self.markers if mark not in (*ends, *self.section)))
        self._value_ends = Markers([*ends, *self._openers, self.section[1], "\n" + self.section[1]])
        proper = re.escape(self.argument[2]) + r"\s*(?:" + "|".join(map(re.escape, after_argument)) + ")"
        self._next_tag = re.compile(f"(?P<end>{proper})|" + "|".join(map(re.escape, self._openers)))
        self.begins = (self.section[0],)

    @property
    def strays(self) -> tuple[str, ...]:
        tags = (*self.section, self.call[0], self.call[2], self.argument[0], self.argument[2])
        return (*filter(None, tags), *self.markers)

    # ---- reading

    def read(self, reader: Reader, begin: str, tools: Sequence[Tool]) -> Wait[None]:
        types = {tool.name: ArgumentTypes(tool.parameters) for tool in tools}
        yield from reader.accept(self.section[0])
        while True:
            yield from reader.skip_space()
            yield from self._call(reader, types)
            yield from reader.skip_space()
            if not self.call[0] or not (yield from reader.starts_with(self.call[0])):
                break
            reader.hold()
        yield from reader.close(self.section[1])

    def _call(self, reader: Reader, types: dict[str, ArgumentTypes]) -> Wait[None]:
        name = yield from self._name(reader)
        if not name:
            raise Malformed
        reader.begin_call(name)
        yield from self._arguments(reader, types.get(name) or ArgumentTypes({}))

    def _name(self, reader: Reader) -> Wait[str]:
        yield from reader.expect(self.call[0])
        return (yield from reader.name(self.call[1]))

    def _arguments(self, reader: Reader, types: ArgumentTypes) -> Wait[None]:
        separator = "{"
        while True:
            yield from reader.skip_space()
            if not (yield from reader.starts_with(self.argument[0])):
                break
            reader.hold_member()
            key, is_text = yield from self._key(reader, types)
            reader.release()
            reader.arguments(f"{separator}{json_string(key)}: ")
            separator = ", "
            if is_text:
                reader.arguments('"')
                yield from self._value(reader, lambda piece: reader.arguments(escaped(piece)))
                reader.arguments('"')
            else:
                pieces: list[str] = []
                try:
                    yield from self._value(reader, pieces.append)
                except Cut:
                    reader.arguments(types.truncated(key, "".join(pieces)))
                    raise
                reader.arguments(self._converted("".join(pieces), key, types))
        yield from self._end(reader, has_arguments=separator != "{")
        reader.arguments("{}" if separator == "{" else "}")

    def _end(self, reader: Reader, has_arguments: bool) -> Wait[None]:
        """Read the end tag of a call; anything else also ends a call with arguments. Raises Malformed."""
        end = self.call[2] or self.section[1]
        if (yield from reader.accept(end)):
            return
        if reader.ends_within(end, self.argument[0]):
            raise Cut
        if not has_arguments and not (yield from reader.starts_with(self.section[1])):
            raise Cut if reader.ends_within(self.section[1]) else Malformed

    def _key(self, reader: Reader, types: ArgumentTypes) -> Wait[tuple[str, bool]]:
        """Read an argument's tag. Return its name, and whether its value is emitted as it arrives."""
        yield from reader.expect(self.argument[0])
        key = yield from reader.name(self.argument[1])
        return key, types.is_text(key)

    def _converted(self, value: str, key: str, types: ArgumentTypes) -> str:
        return types.convert(key, value)

    def _value(self, reader: Reader, emit: Callable[[str], None]) -> Wait[None]:
        """Emit the text of a value, and read its end tag."""
        if self.newlines:
            yield from reader.accept("\n")
        while True:
            marker = yield from reader.value_until(self._value_ends, emit)
            end = marker.lstrip("\n")
            if marker in self._openers or (end == self.section[1] and not (yield from self._continues(reader, marker))):
                reader.take(len(marker) - len(end))
                return
            if end != self.section[1] and (yield from reader.follows(len(marker), self._followers[end])):
                reader.take(len(marker) if end == self.argument[2] else len(marker) - len(end))
                return
            emit(reader.take(len(marker)))

    def _continues(self, reader: Reader, marker: str) -> Wait[bool]:
        """Return whether a value continues after `marker`, the end of a section: its own end tag comes before another
        tag.
        """
        return (yield from reader.quoted(len(marker), self._next_tag))

    # ---- enforcing

    def structure(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> dict[str, Any] | None:
        if not needs_structure(tools, required, parallel):
            return None
        calls = [self._call_tag(tool, required) for tool in tools]
        opening, closing = self.section[0] + self.layout[0], self.section[1]
        if not self.one_call_per_section:
            return section_of_calls(calls, self.section[0], opening, closing, required=required, parallel=parallel)
        for call in calls:
            call["begin"], call["end"] = opening + call["begin"], call["end"] + closing
        return marked_calls(calls, self.section[0], separator="\n", required=required, parallel=parallel)

    def _call_tag(self, tool: Tool, required: bool) -> Format:
        opening, name_end, closing = self.call
        return tag(
            f"{opening}{tool.name}{name_end}{self.layout[1]}",
            arguments(tool, required, lambda schema: json_schema(schema, self.style)),
            f"{self.layout[2]}{closing}{self.layout[3]}",
        )
