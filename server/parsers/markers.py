"""Finds marker strings in text that arrives in pieces, and detects quoted code."""

from __future__ import annotations

import re
from collections.abc import Sequence


class Markers:
    """Finds the first of some strings. Immutable; formats share it."""

    def __init__(self, strings: Sequence[str]):
        self.strings = tuple(strings)
        ordered = sorted(set(strings), key=len, reverse=True)
        self._found = re.compile("|".join(map(re.escape, ordered)) or r"(?!)").search
        self._first = re.compile("[" + re.escape("".join({s[0] for s in ordered})) + "]" if ordered else r"(?!)")
        self._prefixes = frozenset(string[:n] for string in ordered for n in range(1, len(string)))
        self._max_partial = max(map(len, ordered), default=1) - 1

    def find(self, text: str, start: int) -> tuple[int, str | None]:
        """Return the position and string of the first marker from `start` on; the length of the text and None
        without one.
        """
        found = self._found(text, start)
        return (found.start(), found.group()) if found else (len(text), None)

    def num_partial(self, text: str, start: int) -> int:
        """Return the number of characters at the end of the text, which has no marker from `start` on, that may
        begin one.
        """
        for found in self._first.finditer(text, max(start, len(text) - self._max_partial)):
            if text[found.start() :] in self._prefixes:
                return len(text) - found.start()
        return 0


class CodeSpans:
    """A detector of Markdown code blocks and code spans at the end of the text so far, where markers are quoted.

    A block begins with a line of at least three backticks or tildes and ends with such a line of at least that length.
    A span begins and ends with equal numbers of backticks on one line.
    """

    _PIECES = re.compile(r"`+|~+|\n|[^`~\n]+")

    def __init__(self) -> None:
        self._fence = ""  # the fence that opened the block
        self._span = 0  # backticks that opened the span
        self._run = ""  # backticks or tildes just before this place
        self._run_begins_line = False
        self._line_is_blank = True

    def is_inside(self, space: str) -> bool:
        """Return whether a marker that follows the text and then the white space `space` is in code."""
        self._end_run(space[:1])
        return bool(self._fence or (self._span and "\n" not in space))

    def end_line(self) -> None:
        """Let the next text start a new line: a call or a thought was read."""
        self.push("\n")

    def push(self, text: str) -> None:
        for found in self._PIECES.finditer(text):
            piece = found.group()
            if piece[0] in "`~":
                if self._run and self._run[0] != piece[0]:
                    self._end_run(piece)
                if not self._run:
                    self._run_begins_line = self._line_is_blank
                self._run += piece
                self._line_is_blank = False
                continue
            if self._run:
                self._end_run(piece)
            if piece == "\n":
                self._span = 0
                self._line_is_blank = True
            elif self._line_is_blank:
                self._line_is_blank = piece.isspace()

    def _end_run(self, following: str) -> None:
        run, self._run = self._run, ""
        if not run:
            return
        if self._run_begins_line and len(run) >= 3:
            if not self._fence:
                self._fence = run
            elif self._fence[0] == run[0] and len(run) >= len(self._fence) and not following[:1].isalnum():
                self._fence = ""
        elif run[0] == "`" and not self._fence:
            self._span = 0 if self._span == len(run) else self._span or len(run)
