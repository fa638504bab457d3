"""Hermes 2 Pro, Qwen 2.5 and Qwen 3: `<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>`, one per call."""

from __future__ import annotations

from collections.abc import Sequence

from quire.server.parsers import json_text
from quire.server.parsers.reader import Reader, Wait
from quire.server.parsers.tools.base import HasToken, JsonCalls, Tool


class Hermes(JsonCalls):
    name = "hermes"
    markers = ("<tool_call>", "</tool_call>")
    begins = ("<tool_call>",)
    opening = "<tool_call>\n"
    closing = "\n</tool_call>"

    def recognize(self, template: str, has_token: HasToken) -> str | None:
        if "<tool_call>" in template and '"arguments' in template.replace("\\", ""):
            return "the chat template writes JSON calls in <tool_call>"
        return None

    def read(self, reader: Reader, begin: str, tools: Sequence[Tool]) -> Wait[None]:
        yield from reader.expect(begin)
        yield from reader.skip_space()
        yield from json_text.call(reader)
        yield from reader.skip_space()
        yield from reader.accept("</tool_call>")
