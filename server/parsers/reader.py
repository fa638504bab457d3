"""Reads a model's text as it arrives. The formats are written as generators over a `Reader`: they read like the grammar
of the format, and every `yield` waits for more text.

    ....text already read....|position          |len(text)
                             |<- not read yet ->|

Text that was read is dropped with the next piece, so the cost is linear in the length as long as a generator leaves
only a bounded piece unread (`NAME_LIMIT`, `SPACE_LIMIT`, a marker's length).
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Generator
from typing import TypeVar

from quire.server.parsers.events import Content, Event, Reasoning, ToolCallArguments, ToolCallBegin
from quire.server.parsers.markers import CodeSpans, Markers

T = TypeVar("T")
Wait = Generator[None, None, T]  # a generator that yields while it waits for text, and returns T

NAME_LIMIT = 256  # characters of a function's name, a key or a message header
SPACE_LIMIT = 64  # characters of white space around a marker that belong to the marker
SPACE = " \t\r\n"
_SPACES = re.compile(f"[{SPACE}]*")


class Malformed(Exception):
    """The text is not a call after all. Caught in `Reader.attempt`."""


class Reader:
    """The text of one choice, the place in it, and the events so far."""

    def __init__(self) -> None:
        self.text = ""
        self.position = 0
        self.ended = False
        self.num_calls = 0
        self.code = CodeSpans()
        self._events: list[Event] = []
        self._held: list[str] | None = None

    def feed(self, text: str) -> None:
        self.text = self.text[self.position :] + text
        self.position = 0

    def take_events(self) -> list[Event]:
        """The events since the last call, neighbours of one kind as one event."""
        events, self._events = self._events, []
        if len(events) <= 1:
            return events
        merged = []
        for _, group in itertools.groupby(events, _kind):
            first, *others = group
            if others:
                first = dataclasses.replace(first, text="".join([first.text, *(event.text for event in others)]))
            merged.append(first)
        return merged

    # ---- events

    def content(self, text: str) -> None:
        if text:
            self.code.push(text)
            self._events.append(Content(text))

    def reasoning(self, text: str) -> None:
        if text:
            self._events.append(Reasoning(text))

    def begin_call(self, name: str, call_id: str | None = None) -> None:
        """The text held so far was the call's header."""
        self._held = None
        self._events.append(ToolCallBegin(self.num_calls, name, call_id))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """More arguments of the call that began last."""
        if text:
            self._events.append(ToolCallArguments(self.num_calls - 1, text))

    # ---- reading

    def take(self, num_chars: int) -> str:
        end = self.position + num_chars
        taken = self.text[self.position : end]
        self.position = end
        if self._held is not None:
            self._held.append(taken)
        return taken

    def wait(self) -> Wait[bool]:
        """Wait for more text. False if the text has ended."""
        if self.ended:
            return False
        yield
        return True

    def at_least(self, num_chars: int) -> Wait[bool]:
        """Wait for `num_chars` unread characters. False if the text ends before."""
        while len(self.text) - self.position < num_chars:
            if not (yield from self.wait()):
                return False
        return True

    def sees(self, string: str) -> Wait[bool]:
        """Whether the unread text begins with `string`. Waits only as long as it may."""
        while True:
            rest = self.text[self.position : self.position + len(string)]
            if len(rest) == len(string) or not string.startswith(rest):
                return rest == string
            if not (yield from self.wait()):
                return False

    def accept(self, string: str) -> Wait[bool]:
        """Read `string` if it is next."""
        if (yield from self.sees(string)):
            self.take(len(string))
            return True
        return False

    def expect(self, string: str) -> Wait[None]:
        if not (yield from self.accept(string)):
            raise Malformed

    def peek(self) -> Wait[str]:
        """The next character, "" at the end of the text."""
        yield from self.at_least(1)
        return self.text[self.position : self.position + 1]

    def skip_space(self) -> Wait[None]:
        """Read white space."""
        while (yield from self.at_least(1)):
            self.take(_SPACES.match(self.text, self.position).end() - self.position)
            if self.position < len(self.text):
                return

    def match(self, pattern: re.Pattern) -> Wait[re.Match]:
        """Read a match of `pattern`, which must match within NAME_LIMIT characters and be followed by another character
        or the end of the text. Raises Malformed.
        """
        while True:
            rest = self.text[self.position : self.position + NAME_LIMIT + 1]
            found = pattern.match(rest)
            if found is not None and (found.end() < len(rest) or self.ended):
                self.take(found.end())
                return found
            if len(rest) > NAME_LIMIT or not (yield from self.wait()):
                raise Malformed

    def name(self, end: str) -> Wait[str]:
        """Read up to and with `end`; the text before it, without white space around. It is one line of at most
        NAME_LIMIT characters. Raises Malformed.
        """
        while True:
            rest = self.text[self.position : self.position + NAME_LIMIT + len(end)]
            before, found, _ = rest.partition(end)
            if not found:  # `end` may have begun
                before = next((rest[:-n] for n in range(len(end) - 1, 0, -1) if rest.endswith(end[:n])), rest)
            if "\n" in before.lstrip(SPACE):
                raise Malformed
            if found:
                self.take(len(before) + len(end))
                return before.strip(SPACE)
            if len(rest) == NAME_LIMIT + len(end) or not (yield from self.wait()):
                raise Malformed

    def text_until(self, markers: Markers, emit, strip: bool = True) -> Wait[str | None]:
        """Hand text to `emit` until a marker is next, and return the marker, unread; None if the text ended.

        Only what may be the beginning of a marker is kept back. With `strip`, up to SPACE_LIMIT characters of white
        space before the marker are left unread, too.
        """
        while True:
            start, marker = markers.find(self.text, self.position)
            if marker is None and not self.ended:
                start -= markers.num_partial(self.text, self.position)
            end = start - self._num_spaces(start) if strip and (marker is not None or not self.ended) else start
            emit(self.take(end - self.position))
            if marker is not None:
                return marker
            if not (yield from self.wait()):
                emit(self.take(len(self.text) - self.position))
                return None

    def _num_spaces(self, end: int) -> int:
        """Number of unread white space characters just before `end`, at most SPACE_LIMIT."""
        tail = self.text[max(self.position, end - SPACE_LIMIT) : end]
        return len(tail) - len(tail.rstrip(SPACE))

    # ---- trying to read a call

    def hold(self) -> None:
        """Remember the text read from now on, until a call begins."""
        self._held = []

    def attempt(self, reading: Wait[None], emit=None) -> Wait[bool]:
        """Run `reading`. If it finds no call, the text that it read since the last call becomes content (or goes to
        `emit`), and the answer is False. Text that was held and is no error is dropped: it was the calls' syntax.
        """
        self.hold()
        try:
            yield from reading
        except Malformed:
            held, self._held = self._held, None
            (emit or self.content)("".join(held or ()))
            return False
        self._held = None
        return True


def _kind(event: Event) -> tuple:
    """Equal for events whose texts can be joined."""
    name = event.name if isinstance(event, ToolCallBegin) else None
    return type(event), getattr(event, "index", None), name
