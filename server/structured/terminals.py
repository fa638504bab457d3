"""Regular parts of a GBNF grammar as terminals of llguidance's Lark, and the overlaps of these.

The library itself decides which terminals overlap: their intersection is empty or not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from llguidance import LLMatcher, LLTokenizer

from quire.server.structured.gbnf import Alt, Chars, Node, Ranges, Ref, Repeat, Seq

MAX_QUESTIONS = 1000  # about 1 ms each
_AT_ONCE = 32
_BYTES = LLTokenizer("byte")
_SOME_TEXT = "/(?s:.+)/"
_ANY_TEXT = "/(?s:.*)/"


class TooMuchWork(Exception):
    """The limit on questions, or the library's limit on work, is reached."""


class Terminals:
    """Terminals for trees whose references lead only to non-recursive `rules`."""

    def __init__(self, rules: Mapping[str, Node]):
        self.rules = rules
        self.lines: list[str] = []
        self._names: dict[Node, str] = {}
        self._nullable: dict[Node, bool] = {}
        self._first: dict[Node, Ranges] = {}
        self._answers: dict[str, bool] = {}

    # ---- their text

    def name(self, node: Node) -> str:
        """Return the name of the terminal for a regular part. Rules within it have names, so that a grammar does not
        grow when they are used often.
        """
        if node not in self._names:
            self._names[node] = name = f"T{len(self._names)}"
            body = self._regex(node)
            self.lines.append(f"{name}: {self._expression(node) if body is None else _pattern(body)}")
        return self._names[node]

    def _expression(self, node: Node) -> str:
        match node:
            case Ref():
                return self.name(self.rules[node.name])
            case Seq():
                return f"({' '.join(map(self._expression, node.items))})" if node.items else '""'
            case Alt():
                return f"({' | '.join(map(self._expression, node.items))})"
            case Repeat():
                return f"({self._expression(node.item)}){times(node)}"
        return _pattern(self._regex(node))

    def _regex(self, node: Node) -> str | None:
        """Return the regular expression of a tree; None if the tree has references."""
        match node:
            case Chars():
                return _class(node.ranges)
            case Repeat():
                inner = self._regex(node.item)
                return inner and f"(?:{inner}){times(node)}"
            case Seq() | Alt():
                parts = [self._regex(item) for item in node.items]
                if None in parts:
                    return None
                return "".join(parts) if isinstance(node, Seq) else f"(?:{'|'.join(parts)})"
        return None

    # ---- the texts they read

    def nullable(self, node: Node) -> bool:
        if (known := self._nullable.get(node)) is None:
            match node:
                case Seq():
                    known = all(map(self.nullable, node.items))
                case Alt():
                    known = any(map(self.nullable, node.items))
                case Repeat():
                    known = node.least == 0 or self.nullable(node.item)
                case Ref():
                    known = self.nullable(self.rules[node.name])
                case _:
                    known = False
            self._nullable[node] = known
        return known

    def first(self, node: Node) -> Ranges:
        """Return the characters that a text of the terminal may begin with; ranges may overlap."""
        if (known := self._first.get(node)) is None:
            self._first[node] = known = tuple(dict.fromkeys(self._first_of(node)))
        return known

    def _first_of(self, node: Node) -> Iterable[tuple[int, int]]:
        match node:
            case Chars():
                yield from node.ranges
            case Seq():
                for item in node.items:
                    yield from self.first(item)
                    if not self.nullable(item):
                        break
            case Alt():
                for item in node.items:
                    yield from self.first(item)
            case Repeat():
                yield from self.first(node.item)
            case Ref():
                yield from self.first(self.rules[node.name])

    def share(self, pairs: Sequence[tuple[Node, Node]]) -> list[bool]:
        """Return for each pair whether both read some text that is not empty. Raises TooMuchWork."""
        return self._any_text([self._shared(*pair) if self._meet(*pair) else None for pair in pairs])

    def run_into(self, triples: Sequence[tuple[Node, Node, Ranges]]) -> list[bool]:
        """Return for each triple whether some text of the first terminal may be followed by a character of the ranges
        with which the second, read from the same place, may continue. Raises TooMuchWork.
        """
        return self._any_text(
            [
                f"({self.name(one)} & {_SOME_TEXT}) /{_class(after)}/ {_ANY_TEXT} & {self.name(other)}"
                if after and self._meet(one, other)
                else None
                for one, other, after in triples
            ]
        )

    def _shared(self, one: Node, other: Node) -> str:
        return " & ".join([*sorted((self.name(one), self.name(other))), _SOME_TEXT])

    def _meet(self, one: Node, other: Node) -> bool:
        return any(max(a, c) <= min(b, d) for a, b in self.first(one) for c, d in self.first(other))

    def _any_text(self, expressions: Sequence[str | None]) -> list[bool]:
        """Return for each expression whether it matches any text; None does not."""
        asked = list(dict.fromkeys(one for one in expressions if one is not None and one not in self._answers))
        for i in range(0, len(asked), _AT_ONCE):
            self._ask(asked[i : i + _AT_ONCE])
        return [one is not None and self._answers[one] for one in expressions]

    def _ask(self, expressions: list[str]) -> None:
        """Ask which expressions match a text: after a distinct first character, an empty terminal cannot begin."""
        if len(self._answers) + len(expressions) > MAX_QUESTIONS:
            raise TooMuchWork
        questions = [f'Q{i}: "\\u{i + 1:04x}" ({one})' for i, one in enumerate(expressions)]
        start = " | ".join(['"\\u007f"', *(f"Q{i}" for i in range(len(expressions)))])
        matcher = LLMatcher(_BYTES, "\n".join([f"start: {start}", *questions, *self.lines]), log_level=0)
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            raise TooMuchWork
        bits = int.from_bytes(mask, "little")
        self._answers |= {one: bool(bits >> (i + 1) & 1) for i, one in enumerate(expressions)}


def _pattern(body: str) -> str:
    return f"/{body or '(?:)'}/"


def times(node: Repeat) -> str:
    return f"{{{node.least},{'' if node.most is None else node.most}}}"


def _class(ranges: Ranges) -> str:
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _char(ranges[0][0])
    return f"[{''.join(_char(low) if low == high else f'{_char(low)}-{_char(high)}' for low, high in ranges)}]"


def _char(code: int) -> str:
    return chr(code) if code < 128 and chr(code).isalnum() else f"\\u{{{code:x}}}"
