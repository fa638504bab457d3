"""Reads a model's text as it arrives. The formats are generators over a `Reader`: they read like the format's grammar,
and every `yield` waits for more text.

    ....text already read....|position          |len(text)
                             |<- not read yet ->|

Text that was read is dropped with the next piece, so the cost is linear in the length as long as a generator leaves
only a bounded piece unread (`NAME_LIMIT`, `SPACE_LIMIT`, a marker's length).
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from quire.server.parsers.events import Content, Event, Reasoning, ToolCallArguments, ToolCallBegin
from quire.server.parsers.json_writer import JsonWriter
from quire.server.parsers.markers import CodeSpans, Markers

T = TypeVar("T")
Wait = Generator[None, None, T]  # a generator that yields while it waits for text, and returns T

NAME_LIMIT = 256  # characters of a function's name, a key or a message header
QUOTED_LIMIT = 4096  # characters after a marker in a value, in which the value's end shows that the marker is its text
SPACE_LIMIT = 64  # characters of white space around a marker that belong to the marker
SPACE = " \t\r\n"
_SPACES = re.compile(f"[{SPACE}]*")


class Malformed(Exception):
    """The text is no call, or not a valid continuation of one. Caught in `Reader.attempt`."""


class Cut(Malformed):
    """The text ended too early."""


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
        self._call: JsonWriter | None = None  # the arguments of the call that is being read
        self._head: tuple[str, str | None] | None = None  # name and id of the call, until its arguments begin
        self.spaces = ""  # white space just before the position
        self._gap = ""  # white space around a block of thoughts or calls, if content follows
        self._has_content = False

    def feed(self, text: str) -> None:
        self.text = self.text[self.position :] + text
        self.position = 0

    def take_events(self) -> list[Event]:
        """Return the events since the last time; adjacent events of one kind are merged."""
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
        self.end_call()
        if text:
            text, self._gap = self._gap + text, ""
            self._has_content = True
            self.code.push(text)
            self._events.append(Content(text))

    def reasoning(self, text: str) -> None:
        self.end_call()
        if text:
            self._events.append(Reasoning(text))

    def gap(self, before: str = "") -> None:
        """Note that a block other than content was read, preceded by the white space `before` and followed by `spaces`;
        one of the two separates the content around the block.
        """
        if self._has_content:
            self._gap = self._gap or before or self.spaces

    def begin_call(self, name: str, call_id: str | None = None) -> None:
        """Begin a call. It is handed out with the beginning of its arguments: until then, the held text may not be a
        call's header.
        """
        self.end_call()
        self._head = name, call_id
        self._call = JsonWriter(self._emit_arguments, only_objects=True)

    def arguments(self, text: str) -> None:
        """Add to the arguments of the call that began last. Raises Malformed if they cannot be JSON."""
        taken = self._call.push(text)
        if text[taken:].strip(SPACE):
            raise Malformed

    @property
    def call_arguments(self) -> JsonWriter:
        return self._call

    def end_call(self) -> None:
        """Complete the call that began last: open brackets are closed, no arguments become an empty object."""
        call, self._call = self._call, None
        if call is not None:
            call.close()
            if not call.emitted:
                self._emit_arguments("{}")

    def _emit_arguments(self, text: str) -> None:
        if self._head is not None:
            name, call_id = self._head
            self._head = None
            self.release()
            self._events.append(ToolCallBegin(self.num_calls, name, call_id))
            self.num_calls += 1
        self._events.append(ToolCallArguments(self.num_calls - 1, text))

    # ---- reading

    def take(self, num_chars: int) -> str:
        end = self.position + num_chars
        taken = self.text[self.position : end]
        self.position = end
        if taken:
            self.spaces = (self.spaces if taken.isspace() else "") + taken[len(taken.rstrip(SPACE)) :]
        if self._held is not None:
            self._held.append(taken)
        return taken

    def wait(self) -> Wait[bool]:
        """Wait for more text. Return False if the text has ended."""
        if self.ended:
            return False
        yield
        return True

    def need(self) -> Wait[None]:
        """Wait for more text. Raises Cut if the text has ended."""
        if not (yield from self.wait()):
            raise Cut

    def at_least(self, num_chars: int) -> Wait[bool]:
        """Wait for `num_chars` unread characters. Return False if the text ends before."""
        while len(self.text) - self.position < num_chars:
            if not (yield from self.wait()):
                return False
        return True

    def starts_with(self, string: str) -> Wait[bool]:
        """Return whether the unread text begins with `string`. Waits only while the answer depends on more text."""
        while True:
            rest = self.text[self.position : self.position + len(string)]
            if len(rest) == len(string) or not string.startswith(rest):
                return rest == string
            if not (yield from self.wait()):
                return False

    def accept(self, string: str) -> Wait[bool]:
        """Read `string` if it is next."""
        if (yield from self.starts_with(string)):
            self.take(len(string))
            return True
        return False

    def expect(self, string: str) -> Wait[None]:
        if not (yield from self.accept(string)):
            raise Cut if self.ends_within(string) else Malformed

    def ends_within(self, *strings: str) -> bool:
        """Return whether the text ends within one of `strings`; call it when none of them was next."""
        rest = self.text[self.position : self.position + max(map(len, strings))]
        return any(string.startswith(rest) for string in strings)

    def close(self, string: str) -> Wait[None]:
        """Read `string` if it is next, or the part of it with which the text ends."""
        if not (yield from self.accept(string)) and self.ends_within(string):
            self.take(len(self.text) - self.position)

    def peek(self) -> Wait[str]:
        """Return the next character, "" at the end of the text."""
        yield from self.at_least(1)
        return self.text[self.position : self.position + 1]

    def skip_space(self) -> Wait[None]:
        """Read white space."""
        while (yield from self.at_least(1)):
            self.take(_SPACES.match(self.text, self.position).end() - self.position)
            if self.position < len(self.text):
                return

    def match(self, pattern: re.Pattern) -> Wait[re.Match]:
        """Read a match of `pattern`, which must match within NAME_LIMIT characters and be followed by another one.
        Raises Malformed.
        """
        while True:
            rest = self.text[self.position : self.position + NAME_LIMIT + 1]
            found = pattern.match(rest)
            if found is not None and found.end() < len(rest):
                self.take(found.end())
                return found
            if len(rest) > NAME_LIMIT:
                raise Malformed
            yield from self.need()

    def name(self, end: str) -> Wait[str]:
        """Read up to and including `end`; return the text before it, stripped. It is one line of at most NAME_LIMIT
        characters. Raises Malformed.
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
            if len(rest) == NAME_LIMIT + len(end):
                raise Malformed
            yield from self.need()

    def text_until(self, markers: Markers, emit: Callable[[str], None], strip: bool = True) -> Wait[str | None]:
        """Hand text to `emit` until a marker is next, and return the marker, unread; None if the text ended.

        Only what may be the beginning of a marker is kept back. With `strip`, up to SPACE_LIMIT characters of white
        space before the marker are left unread, too.
        """
        marker = yield from self._text_before(markers, emit, strip)
        if marker is None:
            emit(self.take(len(self.text) - self.position))
        return marker

    def value_until(self, markers: Markers, emit: Callable[[str], None]) -> Wait[str]:
        """Read as `text_until` does, for a value, which a marker must end. Raises Cut; a partial marker is not part of
        the value.
        """
        marker = yield from self._text_before(markers, emit, strip=False, in_value=True)
        if marker is None:
            raise Cut
        return marker

    def _text_before(
        self, markers: Markers, emit: Callable[[str], None], strip: bool, in_value: bool = False
    ) -> Wait[str | None]:
        while True:
            start, marker = markers.find(self.text, self.position)
            partial = len(self.text) - markers.num_partial(self.text, self.position)
            if marker is None or (partial <= start and (in_value or not self.ended)):  # a longer marker may follow
                start, marker = min(start, partial), None
            emit(self.take(start - (self._num_spaces(start) if strip else 0) - self.position))
            if marker is not None or not (yield from self.wait()):
                return marker

    def _num_spaces(self, end: int) -> int:
        """Return the number of unread white space characters just before `end`, at most SPACE_LIMIT."""
        tail = self.text[max(self.position, end - SPACE_LIMIT) : end]
        return len(tail) - len(tail.rstrip(SPACE))

    # ---- trying to read a call

    def hold(self) -> None:
        """Remember the text read from now on, in case it is no call."""
        self.end_call()
        self._held = []

    def hold_member(self) -> None:
        """Hold a part of the call that is being read."""
        if self._head is None:
            self._held = []

    def release(self) -> None:
        """Discard the text held so far: it was syntax."""
        if self._head is None:
            self._held = None

    def follows(self, offset: int, strings: Sequence[str]) -> Wait[bool]:
        """Return whether one of `strings` follows `offset` characters from here, after at most SPACE_LIMIT characters
        of white space. Raises Cut.
        """
        limit = SPACE_LIMIT + max(map(len, strings))
        while True:
            start = self.position + offset
            ahead = self.text[start : start + limit]
            rest = ahead.lstrip(SPACE)
            if any(rest.startswith(string) for string in strings):
                return True
            if len(ahead) == limit or not any(string.startswith(rest) for string in strings):
                return False
            yield from self.need()

    def quoted(self, size: int, pattern: re.Pattern) -> Wait[bool]:
        """Return whether the marker of `size` characters that is next is text of a continuing value: the first match of
        `pattern` after it has the group `end`, or is far away.
        """
        while True:
            ahead = self.text[self.position + size : self.position + QUOTED_LIMIT]
            if found := pattern.search(ahead):
                return found["end"] is not None
            if len(ahead) == QUOTED_LIMIT - size:
                return True
            if not (yield from self.wait()):
                return False

    def attempt(self, reading: Wait[None]) -> Wait[bool]:
        """Run `reading`; return whether it found a complete call. Otherwise the held text becomes unread again. If the
        text ends within a call, the unread rest counts as syntax and is dropped.
        """
        self.hold()
        try:
            yield from reading
        except Malformed as error:
            cut = isinstance(error, Cut)
            in_call = self._call is not None and self._head is None
            if in_call:
                self._call.close(cut)
            self._call = self._head = None
            held, self._held = self._held, None
            if cut and in_call:
                self.take(len(self.text) - self.position)
            elif held:
                self.text, self.position = "".join(held) + self.text[self.position :], 0
            return False
        self.end_call()
        self._held = None
        return True


def _kind(event: Event) -> tuple:
    """Return a key that is equal for events whose texts can be joined."""
    name = event.name if isinstance(event, ToolCallBegin) else None
    return type(event), getattr(event, "index", None), name
