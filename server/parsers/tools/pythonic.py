"""Calls in Python: `[get_weather(city="Paris"), now()]`, of Llama 4 (between its own tokens), Llama 3.2, Olmo 3, and
of Gemma 3 when a prompt asks for it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from quire.server.parsers import json_text, literals
from quire.server.parsers.conversion import ArgumentTypes
from quire.server.parsers.model_json import json_string
from quire.server.parsers.reader import Cut, Malformed, Reader, Wait
from quire.server.parsers.recognition import HasToken
from quire.server.parsers.tools.base import (
    Format,
    Tool,
    ToolFormat,
    arguments,
    first_calls,
    json_schema,
    needs_structure,
    separated,
    tag,
)
from quire.server.parsers.tools.members import members

_NAME = re.compile(r"[A-Za-z_][\w.\-]*")
_KEY = re.compile(r"[A-Za-z_]\w*")

_ANY_KEYWORDS = {
    "type": "grammar",
    "grammar": r"""
root ::= (pair (", " pair)*)?
pair ::= [A-Za-z_] [A-Za-z0-9_]* "=" value
value ::= string | number | list | dict | "True" | "False" | "None" | "true" | "false" | "null"
string ::= "\"" ([^"\\] | "\\" [^\n])* "\"" | "'" ([^'\\] | "\\" [^\n])* "'"
number ::= "-"? [0-9]+ ("." [0-9]+)? ([eE] [+-]? [0-9]+)?
list ::= "[" (value (", " value)*)? "]"
dict ::= "{" (string ": " value (", " string ": " value)*)? "}"
""",
}


class Pythonic(ToolFormat):
    """Python calls in a list. Only functions of the request are calls, because an answer may begin with a list."""

    name = "pythonic"
    first = ("[",)

    def recognize(self, template: str, has_token: HasToken) -> str | None:
        plain = re.sub(r"\s|\\n", "", template)
        if "[func_name1(" in plain or "[function_name1(" in plain or "[func1(" in plain:
            return "the chat template asks for calls as [func_name1(...)]"
        return None

    def read(self, reader: Reader, begin: str, tools: Sequence[Tool]) -> Wait[None]:
        types = {tool.name: ArgumentTypes(tool.parameters) for tool in tools}
        yield from reader.expect("[")
        while True:
            yield from reader.skip_space()
            yield from read_call(reader, types)
            yield from reader.skip_space()
            if not (yield from reader.accept(",")):
                break
            reader.hold()
            yield from reader.skip_space()
            if (yield from reader.starts_with("]")):
                break
        yield from reader.close("]")

    def structure(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> dict[str, Any] | None:
        if not needs_structure(tools, required, parallel):
            return None
        tags = []
        for tool in tools:
            tags.append(tag(f"{tool.name}(", arguments(tool, required, _keywords), ")"))
        calls = tag("[", separated(tags, ", ", parallel), "]")
        return first_calls(calls, "".join(self.first), self.markers, required=required)


def _keywords(schema: Mapping[str, Any]) -> Format:
    return members(schema, lambda name, value: tag(f"{name}=", json_schema(value), ""), ", ", _ANY_KEYWORDS)


class Llama4Pythonic(Pythonic):
    """`<|python_start|>[...]<|python_end|>`, or the list without the tokens; or JSON, as some templates ask for."""

    name = "llama4_pythonic"
    markers = ("<|python_start|>", "<|python_end|>")
    begins = ("<|python_start|>",)
    first = ("[", "{")

    def recognize(self, template: str, has_token: HasToken) -> str | None:
        if "<|header_start|>" in template and has_token("<|python_start|>"):
            return "the chat template has <|header_start|>, and the tokenizer the token <|python_start|>"
        return None

    def read(self, reader: Reader, begin: str, tools: Sequence[Tool]) -> Wait[None]:
        yield from reader.accept("<|python_start|>")
        yield from reader.skip_space()
        if (yield from reader.starts_with("{")):
            yield from json_text.calls(reader, frozenset(tool.name for tool in tools), self.boundaries)
        else:
            yield from super().read(reader, begin, tools)
        yield from reader.skip_space()
        yield from reader.close("<|python_end|>")


def read_call(reader: Reader, types: dict[str, ArgumentTypes]) -> Wait[None]:
    """Read `NAME(KEY=VALUE, ...)`. Positional arguments get the names of the schema's properties."""
    name = (yield from reader.match(_NAME)).group()
    yield from reader.expect("(")
    if name not in types:
        raise Malformed
    reader.begin_call(name)
    positional = iter(types[name].names)
    separator = "{"
    while True:
        yield from reader.skip_space()
        if (yield from reader.accept(")")):
            break
        key = yield from _keyword(reader)
        if key is None and (key := next(positional, None)) is None:
            raise Malformed
        reader.arguments(f"{separator}{json_string(key)}: ")
        separator = ", "
        yield from literals.value(reader, reader.arguments)
        yield from reader.skip_space()
        if not (yield from reader.accept(",")):
            yield from reader.expect(")")
            break
    reader.arguments("{}" if separator == "{" else "}")


def _keyword(reader: Reader) -> Wait[str | None]:
    """Read `KEY=` if it is next."""
    while True:
        found = _KEY.match(reader.text, reader.position)
        if found is None and (yield from reader.peek()):
            return None
        if found and found.end() < len(reader.text):
            break
        yield from reader.need()
    length = found.end() - reader.position
    if not (yield from reader.follows(length, ("=",))):
        return None
    reader.take(length)
    yield from reader.skip_space()
    if not (yield from reader.accept("=")):
        raise Cut
    return found.group()
