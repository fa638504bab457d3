"""Trees of a GBNF grammar -> rules and terminals of llguidance's Lark.

llguidance's own converter (`gbnf_to_lark`) takes less of the syntax, and its terminals read too much: llguidance reads
the longest terminal, so that no `"b"` can follow a terminal `[a-z]*`, while GBNF allows that. Here a grammar without
recursion is one terminal. Otherwise a terminal is as large as possible without reading text that something else may
read: a conflicting terminal is divided, down to single characters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby, product

from quire.server.structured.gbnf import Alt, Chars, GrammarError, Node, Ranges, Ref, Repeat, Seq, Token, references
from quire.server.structured.terminals import Terminals, TooMuchWork, times


@dataclass(frozen=True, slots=True, eq=False)
class Terminal:
    """A place in a grammar where a regular part is read as one terminal."""

    node: Node


_Place = Terminal | Token
_Places = dict[_Place, None]


def rules_of(grammar: Mapping[str, Node], eos_ids: tuple[int, ...] = ()) -> str:
    """Return the text of a Lark grammar whose start is `start`. Raises GrammarError."""
    used = _reachable(_productive(grammar))
    plan = _Plan(used)
    plan.divide()
    return _Writer(plan, eos_ids).text()


def _productive(grammar: Mapping[str, Node]) -> dict[str, Node]:
    """Return the rules that match something, without alternatives that do not."""
    known: set[str] = set()

    def matches(node: Node) -> bool:
        match node:
            case Seq():
                return all(map(matches, node.items))
            case Alt():
                return any(map(matches, node.items))
            case Repeat():
                return node.least == 0 or matches(node.item)
            case Ref():
                return node.name in known
        return not isinstance(node, Chars) or bool(node.ranges)

    def kept(node: Node) -> Node:
        match node:
            case Seq():
                return Seq(tuple(map(kept, node.items)))
            case Alt():
                return Alt(tuple(kept(item) for item in node.items if matches(item)))
            case Repeat():
                return Repeat(kept(node.item), node.least, node.most) if matches(node.item) else Seq()
        return node

    while more := {name for name, node in grammar.items() if name not in known and matches(node)}:
        known |= more
    if "root" not in known:
        raise GrammarError("rule root matches no text")
    return {name: kept(grammar[name]) for name in grammar if name in known}


def _reachable(grammar: Mapping[str, Node]) -> dict[str, Node]:
    found, pending = {}, ["root"]
    while pending:
        name = pending.pop()
        if name not in found:
            found[name] = grammar[name]
            pending.extend(references(grammar[name]))
    return found


@dataclass(slots=True)
class _Ends:
    """The terminals and tokens that an expression may begin and end with."""

    nullable: bool = False
    first: _Places = field(default_factory=dict)
    last: _Places = field(default_factory=dict)


class _Plan:
    """The rules with their regular parts as terminals."""

    def __init__(self, grammar: dict[str, Node]):
        self.grammar = grammar
        self.regular = _regular_rules(grammar)
        self.terminals = Terminals(grammar)
        self.rules: dict[str, object] = {}  # the rules to write: trees with terminals
        self._add("root")

    def _add(self, name: str) -> None:
        pending = [name]
        while pending:
            name = pending.pop()
            if name not in self.rules:
                self.rules[name] = self._planned(self.grammar[name])
                pending.extend(_refs(self.rules[name]))

    def _planned(self, node: Node) -> object:
        """Return the tree with the largest regular parts as terminals."""
        if self._is_regular(node):
            return Terminal(node) if node != Seq() else node
        match node:
            case Seq():
                items: list[object] = []
                for is_regular, group in groupby(node.items, self._is_regular):
                    parts = tuple(group)
                    items.extend(
                        [Terminal(parts[0] if len(parts) == 1 else Seq(parts))]
                        if is_regular
                        else map(self._planned, parts)
                    )
                return Seq(tuple(items))
            case Alt():
                regular = tuple(item for item in node.items if self._is_regular(item))
                others = [self._planned(item) for item in node.items if not self._is_regular(item)]
                return Alt((*([Terminal(Alt(regular))] if regular else []), *others))
            case Repeat():
                return Repeat(self._planned(node.item), node.least, node.most)
        return node

    def _is_regular(self, node: Node) -> bool:
        return not _has_token(node) and all(name in self.regular for name in references(node))

    # ---- division of terminals

    def divide(self) -> None:
        """Divide terminals until no two conflict."""
        while conflicting := self._conflicting():
            for name, tree in list(self.rules.items()):
                self.rules[name] = self._divided(tree, conflicting)
            for name in list(self.rules):
                for other in _refs(self.rules[name]):
                    self._add(other)

    def _divided(self, tree: object, conflicting: set[Terminal]) -> object:
        match tree:
            case Terminal():
                return self._parts(tree.node) if tree in conflicting else tree
            case Seq():
                return Seq(tuple(self._divided(item, conflicting) for item in tree.items))
            case Alt():
                return Alt(tuple(self._divided(item, conflicting) for item in tree.items))
            case Repeat():
                return Repeat(self._divided(tree.item, conflicting), tree.least, tree.most)
        return tree

    def _parts(self, node: Node) -> object:
        match node:
            case Seq():
                return Seq(tuple(Terminal(item) for item in node.items))
            case Alt():
                return Alt(tuple(Terminal(item) for item in node.items))
            case Repeat():
                return Repeat(Terminal(node.item), node.least, node.most)
            case Ref():
                return Terminal(self.grammar[node.name])
        raise AssertionError(node)

    def _conflicting(self) -> set[Terminal]:
        """Return the terminals to divide: those that may read the text after another terminal that can be read at the
        same place.
        """
        starts, after = self._following()
        found: set[Terminal] = set()
        try:
            pairs = [
                (one, other)
                for one, other in self._read_together(starts, after)
                if isinstance(one, Terminal) and isinstance(other, Terminal) and not isinstance(other.node, Chars)
            ]
            run = self.terminals.run_into(
                [(one.node, other.node, self._first_after(after.get(one, {}))) for one, other in pairs]
            )
            found = {one for pair, conflicts in zip(pairs, run) if conflicts for one in pair}
        except TooMuchWork:
            found = {one for one in (*starts, *after) if isinstance(one, Terminal)}
        return {one for one in found if not isinstance(one.node, Chars)}

    def _read_together(self, starts: _Places, after: Mapping[_Place, _Places]) -> set[tuple[_Place, _Place]]:
        """Return pairs that may begin at the same place of a text, each with itself as well."""
        pairs: set[tuple[_Place, _Place]] = set()
        groups, pending = set(), [frozenset(starts)]
        while pending:
            group = pending.pop()
            if group in groups:
                continue
            groups.add(group)
            new = [pair for pair in product(group, group) if pair not in pairs]
            pairs.update(new)
            for one, other in self._sharing(new):
                pending.append(frozenset(after.get(one, {})) | frozenset(after.get(other, {})))
        return pairs

    def _sharing(self, pairs: list[tuple[_Place, _Place]]) -> list[tuple[_Place, _Place]]:
        """Return the pairs that may read the same text."""
        found, asked = [], []
        for one, other in pairs:
            if isinstance(one, Terminal) and isinstance(other, Terminal) and one is not other:
                asked.append((one, other))
            elif one == other or any(isinstance(place, Token) and place.negated for place in (one, other)):
                found.append((one, other))
        shared = self.terminals.share([(one.node, other.node) for one, other in asked])
        return [*found, *(pair for pair, shares in zip(asked, shared) if shares)]

    def _first_after(self, following: _Places) -> Ranges:
        places = (one for one in following if isinstance(one, Terminal))
        return tuple(dict.fromkeys(pair for one in places for pair in self.terminals.first(one.node)))

    def _following(self) -> tuple[_Places, dict[_Place, _Places]]:
        """Return the terminals that may come first, and after each one."""
        ends = {name: _Ends() for name in self.rules}
        changed = True
        while changed:
            changed = False
            for name, tree in self.rules.items():
                new = self._ends(tree, ends, None)
                old = ends[name]
                if (new.nullable, len(new.first), len(new.last)) != (old.nullable, len(old.first), len(old.last)):
                    ends[name], changed = new, True
        after: dict[_Place, _Places] = {}
        for tree in self.rules.values():
            self._ends(tree, ends, after)
        return ends["root"].first, after

    def _ends(self, tree: object, ends: dict[str, _Ends], after: dict | None) -> _Ends:
        """Return the ends of a tree; add to `after` the successors of each place within it."""

        def joins(last: dict, first: dict) -> None:
            if after is not None:
                for one in last:
                    after.setdefault(one, {}).update(first)

        match tree:
            case Terminal():
                return _Ends(self.terminals.nullable(tree.node), {tree: None}, {tree: None})
            case Token():
                return _Ends(False, {tree: None}, {tree: None})
            case Ref():
                return ends[tree.name]
            case Seq():
                result = _Ends(True)
                for item in tree.items:
                    part = self._ends(item, ends, after)
                    joins(result.last, part.first)
                    if result.nullable:
                        result.first = result.first | part.first
                    result.last = part.last | result.last if part.nullable else dict(part.last)
                    result.nullable = result.nullable and part.nullable
                return result
            case Alt():
                parts = [self._ends(item, ends, after) for item in tree.items]
                result = _Ends(any(part.nullable for part in parts))
                for part in parts:
                    result.first, result.last = result.first | part.first, result.last | part.last
                return result
            case Repeat():
                part = self._ends(tree.item, ends, after)
                if tree.most != 1:
                    joins(part.last, part.first)
                return _Ends(part.nullable or tree.least == 0, part.first, part.last)
        raise AssertionError(tree)


def _regular_rules(grammar: Mapping[str, Node]) -> set[str]:
    """Return the rules that do not lead to themselves, to one that does, or to a token."""
    uses = {name: set(references(node)) for name, node in grammar.items()}
    regular: set[str] = set()
    while more := {
        name for name in grammar if name not in regular and uses[name] <= regular and not _has_token(grammar[name])
    }:
        regular |= more
    return regular


def _has_token(node: Node) -> bool:
    match node:
        case Token():
            return True
        case Seq() | Alt():
            return any(map(_has_token, node.items))
        case Repeat():
            return _has_token(node.item)
    return False


def _refs(tree: object) -> Iterator[str]:
    match tree:
        case Ref():
            yield tree.name
        case Seq() | Alt():
            for item in tree.items:
                yield from _refs(item)
        case Repeat():
            yield from _refs(tree.item)


class _Writer:
    def __init__(self, plan: _Plan, eos_ids: tuple[int, ...]):
        self.plan, self.eos_ids = plan, eos_ids
        self.terminals = Terminals(plan.grammar)
        self.names = {name: "start" if name == "root" else f"r{i}" for i, name in enumerate(plan.rules)}

    def text(self) -> str:
        rules = [f"{self.names[name]}: {self._expression(tree)}" for name, tree in self.plan.rules.items()]
        return "\n".join([*rules, *self.terminals.lines])

    def _expression(self, tree: object) -> str:
        match tree:
            case Terminal():  # one that matches the empty text is not skipped by itself
                return f"{self.terminals.name(tree.node)}{'?' if self.terminals.nullable(tree.node) else ''}"
            case Ref():
                return self.names[tree.name]
            case Token():
                excluded = ",".join(map(str, sorted({tree.token_id, *self.eos_ids})))
                return f"<[^{excluded}]>" if tree.negated else f"<[{tree.token_id}]>"
            case Seq():
                return f"({' '.join(map(self._expression, tree.items))})" if tree.items else '""'
            case Alt():
                return f"({' | '.join(map(self._expression, tree.items))})"
            case Repeat():
                return f"({self._expression(tree.item)}){times(tree)}"
        raise AssertionError(tree)
