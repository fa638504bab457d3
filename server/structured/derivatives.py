"""Regular expressions as trees, and their possible continuations: by derivatives, within a limit of work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from quire.server.structured.gbnf import Alt, Chars, Node, Ranges, Ref, Repeat, Seq

_NOTHING = Alt(())
_EMPTY = Seq()


class TooMuchWork(Exception):
    """The limit of work is reached."""


class Language:
    """Answers for trees whose references lead to `rules` that are not recursive. Raises TooMuchWork."""

    def __init__(self, rules: Mapping[str, Node], max_work: int):
        self.rules, self.work = rules, max_work
        self._nullable: dict[Node, bool] = {}
        self._first: dict[Node, Ranges] = {}
        self._derived: dict[tuple[Node, int], Node] = {}

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
        """The characters that a text of the language may begin with; ranges may overlap."""
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

    def derived(self, node: Node, char: int) -> Node:
        """The derivative by `char`: continuations of the texts that begin with it."""
        key = node, char
        if (known := self._derived.get(key)) is None:
            self.work -= 1
            if self.work < 0:
                raise TooMuchWork
            self._derived[key] = known = self._derivative(node, char)
        return known

    def _derivative(self, node: Node, char: int) -> Node:
        match node:
            case Chars():
                return _EMPTY if any(low <= char <= high for low, high in node.ranges) else _NOTHING
            case Alt():
                return _alt(self.derived(item, char) for item in node.items)
            case Ref():
                return self.derived(self.rules[node.name], char)
            case Repeat():
                rest = Repeat(node.item, max(node.least - 1, 0), None if node.most is None else node.most - 1)
                return _seq(self.derived(node.item, char), _EMPTY if rest.most == 0 else rest)
            case Seq(items=()):
                return _NOTHING
            case Seq():
                rest = Seq(node.items[1:]) if len(node.items) > 2 else node.items[1] if len(node.items) == 2 else _EMPTY
                parts = [_seq(self.derived(node.items[0], char), rest)]
                if self.nullable(node.items[0]):
                    parts.append(self.derived(rest, char))
                return _alt(parts)
        raise AssertionError(node)

    def share(self, one: Node, other: Node) -> bool:
        """Whether some text that is not empty is in both languages."""
        seen, pending = set(), [(one, other)]
        while pending:
            pair = pending.pop()
            if pair in seen:
                continue
            seen.add(pair)
            for char in _representatives(self.first(pair[0]), self.first(pair[1])):
                left, right = self.derived(pair[0], char), self.derived(pair[1], char)
                if self.nullable(left) and self.nullable(right):
                    return True
                pending.append((left, right))
        return False

    def runs_into(self, one: Node, other: Node, after: Ranges) -> bool:
        """Whether some text of `one` may be followed by a character of `after` with which `other`, read from the same
        place, may go on.
        """
        seen, pending = set(), [(one, other)]
        while pending:
            pair = pending.pop()
            if pair in seen:
                continue
            seen.add(pair)
            for char in _representatives(self.first(pair[0]), self.first(pair[1])):
                left, right = self.derived(pair[0], char), self.derived(pair[1], char)
                if _NOTHING in (left, right):
                    continue
                if self.nullable(left) and meet(self.first(right), after):
                    return True
                pending.append((left, right))
        return False


def meet(some: Ranges, others: Ranges) -> bool:
    return any(low <= high for low, high in _common(some, others))


def _common(some: Ranges, others: Ranges) -> Iterable[tuple[int, int]]:
    return ((max(a, c), min(b, d)) for a, b in some for c, d in others)


def _representatives(some: Ranges, others: Ranges) -> Iterable[int]:
    """One character of each class that both have: classes are what no range divides."""
    common = [pair for pair in _common(some, others) if pair[0] <= pair[1]]
    borders = {low for low, _ in (*some, *others)} | {high + 1 for _, high in (*some, *others)}
    starts = {low for low, _ in common} | {b for b in borders if any(low <= b <= high for low, high in common)}
    return sorted(starts)


def _seq(first: Node, rest: Node) -> Node:
    if _NOTHING in (first, rest):
        return _NOTHING
    items = (*_items(first), *_items(rest))
    return items[0] if len(items) == 1 else Seq(items)


def _items(node: Node) -> tuple[Node, ...]:
    return node.items if isinstance(node, Seq) else (node,)


def _alt(nodes: Iterable[Node]) -> Node:
    items: dict[Node, None] = {}
    for node in nodes:
        items |= dict.fromkeys(node.items if isinstance(node, Alt) else (node,))
    return next(iter(items)) if len(items) == 1 else Alt(tuple(items))
