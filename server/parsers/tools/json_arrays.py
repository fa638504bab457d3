"""Formats of a marker and a JSON array of calls: Granite, Phi-4-mini; and JSON without a marker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.server.parsers import json_text
from quire.server.parsers.reader import Reader, Wait
from quire.server.parsers.recognition import HasToken
from quire.server.parsers.tools.base import (
    Tool,
    ToolFormat,
    first_calls,
    json_calls,
    needs_structure,
    section_of_calls,
    separated,
    tag,
)
from quire.server.parsers.tools.hermes import Hermes


class JsonArray(ToolFormat):
    """`begins[0] [{"name": ..., "arguments": {...}}, ...] closing`."""

    closing = ""

    def read(self, reader: Reader, begin: str, tools: Sequence[Tool]) -> Wait[None]:
        yield from reader.expect(begin)
        yield from reader.skip_space()
        yield from json_text.calls(reader, ends=self.boundaries)
        if self.closing:
            yield from json_text.close(reader, self.closing)

    def structure(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> dict[str, Any] | None:
        if not needs_structure(tools, required, parallel):
            return None
        begin = self.begins[0]
        return section_of_calls(
            json_calls(tools, required),
            begin,
            begin + "[",
            "]" + self.closing,
            separator=", ",
            required=required,
            parallel=parallel,
        )


class Granite(JsonArray):
    """Granite 3. Also reads calls as Granite 3.0 (`<tool_call>[...]`) and 4 write them."""

    name = "granite"
    markers = ("<|tool_call|>", "<tool_call>", "</tool_call>")
    begins = ("<|tool_call|>", "<tool_call>")

    def recognize(self, template: str, has_token: HasToken) -> str | None:
        if "<|tool_call|>" in template and "<|start_of_role|>" in template:
            return "the chat template writes <|tool_call|> and <|start_of_role|>"
        return None

    def read(self, reader: Reader, begin: str, tools: Sequence[Tool]) -> Wait[None]:
        yield from super().read(reader, begin, tools)
        yield from json_text.close(reader, "</tool_call>")


class Granite4(Granite):
    """Granite 4, which writes calls as Hermes does; also reads those of Granite 3."""

    name = "granite4"
    _written = Hermes()

    def recognize(self, template: str, has_token: HasToken) -> str | None:
        if "<|start_of_role|>" in template and (why := self._written.recognize(template, has_token)):
            return f"{why}, and <|start_of_role|>"
        return None

    def structure(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> dict[str, Any] | None:
        return self._written.structure(tools, required=required, parallel=parallel)


class Phi4Mini(JsonArray):
    name = "phi4_mini_json"
    markers = ("<|tool_call|>", "<|/tool_call|>")
    begins = ("<|tool_call|>", "functools")
    closing = "<|/tool_call|>"

    def recognize(self, template: str, has_token: HasToken) -> str | None:
        if "<|tool|>" in template and has_token("<|/tool_call|>"):
            return "the chat template has <|tool|>, and the tokenizer the token <|/tool_call|>"
        return None


class GenericJson(ToolFormat):
    """A bare call or array of calls, also in a Markdown block. Only functions of the request are calls."""

    name = "json"
    first = ("{", "[", "```")

    def recognize(self, template: str, has_token: HasToken) -> str | None:
        return "the chat template uses `tools` and shows no known format of calls" if "tools" in template else None

    def read(self, reader: Reader, begin: str, tools: Sequence[Tool]) -> Wait[None]:
        fenced = yield from reader.accept("```")
        if fenced:
            yield from reader.name("\n")
            yield from reader.skip_space()
        yield from json_text.calls(reader, frozenset(tool.name for tool in tools))
        if fenced:
            yield from json_text.close(reader, "```")

    def structure(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> dict[str, Any] | None:
        if not needs_structure(tools, required, parallel):
            return None
        calls = json_calls(tools, required)
        array = tag("[", separated(calls, ", ", parallel), "]")
        return first_calls({"type": "or", "elements": [*calls, array]}, "{[`", (), required=required)
