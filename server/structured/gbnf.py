"""EBNF with `::=` (llama.cpp's GBNF, XGrammar's) -> trees of expressions, one per rule.

A rule ends where the next one begins, so lines may be broken anywhere. llguidance's own parser ends a rule with its
line, and lacks tokens, escapes, `{0}` and nested repetitions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

MAX_DEPTH = 200  # nested parentheses
MAX_CHAR = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)

Ranges = tuple[tuple[int, int], ...]  # sorted, disjoint ranges of characters


class GrammarError(ValueError):
    """A mistake in a grammar; the text names the mistake and its line."""


@dataclass(frozen=True, slots=True)
class Chars:
    """One character."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Seq:
    items: tuple[Node, ...] = ()


@dataclass(frozen=True, slots=True)
class Alt:
    items: tuple[Node, ...]  # empty: matches nothing


@dataclass(frozen=True, slots=True)
class Repeat:
    item: Node
    least: int
    most: int | None  # None: no limit


@dataclass(frozen=True, slots=True)
class Ref:
    name: str


@dataclass(frozen=True, slots=True)
class Token:
    """The token `token_id`, or any token but that one."""

    token_id: int
    negated: bool


Node = Chars | Seq | Alt | Repeat | Ref | Token

_SPACE = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_NAME = re.compile(r"[\w-]+")
_RULE = re.compile(r"([\w-]+)(?:[ \t]|#[^\r\n]*)*(?:\r?\n[ \t]*)?::=")
_COUNT = re.compile(r"\{\s*(\d{1,9})\s*(?:(,)\s*(\d{1,9})?\s*)?\}")
_ID = re.compile(r"<\[(\d{1,9})\]>")
_TOKEN = re.compile(r"<[^>\s]+>")
_HEX = {"x": 2, "u": 4, "U": 8}
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "0": "\0", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "e": "\x1b"}


def parse(text: str, token_of: Callable[[str], int | None]) -> dict[str, Node]:
    """Return the rules by name; `root` is one of them. `token_of` gives the id of a token by its text. Raises
    GrammarError.
    """
    rules = _Parser(text, token_of).rules()
    if "root" not in rules:
        raise GrammarError("there is no rule root")
    for name in (name for body in rules.values() for name in references(body)):
        if name not in rules:
            raise GrammarError(f"rule {name[:100]!r} is not defined")
    return rules


def references(node: Node) -> list[str]:
    """Return the names in a tree."""
    found, pending = [], [node]
    while pending:
        one = pending.pop()
        if isinstance(one, Ref):
            found.append(one.name)
        elif isinstance(one, Seq | Alt):
            pending.extend(one.items)
        elif isinstance(one, Repeat):
            pending.append(one.item)
    return found


def chars(ranges: Iterable[tuple[int, int]], negated: bool = False) -> Chars:
    """Return the ranges without surrogates, which no text contains."""
    given = _merged(ranges)
    if negated:
        return Chars(without([(0, MAX_CHAR)], [*given, _SURROGATES]))
    return Chars(without(given, [_SURROGATES]))


def without(ranges: Iterable[tuple[int, int]], removed: Iterable[tuple[int, int]]) -> Ranges:
    kept = list(ranges)
    for low, high in removed:
        kept = [
            part
            for first, last in kept
            for part in ((first, min(last, low - 1)), (max(first, high + 1), last))
            if part[0] <= part[1]
        ]
    return tuple(kept)


def _merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    result: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if result and low <= result[-1][1] + 1:
            result[-1] = result[-1][0], max(result[-1][1], high)
        else:
            result.append((low, high))
    return tuple(result)


