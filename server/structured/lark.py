"""A `Structure` -> the text of one grammar in llguidance's variant of Lark, which workers compile.

Texts in the grammar are matched by ordinary tokens; where they contain the text of a special token, by this token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llguidance import regex_to_lark

from quire.server.structured.gbnf import GrammarError, parse
from quire.server.structured.gbnf_rules import rules_of
from quire.server.structured.library_errors import NOTHING
from quire.server.structured.schema import json_rules
from quire.server.structured.schema.escaped_pattern import PatternError
from quire.server.structured.schema.keywords import SchemaError
from quire.server.structured.schema.schema import normalize
from quire.server.structured.text_grammar import in_json, lark_of, lark_of_input
from quire.server.values import Json

# optional whitespace between JSON tokens: as llama.cpp's grammars have it, so that a model cannot fill its answer
WHITESPACE = r"(?: |\n[ \t]{0,20})"
# A character has one spelling in a JSON string: otherwise a name or a text could be spelled so that a
# pattern or another property's name does not match. No half of a surrogate pair is ever written.
ESCAPES = 'nrbtf\\"'
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")  # characters that have a spelling with \u only
CHOICES_PER_TERMINAL = 200
# without forcing, a text may be tokenized in any way, as the model prefers
_HEADER = '%llguidance {"no_forcing": true}'
ANY_TEXT = "/(?s:.*)/"


class StructureError(ValueError):
    """The structure is invalid or cannot be enforced."""


@dataclass(slots=True)
class Builder:
    """Collects the rules of one grammar. `specials` are the special tokens by text, `eos_ids` those that end it."""

    specials: Mapping[str, int]
    eos_ids: Sequence[int] = ()
    json_options: Mapping[str, Any] = field(default_factory=dict)  # for llguidance
    close: bool = True  # objects that a schema describes
    lines: list[str] = field(default_factory=list)
    grammars: list[dict[str, str]] = field(default_factory=list)  # the user's, with names of their own
    schemas: list[tuple[str, Json]] = field(default_factory=list)  # with their places for errors
    _names: int = 0
    _special_pattern: re.Pattern[str] | None = None

    def rule(self, body: str, options: str = "") -> str:
        """Add a rule and return its name."""
        name = self.name("r")
        self.lines.append(f"{name}{options}: {body}")
        return name

    def named(self, name: str, body: str) -> None:
        """Add a rule under a name that `name` gave."""
        self.lines.append(f"{name}: {body}")

    def terminal(self, body: str) -> str:
        """Add a terminal, one regular expression, and return its name."""
        name = self.name("T")
        self.lines.append(f"{name}: {body}")
        return name

    def name(self, prefix: str) -> str:
        self._names += 1
        return f"{prefix}{self._names}"

    def pieces(self, text: str) -> list[str | int]:
        """Return `text` split at special tokens, which become ids."""
        if self._special_pattern is None:
            longest_first = sorted((special for special in self.specials if special), key=len, reverse=True)
            self._special_pattern = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")
        parts = (part for part in self._special_pattern.split(text) if part)
        return [self.specials.get(part, part) for part in parts]

    def literal(self, text: str) -> str:
        """Return an expression that matches `text`."""
        pieces = (f"<[{piece}]>" if isinstance(piece, int) else quoted(piece) for piece in self.pieces(text))
        return " ".join(pieces) or '""'

    def choice(self, texts: Sequence[str]) -> str:
        """Return the name of a rule for one of `texts`. Those without special tokens are terminals, of several texts
        each: the parser's limits bound the alternatives of a rule, and the time of a terminal grows with their square.
        """
        plain, others = [], []
        for text in dict.fromkeys(texts):
            is_plain = self.pieces(text) == [text]
            (plain if is_plain else others).append(quoted(text) if is_plain else self.literal(text))
        size = CHOICES_PER_TERMINAL
        terminals = [self.terminal(" | ".join(plain[i : i + size])) for i in range(0, len(plain), size)]
        return self.rule(" | ".join(terminals + others))

    def members(self, members: Sequence[tuple[bool, str]], separator: str) -> str:
        """Return an expression for members in their order, each at most once; a member is (is required, expression)."""
        first, more = '""', '""'  # the members from the next one on, after no member and after others
        for is_required, member in reversed(members):
            one = self.rule(member)
            first = self.rule(f"{one} {more}" if is_required else f"{one} {more} | {first}")
            more = self.rule(f"{separator} {one} {more}" if is_required else f"({separator} {one})? {more}")
        return first

    def json(self, schema: Json, where: str = "") -> str:
        """Return the name of a rule that matches JSON for `schema`; `where` is its place for errors. Raises
        StructureError.
        """
        if (grammar := lark_of_input(schema)) is not None:
            space = f"{self.terminal(f'/{WHITESPACE}/')}?"
            text = self.text_grammar(grammar, in_json, where)
            return self.rule(f'"{{" {space} "\\"input\\"" {space} ":" {space} "\\"" {text} "\\"" {space} "}}"')
        if (grammar := lark_of(schema)) is not None:
            return self.rule(f'"\\"" {self.text_grammar(grammar, in_json, where)} "\\""')
        self.schemas.append((where, schema))
        try:
            normal = normalize(schema, self.close)
        except SchemaError as error:
            raise StructureError(f"{where}{error}") from None
        if normal is False:
            raise StructureError(f"{where}at #: {NOTHING}")
        options = {**self.json_options, "json_allowed_escapes": _escapes(normal, where)}
        definitions = normal.get("$defs", {}) if isinstance(normal, dict) else {}

        def library(part: Json) -> str:
            whole = {} if part is True else part
            used = {"$defs": definitions} if definitions else {}
            return self.rule("%json " + json.dumps({"x-guidance": options, **used, **whole}))

        if not json_rules.are_needed(normal):
            return library(normal)
        pattern = self.json_options.get("whitespace_pattern")
        space = f"{self.terminal(f'/{pattern}/')}?" if pattern else ""
        try:
            return json_rules.JsonRules(self, definitions, library, space).whole(normal)
        except json_rules.RulesError as error:
            raise StructureError(f"{where}{error}") from None

    def regex(self, pattern: str) -> str:
        return self.terminal(f"/{regex_to_lark(_without_anchors(pattern), 'd') or '(?:)'}/")

    def grammar(self, text: str) -> str:
        """Return an expression for a grammar of the user."""
        name = self.name("g")
        self.grammars.append({"name": name, "lark_grammar": grammar_text(text, self.specials, self.eos_ids)})
        return self.rule(f"@{name}")

    def text_grammar(self, grammar: str, rewrite: Callable[[str], str], where: str = "") -> str:
        """Return an expression for a tool's text by its own Lark grammar, `rewrite` as the text is written in a
        call.
        """
        name = self.name("g")
        try:
            self.grammars.append({"name": name, "lark_grammar": f"{_HEADER}\n{rewrite(grammar)}\n"})
        except PatternError as error:
            raise StructureError(f"{where}grammar: {error}") from None
        return self.rule(f"@{name}")

    def other_specials(self, but: Sequence[int] = ()) -> str | None:
        """Return an expression for one special token that neither ends the output nor is in `but`."""
        ids = sorted(set(self.specials.values()) - set(self.eos_ids) - set(but))
        return f"<[{','.join(map(str, ids))}]>" if ids else None

    def text(self, start: str) -> str:
        """Return the whole grammar, with the expression `start` as its start."""
        lark = "\n".join([_HEADER, f"start: {start}", *self.lines]) + "\n"
        return json.dumps({"grammars": [{"lark_grammar": lark}, *self.grammars]}) if self.grammars else lark


def _escapes(schema: Json, where: str) -> str:
    """Return the escapes of JSON strings. Constants and names with rare control characters need `\\u`, which names that
    are free must not have. Raises StructureError.
    """
    pending, needs_u, has_free_names = [schema], False, False
    while pending:
        node = pending.pop()
        if isinstance(node, str):
            needs_u = needs_u or _CONTROL.search(node) is not None
        elif isinstance(node, list):
            pending.extend(node)
        elif isinstance(node, dict):
            pending.extend(node)
            pending.extend(node.values())
            named = node.get("properties") or node.get("patternProperties")
            has_free_names = has_free_names or bool(named and node.get("additionalProperties", True) is not False)
    if needs_u and has_free_names:
        raise StructureError(
            f"{where}at #: additionalProperties: it must be false if names or constants have control characters"
        )
    return ESCAPES + "u" * needs_u


def grammar_text(text: str, specials: Mapping[str, int], eos_ids: Sequence[int]) -> str:
    """Return the user's grammar as Lark; one with `::=` is EBNF."""
    if "::=" in text:
        try:
            text = rules_of(parse(text, specials.get), tuple(eos_ids))
        except GrammarError as error:
            raise StructureError(str(error)) from None
    return f"{_HEADER}\n{text}\n"


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _without_anchors(pattern: str) -> str:
    """Remove the anchors at both ends of a pattern, which is matched with the whole output anyway."""
    pattern = pattern.removeprefix("^")
    backslashes = len(pattern) - 1 - len(pattern[:-1].rstrip("\\")) if pattern.endswith("$") else 0
    return pattern[:-1] if pattern.endswith("$") and backslashes % 2 == 0 else pattern
