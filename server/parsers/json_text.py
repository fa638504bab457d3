"""Reads JSON text as it arrives, without changing it: arguments are handed out exactly as the model wrote them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from quire.server.parsers.reader import Cut, Malformed, Reader, Wait

Emit = Callable[[str], None]

_STRING_TEXT = re.compile(r'[^"\\]*')
_OUTSIDE = re.compile(r"[\s\w.+\-:,]*", re.ASCII)  # of strings and brackets
_LITERAL = re.compile(r"[\w.+\-]+", re.ASCII)
_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_UNESCAPED = re.compile(r'[^"\\]+')
_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{4}|[^u])")


def value(reader: Reader, emit: Emit) -> Wait[None]:
    """Hand the text of one JSON value to `emit` as it arrives. Raises Malformed at a character that no JSON has there,
    and at the end of the text.
    """
    yield from reader.skip_space()
    first = yield from reader.peek()
    if first == '"':
        yield from _string_text(reader, emit)
    elif first and first in "{[":
        yield from _brackets(reader, emit)
    else:
        emit((yield from reader.match(_LITERAL)).group())


def _brackets(reader: Reader, emit: Emit) -> Wait[None]:
    depth = 0
    while True:
        end = _OUTSIDE.match(reader.text, reader.position).end()
        character = reader.text[end : end + 1]
        if character == '"':
            emit(reader.take(end - reader.position))
            yield from _string_text(reader, emit)
        elif character and character in "{}[]":
            emit(reader.take(end + 1 - reader.position))
            depth += 1 if character in "{[" else -1
            if depth == 0:
                return
        else:
            emit(reader.take(end - reader.position))
            if character:
                raise Malformed
            yield from reader.need()


def _string_text(reader: Reader, emit: Emit) -> Wait[None]:
    """A string with its quotes and escapes as they are."""
    end, escaped = reader.position + 1, False
    while True:
        text = reader.text
        while end < len(text):
            if escaped:
                end, escaped = end + 1, False
                continue
            end = _STRING_TEXT.match(text, end).end()
            if text[end : end + 1] == '"':
                emit(reader.take(end + 1 - reader.position))
                return
            if end < len(text):
                end, escaped = end + 1, True
        emit(reader.take(len(text) - reader.position))
        yield from reader.need()
        end = reader.position


def short_string(reader: Reader) -> Wait[str]:
    """The value of a string of at most NAME_LIMIT characters: a name or a key."""
    text = (yield from reader.match(_STRING)).group()
    try:
        return json.loads(text)
    except ValueError:
        raise Malformed from None


def string_value(reader: Reader, emit: Emit) -> Wait[None]:
    """Hand the value of a string, unescaped, to `emit` as it arrives."""
    yield from reader.expect('"')
    while True:
        plain = _UNESCAPED.match(reader.text, reader.position)
        if plain:
            emit(reader.take(plain.end() - reader.position))
        character = yield from reader.peek()
        if character == '"':
            reader.take(1)
            return
        if character == "\\":
            emit((yield from _escape(reader)))
        elif not character:
            raise Cut


def _escape(reader: Reader) -> Wait[str]:
    """One escape sequence, with the second half of a surrogate pair."""
    text = yield from _one_escape(reader)
    if text.startswith("\\u") and text[2:4].lower() in ("d8", "d9", "da", "db") and (yield from reader.sees("\\u")):
        text += yield from _one_escape(reader)
    try:
        return json.loads(f'"{text}"').encode("utf-8", "replace").decode()
    except ValueError:
        return text  # no escape of JSON's


def _one_escape(reader: Reader) -> Wait[str]:
    length = 6 if (yield from reader.sees("\\u")) else 2
    if not (yield from reader.at_least(length)):
        raise Cut
    return reader.take(length)


def call(reader: Reader, names: frozenset[str] | None = None) -> Wait[None]:
    """Read `{"name": ..., "arguments": {...}}`, in either order, and hand out the call.

    With `names`, other names are Malformed: that is for formats in which nothing else distinguishes a call from JSON.
    """
    yield from reader.expect("{")
    parts = _CallParts(reader, names)
    while True:
        yield from reader.skip_space()
        if (yield from reader.accept("}")):
            break
        key = yield from short_string(reader)
        yield from reader.skip_space()
        yield from reader.expect(":")
        yield from reader.skip_space()
        yield from parts.member(key)
        yield from reader.skip_space()
        if not (yield from reader.accept(",")):
            yield from reader.expect("}")
            break
    parts.finish()


def calls(reader: Reader, names: frozenset[str] | None = None) -> Wait[None]:
    """Read one call, or an array of calls, as `call` reads them."""
    if not (yield from reader.accept("[")):
        yield from call(reader, names)
        return
    while True:
        yield from reader.skip_space()
        yield from call(reader, names)
        yield from reader.skip_space()
        if not (yield from reader.accept(",")):
            break
        reader.hold()
    yield from reader.close("]")


class _CallParts:
    """The members of a call's object."""

    def __init__(self, reader: Reader, names: frozenset[str] | None):
        self._reader = reader
        self._names = names
        self._name: str | None = None
        self._early: list[str] | None = None  # arguments before the name
        self._has_arguments = False

    def member(self, key: str) -> Wait[None]:
        if key == "name" and self._name is None:
            self._name = yield from short_string(self._reader)
            if not self._name or (self._names is not None and self._name not in self._names):
                raise Malformed
        elif key in ("arguments", "parameters") and not self._has_arguments:
            self._has_arguments = True
            if self._name is None:
                self._early = []
                yield from _arguments(self._reader, self._early.append)
            else:
                self._reader.begin_call(self._name)
                yield from _arguments(self._reader, self._reader.arguments)
        else:
            yield from value(self._reader, _ignore)
        if self._name is not None and self._early is not None:
            self._reader.begin_call(self._name)
            self._reader.arguments("".join(self._early))
            self._early = None

    def finish(self) -> None:
        if self._name is None:
            raise Malformed
        if not self._has_arguments:
            self._reader.begin_call(self._name)
            self._reader.arguments("{}")


def _arguments(reader: Reader, emit: Emit) -> Wait[None]:
    """An object; in a string, as some models write it; null for none."""
    if (yield from reader.sees('"')):
        yield from string_value(reader, emit)
    elif (yield from reader.accept("null")):
        emit("{}")
    else:
        yield from value(reader, emit)


def _ignore(text: str) -> None:
    pass
