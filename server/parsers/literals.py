"""Turns literals that are nearly JSON (Python's, Gemma's) into JSON text, as they arrive."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from quire.server.parsers.markers import Markers
from quire.server.parsers.model_json import atom, escaped, json_string
from quire.server.parsers.reader import Cut, Malformed, Reader, Wait

Emit = Callable[[str], None]

_ATOM = re.compile(r"[\w.+\-]+")
_BARE_KEY = re.compile(r"[^\s:{}\[\],\"'<]+")
_OPENING = re.compile(r"[rRbBuUfF]{0,2}(?:\"\"\"|'''|\"|')")
_PLAIN = {quote: re.compile(rf"[^\\{quote}]+") for quote in "\"'"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": ""}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_CLOSERS = {"[": "]", "(": ")", "{": "}"}


@dataclass(frozen=True)
class Style:
    """Python's literals, plus unquoted keys and, with `quote`, strings between two of those markers. `ends` are markers
    that end a string without its own end.
    """

    quote: str = ""
    bare_keys: bool = False
    ends: tuple[str, ...] = ()
    quotes: Markers = field(init=False, repr=False, compare=False)
    next_quote: re.Pattern = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "quotes", Markers((self.quote, *self.ends) if self.quote else ()))
        quote = re.escape(self.quote)
        next_quote = rf"{quote}\s*(?:(?P<end>[,:}}\]])|[^\s,:}}\]])"
        object.__setattr__(self, "next_quote", re.compile(next_quote))


PYTHON = Style()


def to_json(text: str, style: Style = PYTHON) -> str | None:
    """Return the JSON text of a literal; None if `text` is none."""
    reader, pieces = Reader(), []
    reader.feed(text + "\n")  # a number or word is known to be complete only when more text follows
    reader.ended = True
    try:
        for _ in value(reader, pieces.append, style):
            raise AssertionError("waits after the end of the text")
    except Malformed:
        return None
    return "".join(pieces) if not text[reader.position :].strip() else None


def value(reader: Reader, emit: Emit, style: Style = PYTHON) -> Wait[None]:
    """Hand the JSON text of the literal that comes next to `emit`. Raises Malformed."""
    closers: list[str] = []
    while True:
        yield from reader.skip_space()
        opener = yield from reader.peek()
        if opener and opener in _CLOSERS:
            reader.take(1)
            closers.append(_CLOSERS[opener])
            emit("{" if opener == "{" else "[")
            if not (yield from _closes(reader, emit, closers)):
                yield from _key(reader, emit, style, closers)
                continue
        else:
            yield from _scalar(reader, emit, style)
        while closers:
            yield from reader.skip_space()
            if (yield from reader.accept(",")):
                if not (yield from _closes(reader, emit, closers)):
                    emit(", ")
                    yield from _key(reader, emit, style, closers)
                    break
            elif not (yield from _closes(reader, emit, closers)):
                raise Malformed if (yield from reader.peek()) else Cut
        else:
            return


def _closes(reader: Reader, emit: Emit, closers: list[str]) -> Wait[bool]:
    """Read a closing bracket if it is next. It also closes nested brackets left open."""
    yield from reader.skip_space()
    bracket = yield from reader.peek()
    if bracket not in _CLOSERS.values() or (bracket != closers[-1] and bracket not in closers):
        return False
    reader.take(1)
    while True:
        closer = closers.pop()
        emit("}" if closer == "}" else "]")
        if closer == bracket:
            return True


def _key(reader: Reader, emit: Emit, style: Style, closers: list[str]) -> Wait[None]:
    """Read the key and the colon before a value in an object."""
    if closers[-1] != "}":
        return
    yield from reader.skip_space()
    character = yield from reader.peek()
    if style.bare_keys and _BARE_KEY.match(character):
        emit(json_string((yield from reader.match(_BARE_KEY)).group()))
    else:
        pieces: list[str] = []
        yield from _scalar(reader, pieces.append, style)
        key = "".join(pieces)
        emit(key if key.startswith('"') else json_string(key))
    yield from reader.skip_space()
    yield from reader.expect(":")
    emit(": ")


def _scalar(reader: Reader, emit: Emit, style: Style) -> Wait[None]:
    if style.quote and (yield from reader.accept(style.quote)):
        yield from _quoted(reader, emit, style)
        return
    opening = yield from _opening(reader)
    if opening:
        reader.take(len(opening))
        yield from _string(reader, emit, opening.lstrip("rRbBuUfF"), raw="r" in opening.lower())
    else:
        emit(atom((yield from reader.match(_ATOM)).group()))


def _opening(reader: Reader) -> Wait[str]:
    """Read the prefix and quotes of the string that comes next; "" if none does. Two quotes are an empty string unless
    a third follows.
    """
    for num_chars in range(1, 6):
        if not (yield from reader.at_least(num_chars)):
            raise Cut
        ahead = reader.text[reader.position : reader.position + num_chars]
        found = _OPENING.match(ahead)
        if found is None and ahead.strip("rRbBuUfF"):
            return ""
        if found is not None:
            quotes = found.group().lstrip("rRbBuUfF")
            following = ahead[found.end() :]
            if len(quotes) == 3 or len(following) == 2 or following not in ("", quotes):
                return found.group()
    return ""


def _string(reader: Reader, emit: Emit, quotes: str, raw: bool) -> Wait[None]:
    """Yield a Python string from after its opening quotes to after its closing ones."""
    plain = _PLAIN[quotes[0]]
    emit('"')
    while True:
        found = plain.match(reader.text, reader.position)
        if found:
            emit(escaped(reader.take(found.end() - reader.position)))
        character = yield from reader.peek()
        if not character:
            raise Cut
        if character == "\\":
            text = yield from _escape(reader)
            emit(escaped(text if raw else _unescaped(text)))
        elif character == quotes[0]:
            if (yield from reader.accept(quotes)):
                emit('"')
                return
            if reader.ends_within(quotes):
                raise Cut
            emit(escaped(reader.take(1)))


def _escape(reader: Reader) -> Wait[str]:
    if not (yield from reader.at_least(2)):
        raise Cut
    length = 2 + _HEX_DIGITS.get(reader.text[reader.position + 1], 0)
    if not (yield from reader.at_least(length)):
        raise Cut
    return reader.take(length)


def _unescaped(text: str) -> str:
    """Return the character of an escape sequence; other sequences are kept."""
    kind = text[1]
    if kind in _HEX_DIGITS:
        try:
            return chr(int(text[2:], 16))
        except (ValueError, OverflowError):
            return text
    return _ESCAPES.get(kind, kind if kind in "\\'\"/" else text)


def _quoted(reader: Reader, emit: Emit, style: Style) -> Wait[None]:
    """Yield a string between two markers, without escapes."""
    emit('"')
    while (marker := (yield from reader.value_until(style.quotes, lambda text: emit(escaped(text))))) != style.quote:
        if not (yield from reader.quoted(len(marker), style.next_quote)):
            raise Malformed
        emit(escaped(reader.take(len(marker))))
    reader.take(len(marker))
    emit('"')
