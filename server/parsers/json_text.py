"""Reads JSON text as it arrives. `JsonWriter` decides whether text is JSON, and where a value ends."""

from __future__ import annotations

import re

from quire.server.parsers.json_writer import JsonWriter, repaired
from quire.server.parsers.markers import Markers
from quire.server.parsers.model_json import read
from quire.server.parsers.reader import QUOTED_LIMIT, Cut, Malformed, Reader, Wait

_PIECE = 4096
_STRING = re.compile(r""""(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'""")
_WORD = re.compile(r"[A-Za-z_][\w.\-]*")
_KEY = re.compile(f"{_STRING.pattern}|{_WORD.pattern}")
_UNESCAPED = {quote: re.compile(rf"[^{quote}\\]+") for quote in "\"'"}
_CLOSERS = re.compile(r"[}\])]*")
_TO_QUOTE = {quote: re.compile(rf"(?:[^{quote}\\]+|\\.)*", re.DOTALL) for quote in "\"'"}
_NO_MARKERS = Markers(())


def value(reader: Reader, writer: JsonWriter, ends: Markers = _NO_MARKERS) -> Wait[None]:
    """Give `writer` the text of one value as it arrives. One of `ends` ends a value that is not complete, unless it is
    text of a string. Raises Malformed at a character that cannot be there, and at the end of the text.
    """
    while True:
        ahead = reader.text[reader.position : reader.position + _PIECE]
        length, marker = ends.find(ahead, 0)
        if marker is None:
            length -= ends.num_partial(ahead, 0)
        taken = writer.push(ahead[:length])
        reader.take(taken)
        if writer.done:
            return
        if taken < length:
            raise Malformed
        if marker is not None:
            length = (yield from _num_quoted(reader, writer.quote, len(marker))) if writer.in_string else 0
            if not length:
                return
            writer.push(reader.take(length))
        elif not length and not (yield from reader.wait()):
            raise Cut


def _num_quoted(reader: Reader, quote: str, size: int) -> Wait[int]:
    """Return how many characters, from a marker of `size` characters on, are text of the string that it is in: 0 if
    the string does not end as a JSON string does.
    """
    while True:
        ahead = reader.text[reader.position : reader.position + QUOTED_LIMIT]
        end = _TO_QUOTE[quote].match(ahead, size).end()
        after = ahead[end + 1 :].lstrip()
        if after and ahead[end] == quote:
            return end if after[0] in ",:}]" else 0
        if len(ahead) == QUOTED_LIMIT:
            return max(end, size)
        if not (yield from reader.wait()):
            return 0


def arguments(reader: Reader, ends: Markers = _NO_MARKERS) -> Wait[None]:
    """Yield the arguments of the call that began last: an object; in a string, as some models write it; null
    for none.
    """
    yield from _arguments(reader, reader.call_arguments, ends)


def _arguments(reader: Reader, writer: JsonWriter, ends: Markers) -> Wait[None]:
    yield from reader.skip_space()
    if (yield from reader.peek()) in _UNESCAPED:
        yield from _string_value(reader, writer, ends)
    elif not (yield from reader.accept("null")):
        yield from value(reader, writer, ends)


def _push(writer: JsonWriter, text: str) -> int:
    """Return the number of characters up to the first that cannot follow."""
    taken = writer.push(text)
    return taken + len(text[taken:]) - len(text[taken:].lstrip())


def _push_all(writer: JsonWriter, text: str) -> None:
    if _push(writer, text) < len(text):
        raise Malformed


def closers(reader: Reader) -> Wait[None]:
    """Read unmatched closing brackets."""
    while (yield from reader.at_least(1)):
        reader.take(_CLOSERS.match(reader.text, reader.position).end() - reader.position)
        if reader.position < len(reader.text):
            return


def close(reader: Reader, marker: str) -> Wait[None]:
    """Read the end marker of a call, after unmatched closing brackets."""
    yield from reader.skip_space()
    yield from closers(reader)
    yield from reader.skip_space()
    yield from reader.close(marker)


def _short_string(reader: Reader, pattern: re.Pattern) -> Wait[str]:
    """Yield the value of a string of at most NAME_LIMIT characters, a name or a key, which `pattern` matches."""
    text = (yield from reader.match(pattern)).group()
    if text[0] not in _UNESCAPED:
        return text
    try:
        return read(repaired(text) or text)
    except ValueError:
        raise Malformed from None