class _Parser:
    def __init__(self, text: str, token_of: Callable[[str], int | None]):
        self.text, self.token_of = text, token_of
        self.at = 0

    def rules(self) -> dict[str, Node]:
        found: dict[str, Node] = {}
        self.skip()
        while self.at < len(self.text):
            match = _RULE.match(self.text, self.at)
            if match is None:
                raise self.error("a rule must begin here: name ::= ...")
            name = match[1]
            if name in found:
                raise self.error(f"rule {name[:100]!r} is defined twice")
            self.at = match.end()
            self.skip()
            found[name] = self.alternatives(0)
        return found

    def error(self, reason: str) -> GrammarError:
        line = self.text.count("\n", 0, self.at) + 1
        near = self.text[self.at : self.at + 20].split("\n")[0]
        return GrammarError(f"at line {line}, {near!r}: {reason}")

    def skip(self) -> None:
        self.at = _SPACE.match(self.text, self.at).end()

    def peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def alternatives(self, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise self.error(f"parentheses are nested more than {MAX_DEPTH} levels deep")
        items = [self.sequence(depth)]
        while self.peek() == "|":
            self.at += 1
            self.skip()
            items.append(self.sequence(depth))
        return items[0] if len(items) == 1 else Alt(tuple(items))

    def sequence(self, depth: int) -> Node:
        items: list[Node] = []
        while (item := self.item(depth)) is not None:
            self.skip()
            while (count := self.count()) is not None:
                item = repeat(item, *count)
                self.skip()
            items.append(item)
        return items[0] if len(items) == 1 else Seq(tuple(items))

    def item(self, depth: int) -> Node | None:
        char = self.peek()
        if char in ("", "|", ")"):
            return None
        if char == '"':
            return self.literal()
        if char == "[":
            return self.char_class()
        if char == "(":
            self.at += 1
            self.skip()
            inner = self.alternatives(depth + 1)
            if self.peek() != ")":
                raise self.error("a closing parenthesis must be here")
            self.at += 1
            return inner
        if char == ".":
            self.at += 1
            return chars((), negated=True)
        if char in "<!":
            return self.token()
        if (match := _NAME.match(self.text, self.at)) is None:
            raise self.error("not part of a rule")
        if _RULE.match(self.text, self.at):
            return None
        self.at = match.end()
        return Ref(match[0])

    def count(self) -> tuple[int, int | None] | None:
        char = self.peek()
        if char in ("*", "+", "?") and char:
            self.at += 1
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[char]
        if char != "{":
            return None
        if (match := _COUNT.match(self.text, self.at)) is None:
            raise self.error("must be {n}, {n,} or {n,m}")
        least = int(match[1])
        most = least if match[2] is None else None if match[3] is None else int(match[3])
        if most is not None and most < least:
            raise self.error("the second count is less than the first")
        self.at = match.end()
        return least, most

    def literal(self) -> Node:
        self.at += 1
        found: list[Node] = []
        while self.peek() != '"':
            code = self.char()
            found.append(chars([(code, code)]))
        self.at += 1
        return found[0] if len(found) == 1 else Seq(tuple(found))

    def char_class(self) -> Node:
        self.at += 1
        negated = self.peek() == "^"
        self.at += negated
        ranges = []
        while self.peek() != "]":
            low = high = self.char()
            if self.peek() == "-" and self.text[self.at + 1 : self.at + 2] not in ("]", ""):
                self.at += 1
                high = self.char()
            if high < low:
                raise self.error("the range before this ends before it begins")
            ranges.append((low, high))
        self.at += 1
        return chars(ranges, negated) if ranges or negated else Seq()

    def char(self) -> int:
        char = self.peek()
        if not char:
            raise self.error("a closing quote or bracket is missing")
        self.at += 1
        if char != "\\":
            return ord(char)
        char = self.peek()
        self.at += 1
        if (size := _HEX.get(char)) is not None:
            digits = self.text[self.at : self.at + size]
            if re.fullmatch(f"[0-9a-fA-F]{{{size}}}", digits) is None or int(digits, 16) > MAX_CHAR:
                raise self.error(f"after \\{char}, {size} hexadecimal digits of a character must follow")
            self.at += size
            return int(digits, 16)
        if not char or (char.isalnum() and char not in _ESCAPES):
            raise self.error(f"\\{char} is not an escape")
        return ord(_ESCAPES.get(char, char))

    def token(self) -> Node:
        negated = self.peek() == "!"
        self.at += negated
        if (match := _ID.match(self.text, self.at)) is not None:
            token_id: int | None = int(match[1])
        elif (match := _TOKEN.match(self.text, self.at)) is not None:
            token_id = self.token_of(match[0])
        else:
            raise self.error("must be a token, as <text> or <[id]>")
        if token_id is None:
            raise self.error(f"{match[0][:100]} is not a special token of this model")
        self.at = match.end()
        return Token(token_id, negated)


def repeat(item: Node, least: int, most: int | None) -> Node:
    if most == 0:
        return Seq()
    return item if (least, most) == (1, 1) else Repeat(item, least, most)
