"""Gemma: each generation writes calls in its own way.

Gemma 4         <|tool_call>call:NAME{KEY:<|"|>TEXT<|"|>,KEY:3}<tool_call|>
FunctionGemma   <start_function_call>call:NAME{KEY:<escape>TEXT<escape>,KEY:3}<end_function_call>
Gemma 3         was not trained on one format: ```tool_code with Python, a Python list, or JSON, as the prompt asks
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from quire.server.parsers import json_text, literals
from quire.server.parsers.conversion import ArgumentTypes
from quire.server.parsers.literals import Style
from quire.server.parsers.reader import Reader, Wait
from quire.server.parsers.recognition import HasToken
from quire.server.parsers.tools.base import (
    Format,
    Tool,
    ToolFormat,
    arguments,
    json_schema,
    marked_calls,
    needs_structure,
    separated,
    sequence,
    tag,
    text,
)
from quire.server.parsers.tools.members import members
from quire.server.parsers.tools.pythonic import Pythonic, read_call
from quire.server.values import Json

_NAME = re.compile(r"[\w.\-]+")
_MAX_DEPTH = 12  # levels of values in the format's own notation
_CONSTRAINTS = {
    *("allOf", "anyOf", "oneOf", "not", "const", "patternProperties", "propertyNames", "dependentRequired", "if"),
    *("pattern", "format", "minLength", "maxLength", "minItems", "maxItems", "uniqueItems", "contains", "prefixItems"),
    *("minProperties", "maxProperties", "x-quire-lark"),  # the last one: of a custom tool
}


class Gemma4(ToolFormat):
    name = "gemma4"
    markers: tuple[str, ...] = ("<|tool_call>", "<tool_call|>", '<|"|>')
    style = Style('<|"|>', bare_keys=True, ends=markers[:2])

    def __init__(self) -> None:
        self.begins = (self.markers[0],)

    def recognize(self, template: str, has_token: HasToken) -> str | None:
        begin = self.markers[0]
        return f"the chat template writes {begin}" if begin in template else None

    def read(self, reader: Reader, begin: str, tools: Sequence[Tool]) -> Wait[None]:
        yield from reader.expect(begin)
        yield from reader.skip_space()
        yield from reader.expect("call:")
        yield from reader.skip_space()
        name = (yield from reader.match(_NAME)).group()
        yield from reader.skip_space()
        if not (yield from reader.starts_with("{")):
            yield from reader.expect("{")
        reader.begin_call(name)
        yield from literals.value(reader, reader.arguments, self.style)
        yield from json_text.close(reader, self.markers[1])

    def structure(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> dict[str, Any] | None:
        if not needs_structure(tools, required, parallel):
            return None
        begin, end, _ = self.markers
        tags = [
            tag(f"{begin}call:{tool.name}{{", arguments(tool, required, self._members), "}" + end) for tool in tools
        ]
        return marked_calls(tags, begin, separator="", required=required, parallel=parallel)

    def _members(self, schema: Mapping[str, Any], depth: int = 0) -> Format:
        free = {"type": "grammar", "grammar": _any_members(self.style.quote)}

        def member(name: str, value: Json) -> Format:
            return sequence(text(f"{name}:"), self._value(value, depth + 1))

        return members(schema, member, ",", free)

    def _value(self, schema: Json, depth: int) -> Format:
        """Return a value in the format's own notation; in JSON, which `literals` reads, too, if the schema asks for
        more than types and properties, or is deep.
        """
        if depth > _MAX_DEPTH:
            return json_schema(schema)
        kind = schema.get("type") if isinstance(schema, Mapping) else None
        if kind == "object" and not _CONSTRAINTS & set(schema):
            return tag("{", self._members(schema, depth), "}")
        if kind == "array" and isinstance(schema.get("items"), Mapping) and not _CONSTRAINTS & set(schema):
            items = separated([tag("", self._value(schema["items"], depth + 1), "")], ",", parallel=True)
            return tag("[", {**items, "at_least_one": False}, "]")
        quote = self.style.quote
        choices = schema.get("enum") if isinstance(schema, Mapping) else None
        if isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices):
            return {"type": "or", "elements": [text(quote + choice + quote) for choice in choices]}
        if kind == "string" and not _CONSTRAINTS & set(schema):
            return tag(quote, {"type": "any_text", "excludes": [quote]}, quote)
        return json_schema(schema)


def _any_members(quote: str) -> str:
    """Return EBNF of any members, whose strings do not contain the first two characters of `quote` in a row."""
    mark = quote.replace('"', '\\"')
    return rf"""
root ::= (pair ("," pair)*)?
pair ::= [A-Za-z_] [A-Za-z0-9_]* ":" value
value ::= "{mark}" ([^<] | "<" [^{quote[1]}<])* "{mark}" | number | list | "{{" root "}}" | "true" | "false" | "null"
number ::= "-"? [0-9]+ ("." [0-9]+)? ([eE] [+-]? [0-9]+)?
list ::= "[" (value ("," value)*)? "]"
"""


class FunctionGemma(Gemma4):
    name = "functiongemma"
    markers = ("<start_function_call>", "<end_function_call>", "<escape>")
    style = Style("<escape>", bare_keys=True, ends=markers[:2])


class Gemma3(Pythonic):
    name = "gemma3"
    begins = ("```tool_code", "```tool_call")
    first = ("[", "{", "```json")

    def recognize(self, template: str, has_token: HasToken) -> str | None:
        if "<start_of_turn>" in template:
            return "the chat template has <start_of_turn> and writes tools"
        return None

    def read(self, reader: Reader, begin: str, tools: Sequence[Tool]) -> Wait[None]:
        names = frozenset(tool.name for tool in tools)
        fenced = begin.startswith("```")
        if fenced:
            yield from reader.expect(begin)
            yield from reader.skip_space()
        if begin == "```tool_code" and not (yield from reader.starts_with("[")):
            yield from self._read_code(reader, tools)
        elif (yield from reader.starts_with("{")) or begin == "```json":
            yield from json_text.calls(reader, names)
        else:
            yield from super().read(reader, "[", tools)
        if fenced:
            yield from json_text.close(reader, "```")

    def _read_code(self, reader: Reader, tools: Sequence[Tool]) -> Wait[None]:
        """Read calls, one per line, each possibly in print()."""
        types = {tool.name: ArgumentTypes(tool.parameters) for tool in tools}
        while True:
            printed = yield from reader.accept("print(")
            yield from read_call(reader, types)
            if printed:
                yield from reader.skip_space()
                yield from reader.close(")")
            yield from reader.skip_space()
            if not (yield from reader.peek()) or (yield from reader.starts_with("```")):
                return
            reader.hold()