def _string_value(reader: Reader, writer: JsonWriter, ends: Markers) -> Wait[None]:
    """Hand the value of a string, unescaped, to `writer` as it arrives. One of `ends` ends it as in `value`."""
    quote = reader.take(1)
    while True:
        ahead = reader.text[reader.position : reader.position + _PIECE]
        length, marker = ends.find(ahead, 0)
        if marker is None:
            length -= ends.num_partial(ahead, 0)
        if length and (plain := _UNESCAPED[quote].match(ahead, 0, length)):
            taken = _push(writer, ahead[: plain.end()])
            reader.take(min(taken + 1, plain.end()))  # with the character that cannot follow, however it arrived
            if taken < plain.end():
                raise Malformed
        elif length and ahead[0] == quote:
            reader.take(1)
            return
        elif length:
            _push_all(writer, (yield from _escape(reader)))
        elif marker is not None:
            if not (length := (yield from _num_quoted(reader, quote, len(marker)))):
                return
            _push_all(writer, reader.take(len(marker)))
        elif not (yield from reader.wait()):
            raise Cut


def _escape(reader: Reader) -> Wait[str]:
    """Yield one escape sequence, with the second half of a surrogate pair."""
    text = yield from _one_escape(reader)
    if (
        text.startswith("\\u")
        and text[2:4].lower() in ("d8", "d9", "da", "db")
        and (yield from reader.starts_with("\\u"))
    ):
        text += yield from _one_escape(reader)
    if text == "\\'":
        return "'"
    try:
        return read(f'"{text}"')
    except ValueError:
        return text  # not a JSON escape


def _one_escape(reader: Reader) -> Wait[str]:
    length = 6 if (yield from reader.starts_with("\\u")) else 2
    if not (yield from reader.at_least(length)):
        raise Cut
    return reader.take(length)


def call(reader: Reader, names: frozenset[str] | None = None, ends: Markers = _NO_MARKERS) -> Wait[None]:
    """Read `{"name": ..., "arguments": {...}}`, in either order, and hand out the call. The last brace may be missing.

    With `names`, other names are Malformed: for formats in which only the name distinguishes a call from JSON.
    """
    yield from reader.expect("{")
    parts = _CallParts(reader, names, ends)
    while True:
        yield from reader.skip_space()
        if (yield from reader.accept("}")):
            break
        key = yield from _short_string(reader, _KEY)
        yield from reader.skip_space()
        yield from reader.expect(":")
        yield from reader.skip_space()
        yield from parts.member(key)
        yield from reader.skip_space()
        if not (yield from reader.accept(",")):
            if not (yield from reader.accept("}")) and not (yield from reader.peek()):
                raise Cut
            break
    parts.finish()


def calls(reader: Reader, names: frozenset[str] | None = None, ends: Markers = _NO_MARKERS) -> Wait[None]:
    """Read one call, or an array of calls, as `call` reads them, and closing brackets after it."""
    if not (yield from reader.accept("[")):
        yield from call(reader, names, ends)
    else:
        while True:
            yield from reader.skip_space()
            yield from call(reader, names, ends)
            yield from reader.skip_space()
            if not (yield from reader.accept(",")):
                break
            reader.hold()
            yield from reader.skip_space()
            if (yield from reader.starts_with("]")):
                break
    yield from closers(reader)


class _CallParts:
    """The members of a call's object."""

    def __init__(self, reader: Reader, names: frozenset[str] | None, ends: Markers):
        self._reader = reader
        self._names = names
        self._ends = ends
        self._name: str | None = None
        self._early: list[str] | None = None  # arguments before the name
        self._has_arguments = False

    def member(self, key: str) -> Wait[None]:
        if key == "name" and self._name is None:
            self._name = yield from _short_string(self._reader, _STRING)
            if not self._name or (self._names is not None and self._name not in self._names):
                raise Malformed
        elif key in ("arguments", "parameters") and not self._has_arguments:
            self._has_arguments = True
            if self._name is None:
                early: list[str] = []
                writer = JsonWriter(early.append, only_objects=True)
                yield from _arguments(self._reader, writer, self._ends)
                writer.close()
                self._early = early
            else:
                self._reader.begin_call(self._name)
                yield from arguments(self._reader, self._ends)
        else:
            yield from value(self._reader, JsonWriter(_ignore), self._ends)
        if self._name is not None and self._early is not None:
            self._reader.begin_call(self._name)
            self._reader.arguments("".join(self._early))
            self._early = None

    def finish(self) -> None:
        if self._name is None:
            raise Malformed
        if not self._has_arguments:
            self._reader.begin_call(self._name)


def _ignore(text: str) -> None:
    pass
