"""Repairs JSON that a model writes, while it arrives: all arguments leave the parsers through this writer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from quire.server.parsers.model_json import atom, json_string, without_halves

_MAX_DEPTH = 64  # levels of objects and lists, as in requests
_MAX_ATOM = 8192  # characters of a number or word
_SPACES = re.compile(r"[ \t\r\n]+")
_ATOM = re.compile(r"[\w.+\-]+")
_PLAIN = {quote: re.compile(rf"[^{quote}\"\\\x00-\x1f\ud800-\udfff]+") for quote in "\"'"}
# one escape, with the second half of a surrogate pair
_ESCAPE = re.compile(r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)", re.DOTALL)
# text that may continue as another escape
_OPEN_ESCAPE = re.compile(
    r"\\(?:u[0-9a-fA-F]{0,3}|u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?)?"
)
_CLOSERS = {"{": "}", "[": "]"}
_NEEDLESS = re.compile(r"[\s}\])]*")


def repaired(text: str, close: bool = False) -> str | None:
    """Return the JSON text of the one value that `text` is, as a model writes JSON (`JsonWriter`) and with closing
    brackets that close nothing; None if it is none. With `close`, brackets that it leaves open are closed.
    """
    try:
        json.loads(text, parse_int=str, parse_constant=_no_constant)
        return text
    except (ValueError, RecursionError):
        pass
    pieces: list[str] = []
    writer = JsonWriter(pieces.append)
    rest = text[writer.push(text) :]
    if close and not rest:
        writer.close()
    needless = _NEEDLESS.fullmatch(rest) if text.lstrip()[:1] in _CLOSERS else not rest.strip()
    return "".join(pieces) if writer.done and needless else None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


class JsonWriter:
    """Takes the text of one value in pieces and hands JSON to `emit`: valid JSON as it is, control characters escaped,
    half surrogate pairs as U+FFFD, quotes and words of Python as JSON's, without trailing commas.

    A key is handed out with the beginning of its value, so that `close` can leave out a member that has none.
    """

    def __init__(self, emit: Callable[[str], None], only_objects: bool = False):
        self._emit = emit
        self._only_objects = only_objects
        self._out: list[str] = []  # for this push
        self._pending: list[str] = []  # brackets, keys and separators before a value
        self._closers: list[str] = []
        self._num_closers = 0  # for the brackets that were handed out
        self._expects = "value"  # "key", "colon" or "next" (a comma or a closing bracket)
        self._after_opening = self._after_comma = False
        self._quote = ""  # of the string being read
        self._is_key = False
        self._rest = ""  # an escape or atom that may continue
        self.emitted = False  # something was handed out
        self.done = False

    @property
    def in_string(self) -> bool:
        return bool(self._quote)

    @property
    def quote(self) -> str:
        return self._quote

    def push(self, text: str) -> int:
        """Return the number of characters that belong to the value: fewer than given if the value is `done`, or if the
        next character cannot be part of it.
        """
        known = len(self._rest)
        text, self._rest = self._rest + text, ""
        position = 0
        while position < len(text) and not self.done:
            step = self._string(text, position) if self._quote else self._token(text, position)
            if not step:
                break
            position += step
        self._flush()
        return max(position - known, 0)

    def close(self, cut: bool = False) -> None:
        """End the value here. With `cut`, a possibly incomplete number or word is left out."""
        if self._rest and not self._quote and not cut:
            self._atom(self._rest)
        self._rest = ""
        if self._quote and not self._is_key:
            self._write('"')
        if not self.done and self.has_output:
            self._pending.clear()
            self._out += reversed(self._closers[: self._num_closers])
        self.done = True
        self._flush()

    @property
    def has_output(self) -> bool:
        return self.emitted or bool(self._out)

    # ---- tokens

    def _token(self, text: str, position: int) -> int:
        """Read the token that begins here, outside of strings; return its length, 0 if it is invalid here."""
        if found := _SPACES.match(text, position):
            if self._closers:
                self._pending.append(found.group())
            return found.end() - position
        character = text[position]
        if self._expects == "colon":
            return self._separator(character == ":", ":", "value")
        if character in "}]":
            return self._closing(character)
        if self._expects == "next":
            return self._separator(character == ",", ",", "key" if self._closers[-1] == "}" else "value")
        if self._only_objects and not self._closers and character != "{":
            return 0
        if character in "\"'":
            self._quote, self._is_key = character, self._expects == "key"
            self._write('"')
            return 1
        if character in _CLOSERS and self._expects == "value" and len(self._closers) < _MAX_DEPTH:
            self._pending.append(character)
            self._closers.append(_CLOSERS[character])
            self._expects = "key" if character == "{" else "value"
            self._after_opening, self._after_comma = True, False
            return 1
        found = _ATOM.match(text, position)
        if not found or found.end() - position > _MAX_ATOM:
            return 0
        if found.end() == len(text):
            self._rest = found.group()
        else:
            self._atom(found.group())
        return found.end() - position

    def _separator(self, fits: bool, character: str, then: str) -> int:
        if not fits:
            return 0
        self._pending.append(character)
        self._expects, self._after_comma = then, character == ","
        return 1

    def _closing(self, character: str) -> int:
        """Write a closing bracket, after those of nested values left open."""
        complete = self._expects == "next" or self._after_opening or self._after_comma
        if character not in self._closers or not complete:
            return 0
        if self._after_comma:
            del self._pending[max(i for i, text in enumerate(self._pending) if text == ",") :]
        self._begin()
        while self._closers:
            closer = self._closers.pop()
            self._out.append(closer)
            if closer == character:
                break
        self._end_of_value()
        return 1

    def _atom(self, text: str) -> None:
        self._is_key = self._expects == "key"
        if self._is_key:
            self._write(json_string(text))
            self._expects = "colon"
            self._after_opening = self._after_comma = False
        else:
            self._write(atom(text))
            self._end_of_value()

    # ---- strings

    def _string(self, text: str, position: int) -> int:
        if found := _PLAIN[self._quote].match(text, position):
            self._write(found.group())
            return found.end() - position
        character = text[position]
        if character == "\\":
            return self._escape(text, position)
        if character == self._quote:
            self._write('"')
            self._quote = ""
            if self._is_key:
                self._expects = "colon"
                self._after_opening = self._after_comma = False
            else:
                self._end_of_value()
        elif character == '"':
            self._write('\\"')
        elif character >= " ":  # half of a surrogate pair
            self._write("\\ufffd")
        else:
            self._write(json.dumps(character)[1:-1])
        return 1

    def _escape(self, text: str, position: int) -> int:
        if _OPEN_ESCAPE.fullmatch(text, position):
            self._rest = text[position:]
            return len(self._rest)
        escape = _ESCAPE.match(text, position).group()
        kind = escape[1]
        if kind in '"\\/bfnrt' or len(escape) > 2:
            self._write(without_halves(escape))
        elif kind == "'":
            self._write("'")
        elif kind < " ":
            self._write(json.dumps(kind)[1:-1])
        else:
            self._write("\\\\")
            return 1
        return len(escape)

    # ---- output

    def _write(self, text: str) -> None:
        """Write a part of a key, or a part of a value, which releases all pending text."""
        if self._is_key:
            self._pending.append(text)
            return
        self._begin()
        self._out.append(text)

    def _begin(self) -> None:
        if self._pending:
            self._out += self._pending
            self._pending.clear()
        self._num_closers = len(self._closers)
        self._after_opening = self._after_comma = False

    def _end_of_value(self) -> None:
        self._is_key = False
        self._expects = "next"
        self._num_closers = len(self._closers)
        self.done = not self._closers

    def _flush(self) -> None:
        if self._out:
            text = "".join(self._out)
            self._out.clear()
            self.emitted = True
            self._emit(text)
