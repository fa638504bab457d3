"""XGrammar's structural tags -> expressions of a Lark grammar.

The format is a tree of JSON objects with a "type" each; docs/structured-output.md lists the types. The older form, a
list of "structures" with "triggers", is translated into it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from quire.server.structured.lark import ANY_TEXT, Builder, StructureError, quoted
from quire.server.structured.library_errors import NOTHING
from quire.server.structured.schema.keywords import MAX_DEPTH, SchemaError, check
from quire.server.structured.schema.schema import normalize
from quire.server.structured.structure import ARGUMENTS
from quire.server.structured.xml_parameters import parameters
from quire.server.values import Json

MAX_REPEAT = 10_000


def expression(tag: Json, builder: Builder) -> str:
    """Return the expression for a structural tag in any of its forms. Raises StructureError with the path of the
    mistake.
    """
    if not isinstance(tag, dict):
        raise StructureError("structural_tag must be an object")
    if "structures" in tag:
        tag = {"type": "structural_tag", "format": _from_structures(tag)}
    path = ""
    if tag.get("type") == "structural_tag" or "format" in tag:
        path, tag = "format", tag.get("format")
    return _Translation(builder).format(tag, path, None, 0)


def _from_structures(tag: dict[str, Any]) -> dict[str, Any]:
    structures = _get(tag, "structures", list, "")
    tags = [
        {
            "type": "tag",
            "begin": _get(one, "begin", str, f"structures.{i}"),
            "content": {"type": "json_schema", "json_schema": one.get("schema", one.get("structure", True))},
            "end": _get(one, "end", str, f"structures.{i}"),
        }
        for i, one in enumerate(structures)
    ]
    return {"type": "triggered_tags", "triggers": _get(tag, "triggers", list, ""), "tags": tags}


@dataclass(frozen=True, slots=True)
class _Case:
    """A trigger in free text, a text or a token id, after which `rest` must follow."""

    trigger: str | int
    rest: str


class _Translation:
    """`format` returns an expression; `end` is the text or token that follows the part, which unlimited parts need."""

    def __init__(self, builder: Builder):
        self.builder = builder
        self.place = ""  # path of the translated arguments, for errors
        self.definitions: dict[str, Any] = {}  # in the schema of these arguments

    def format(self, node: Json, path: str, end: str | int | None, depth: int) -> str:
        if not isinstance(node, dict):
            raise StructureError(f"{path}: must be an object")
        if depth > MAX_DEPTH:
            raise StructureError(f"{self.place or path}: nested more than {MAX_DEPTH} levels deep")
        kind = node.get("type")
        translate = _FORMATS.get(kind) if isinstance(kind, str) else None
        if translate is None:
            raise StructureError(f"{path}.type: {str(kind)[:50]!r} is not one of {', '.join(sorted(_FORMATS))}")
        return translate(self, node, path, end, depth + 1)

    # ---- one part

    def const_string(self, node: dict, path: str, end: str | int | None, depth: int) -> str:
        return self.builder.literal(_get(node, "value", str, path))

    def json_schema(self, node: dict, path: str, end: str | int | None, depth: int) -> str:
        if "json_schema" not in node:
            raise StructureError(f"{path}.json_schema: missing")
        schema, style, place = node["json_schema"], node.get("style", "json"), self.place or f"{path}.json_schema"
        if isinstance(schema, dict):
            schema = {**self.definitions, **schema}
        if style == "json":
            return self.builder.json(schema, f"{place} ")
        if style not in XML_STYLES:
            raise StructureError(f"{path}.style: {str(style)[:50]!r} is not one of json, {', '.join(XML_STYLES)}")
        return parameters(schema, style, place, self.builder)

    def arguments(self, node: dict, path: str, end: str | int | None, depth: int) -> str:
        schema, content = _get(node, "schema", dict, path), _get(node, "content", dict, path)
        self.place = f"parameters of {_get(node, 'name', str, path)}"
        self.definitions = {keyword: schema[keyword] for keyword in ("$defs", "definitions") if keyword in schema}
        whole = {**schema, "type": "object"}
        try:
            check(schema)
            if content.get("type") != "json_schema" and normalize(whole, self.builder.close) is False:
                raise SchemaError("#", None, NOTHING)
        except SchemaError as error:
            raise StructureError(f"{self.place} {error}") from None
        self.builder.schemas.append((f"{self.place} ", whole))
        found = self.format(content, path, end, depth)
        self.place, self.definitions = "", {}
        return found

    def qwen_xml_parameter(self, node: dict, path: str, end: str | int | None, depth: int) -> str:
        return self.json_schema({**node, "style": "qwen_xml"}, path, end, depth)

    def regex(self, node: dict, path: str, end: str | int | None, depth: int) -> str:
        return self.builder.regex(_get(node, "pattern", str, path))

    def grammar(self, node: dict, path: str, end: str | int | None, depth: int) -> str:
        return self.builder.grammar(_get(node, "grammar", str, path))

    def any_text(self, node: dict, path: str, end: str | int | None, depth: int) -> str:
        if node.get("max_tokens") is not None:
            raise StructureError(f"{path}.max_tokens: not supported, use max_chars")
        limit = node.get("max_chars")
        body = ANY_TEXT if limit is None else f"/(?s:.){{0,{_get(node, 'max_chars', int, path)}}}/"
        excludes = _strings(node, "excludes", path)
        if excludes:
            body += " & " + " & ".join(f"~({ANY_TEXT} {quoted(text)} {ANY_TEXT})" for text in excludes)
        others = (
            None if limit is not None or excludes else self.builder.other_specials([end] if type(end) is int else [])
        )
        text = self.builder.terminal(body)
        free = f"({text} {others})* " if others else ""
        if isinstance(end, str):  # the end is part of the expression: see `_closed`
            closing = self.builder.rule(f"{text}", f"[suffix={quoted(end)}]")
            return f"{free}{closing}"
        return f"{free}{text}"

    def token(self, node: dict, path: str, end: str | int | None, depth: int) -> str:
        return f"<[{self._token_id(node.get('token'), path)}]>"

    def exclude_token(self, node: dict, path: str, end: str | int | None, depth: int) -> str:
        ids = self._token_ids(node, "exclude_tokens", path)
        return f"<[^{','.join(map(str, sorted({*ids, *self.builder.eos_ids})))}]>"

    def any_tokens(self, node: dict, path: str, end: str | int | None, depth: int) -> str:
        if node.get("max_tokens") is not None:
            return f"{self.exclude_token(node, path, end, depth)}{{0,{_get(node, 'max_tokens', int, path)}}}"
        if type(end) is int:
            node = {**node, "exclude_tokens": [*node.get("exclude_tokens", []), end]}
        return f"{self.exclude_token(node, path, end, depth)}*"

    # ---- several parts

    def sequence(self, node: dict, path: str, end: str | int | None, depth: int) -> str:
        elements = _get(node, "elements", list, path)
        parts = []
        for i, element in enumerate(elements):
            at = f"{path}.elements.{i}"
            if not _is_unlimited(element) or i + 1 == len(elements):
                parts.append(self.format(element, at, end if i + 1 == len(elements) else None, depth))
            elif (following := _beginning(elements[i + 1])) is not None:
                parts.append(self._closed(element, at, following, depth, consume=False))
            else:
                raise StructureError(f"{at}: free text must be followed by a fixed text or a tag, or come last")
        return self.builder.rule(" ".join(parts) or '""')

    def alternatives(self, node: dict, path: str, end: str | int | None, depth: int) -> str:
        elements = _get(node, "elements", list, path)
        if not elements:
            raise StructureError(f"{path}.elements: must not be empty")
        choices = [self.format(element, f"{path}.elements.{i}", None, depth) for i, element in enumerate(elements)]
        return self.builder.rule(" | ".join(choices))

    def optional(self, node: dict, path: str, end: str | int | None, depth: int) -> str:
        return f"({self.format(node.get('content'), f'{path}.content', None, depth)})?"

    def star(self, node: dict, path: str, end: str | int | None, depth: int) -> str:
        return f"({self.format(node.get('content'), f'{path}.content', None, depth)})*"

    def plus(self, node: dict, path: str, end: str | int | None, depth: int) -> str:
        return f"({self.format(node.get('content'), f'{path}.content', None, depth)})+"

    def repeat(self, node: dict, path: str, end: str | int | None, depth: int) -> str:
        least, most = (_get(node, name, int, path) for name in ("min", "max"))
        if not 0 <= least <= MAX_REPEAT or not (most == -1 or least <= most <= MAX_REPEAT):
            raise StructureError(f"{path}: min and max must be in order, from 0 to {MAX_REPEAT}; max may be -1")
        content = self.format(node.get("content"), f"{path}.content", None, depth)
        return f"({content}){{{least},{'' if most == -1 else most}}}"

    def members(self, node: dict, path: str, end: str | int | None, depth: int) -> str:
        """Return members of an object, each at most once, in their order."""
        members = []
        for i, part in enumerate(_get(node, "members", list, path)):
            at = f"{path}.members.{i}"
            content = self.format(part.get("content"), f"{at}.content", None, depth)
            members.append((_get(part, "required", bool, at), content))
        return self.builder.members(members, self.builder.literal(_get(node, "separator", str, path)))

    # ---- tags

    def tag(self, node: dict, path: str, end: str | int | None, depth: int) -> str:
        return f"{self._text_or_token(node, 'begin', path)} {self._tag_rest(node, path, depth)}"

    def triggered_tags(self, node: dict, path: str, end: str | int | None, depth: int) -> str:
        triggers = _strings(node, "triggers", path)
        cases, whole = [], []
        for i, tag in enumerate(self._tags(node, path)):
            at = f"{path}.tags.{i}"
            begin = _get(tag, "begin", str, at)
            matching = [trigger for trigger in triggers if trigger and begin.startswith(trigger)]
            if len(matching) != 1:
                raise StructureError(f"{at}.begin: {begin[:50]!r} must begin with exactly one of the triggers")
            rest = self._tag_rest(tag, at, depth)
            whole.append(f"{self.builder.literal(begin)} {rest}")
            cases.append(_Case(matching[0], f"{self.builder.literal(begin[len(matching[0]) :])} {rest}"))
        return self._dispatch(node, cases, whole, path, end, not node.get("stop_after_first", False))

    def token_triggered_tags(self, node: dict, path: str, end: str | int | None, depth: int) -> str:
        triggers = set(self._token_ids(node, "trigger_tokens", path))
        cases = []
        for i, tag in enumerate(self._tags(node, path)):
            at = f"{path}.tags.{i}"
            begin = self._token_id(_get(tag, "begin", dict, at).get("token"), f"{at}.begin")
            if begin not in triggers:
                raise StructureError(f"{at}.begin: must be one of the trigger_tokens")
            cases.append(_Case(begin, self._tag_rest(tag, at, depth)))
        whole = [f"<[{case.trigger}]> {case.rest}" for case in cases]
        return self._dispatch(node, cases, whole, path, end, not node.get("stop_after_first", False))

    def tags_with_separator(self, node: dict, path: str, end: str | int | None, depth: int) -> str:
        tags = self._tags(node, path)
        one = self.builder.rule(
            " | ".join(f"({self.tag(tag, f'{path}.tags.{i}', None, depth)})" for i, tag in enumerate(tags))
        )
        separator = self.builder.literal(_get(node, "separator", str, path))
        several = one if node.get("stop_after_first") else f"{one} ({separator} {one})*"
        return several if node.get("at_least_one") else f"({several})?"

    def dispatch(self, node: dict, path: str, end: str | int | None, depth: int) -> str:
        rules = _get(node, "rules", list, path)
        cases = []
        for i, rule in enumerate(rules):
            at = f"{path}.rules.{i}"
            if not isinstance(rule, list) or len(rule) != 2 or not isinstance(rule[0], str) or not rule[0]:
                raise StructureError(f"{at}: must be a text and a format")
            cases.append(_Case(rule[0], self.format(rule[1], f"{at}.1", None, depth)))
        whole = [f"{self.builder.literal(case.trigger)} {case.rest}" for case in cases]
        return self._dispatch(node, cases, whole, path, end, node.get("loop", True))

    def _dispatch(
        self, node: dict, cases: Sequence[_Case], whole: Sequence[str], path: str, end: str | int | None, loop: bool
    ) -> str:
        """Free text in which a trigger makes its rest follow; again and again if `loop`. `whole` are the cases without
        text before them.
        """
        if not cases:
            raise StructureError(f"{path}: there is no tag")
        if _strings(node, "excludes", path):
            raise StructureError(f"{path}.excludes: not supported here")
        builder = self.builder
        # A trigger is a single token if it is a special token of the vocabulary.
        cut = [
            (case, builder.pieces(case.trigger) if isinstance(case.trigger, str) else [case.trigger]) for case in cases
        ]
        ids = [pieces[0] for _, pieces in cut if isinstance(pieces[0], int)]
        others = builder.other_specials([*ids, *([end] if type(end) is int else [])])
        text = builder.terminal(ANY_TEXT)
        free = f"({text} {others})* " if others else ""
        tagged = []
        for case, pieces in cut:
            if isinstance(pieces[0], int):
                trigger = f"{text} {' '.join(builder.literal(p) if isinstance(p, str) else f'<[{p}]>' for p in pieces)}"
            elif len(pieces) == 1:
                trigger = builder.rule(f"{text} {quoted(pieces[0])}", "[lazy]")
            else:
                raise StructureError(f"{path}: a trigger must not have a special token after other text")
            tagged.append(f"{free}{trigger} {case.rest}")
        one = builder.rule(" | ".join(tagged))
        last = text if not isinstance(end, str) else builder.rule(text, f"[suffix={quoted(end)}]")
        tail = f"{free}{last}"
        first = builder.rule(" | ".join(whole))
        if node.get("at_least_one"):
            return builder.rule(f"{first} {one}* {tail}" if loop else first)
        return builder.rule(f"{one}* {tail}" if loop else f"{one} | {tail}")

    def _tag_rest(self, tag: dict, path: str, depth: int) -> str:
        """Return the content of a tag and its end."""
        content, end = tag.get("content"), tag.get("end")
        if isinstance(end, list) and len(end) == 1:
            end = end[0]
        if _is_unlimited(content) and not isinstance(end, list):
            closing = self._token_id(end.get("token"), f"{path}.end") if isinstance(end, dict) else end
            return self._closed(content, f"{path}.content", closing, depth)
        inner = self.format(content, f"{path}.content", None, depth)
        if isinstance(end, list):
            if _is_unlimited(content) or not end or not all(isinstance(one, str) for one in end):
                raise StructureError(f"{path}.end: must be one text or token, or texts after content with an end")
            return f"{inner} ({' | '.join(map(self.builder.literal, end))})"
        return f"{inner} {self._text_or_token(tag, 'end', path)}"

    def _closed(self, content: dict, path: str, end: Json, depth: int, consume: bool = True) -> str:
        """Return free text up to `end`, included if `consume`."""
        if isinstance(end, str):
            pieces = self.builder.pieces(end)
            if not pieces:
                return self.format(content, path, None, depth)
            if consume and len(pieces) == 1 and isinstance(pieces[0], str):
                return self.format(content, path, end, depth)
            if isinstance(pieces[0], str):
                raise StructureError(f"{path}: free text here must end at the end of a tag or at a special token")
            rest = f" {self.builder.literal(end)}" if consume else ""
            return f"{self.format(content, path, pieces[0], depth)}{rest}"
        if type(end) is not int:
            raise StructureError(f"{path}: the end must be a text or a token")
        return self.format(content, path, end, depth) + (f" <[{end}]>" if consume else "")

    def _tags(self, node: dict, path: str) -> list[dict]:
        tags = _get(node, "tags", list, path)
        if not tags or not all(isinstance(tag, dict) for tag in tags):
            raise StructureError(f"{path}.tags: must be a list of tags that is not empty")
        return tags

    def _text_or_token(self, tag: dict, name: str, path: str) -> str:
        value = tag.get(name)
        if isinstance(value, str):
            return self.builder.literal(value) if value else ""
        if isinstance(value, dict):
            return f"<[{self._token_id(value.get('token'), f'{path}.{name}')}]>"
        raise StructureError(f"{path}.{name}: must be a text or a token")

    def _token_ids(self, node: dict, name: str, path: str) -> list[int]:
        tokens = node.get(name, [])
        if not isinstance(tokens, list):
            raise StructureError(f"{path}.{name}: must be a list of tokens")
        return [self._token_id(token, f"{path}.{name}.{i}") for i, token in enumerate(tokens)]

    def _token_id(self, token: Json, path: str) -> int:
        if type(token) is int and token >= 0:
            return token
        if isinstance(token, str) and token in self.builder.specials:
            return self.builder.specials[token]
        raise StructureError(f"{path}: {str(token)[:50]!r} is neither the id nor the text of a special token")


XML_STYLES = ("qwen_xml", "glm_xml", "minimax_xml", "deepseek_xml")
_Translate = Callable[[_Translation, dict, str, Any, int], str]
_FORMATS: dict[str, _Translate] = {
    "const_string": _Translation.const_string,
    "json_schema": _Translation.json_schema,
    ARGUMENTS: _Translation.arguments,
    "qwen_xml_parameter": _Translation.qwen_xml_parameter,
    "regex": _Translation.regex,
    "grammar": _Translation.grammar,
    "any_text": _Translation.any_text,
    "token": _Translation.token,
    "exclude_token": _Translation.exclude_token,
    "any_tokens": _Translation.any_tokens,
    "sequence": _Translation.sequence,
    "or": _Translation.alternatives,
    "optional": _Translation.optional,
    "star": _Translation.star,
    "plus": _Translation.plus,
    "repeat": _Translation.repeat,
    "members": _Translation.members,
    "tag": _Translation.tag,
    "triggered_tags": _Translation.triggered_tags,
    "token_triggered_tags": _Translation.token_triggered_tags,
    "tags_with_separator": _Translation.tags_with_separator,
    "dispatch": _Translation.dispatch,
}
_UNLIMITED = ("any_text", "any_tokens", "triggered_tags", "token_triggered_tags", "dispatch")


def _is_unlimited(node: Json) -> bool:
    return isinstance(node, dict) and node.get("type") in _UNLIMITED


def _beginning(node: Json) -> Any:
    """Return the fixed text or token with which a part begins, if there is one."""
    if not isinstance(node, dict):
        return None
    match node.get("type"):
        case "const_string":
            return node.get("value")
        case "tag":
            begin = node.get("begin")
            return begin.get("token") if isinstance(begin, dict) else begin
        case "token":
            return node.get("token")
    return None


def _get(node: Json, name: str, expected: type, path: str) -> Any:
    value = node.get(name) if isinstance(node, dict) else None
    if type(value) is not expected:
        what = {str: "a text", list: "a list", int: "a number", dict: "an object", bool: "a boolean"}[expected]
        raise StructureError(f"{path}.{name}".lstrip(".") + f": must be {what}")
    return value


def _strings(node: dict, name: str, path: str) -> list[str]:
    values = node.get(name, [])
    if not isinstance(values, list) or not all(isinstance(value, str) and value for value in values):
        raise StructureError(f"{path}.{name}: must be a list of texts that are not empty")
    return values
