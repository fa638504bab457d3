"""Hermes 2 Pro, Qwen 2.5, Qwen 3, Granite 4: `<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>` for every
call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.server.parsers import json_text
from quire.server.parsers.reader import Reader, Wait
from quire.server.parsers.recognition import HasToken
from quire.server.parsers.tools.base import Tool, ToolFormat, json_calls, marked_calls, needs_structure


class Hermes(ToolFormat):
    name = "hermes"
    markers = ("<tool_call>", "</tool_call>")
    begins = ("<tool_call>",)

    def recognize(self, template: str, has_token: HasToken) -> str | None:
        if "<tool_call>" in template and '"arguments' in template.replace("\\", ""):
            return "the chat template writes JSON calls in <tool_call>"
        return None

    def read(self, reader: Reader, begin: str, tools: Sequence[Tool]) -> Wait[None]:
        yield from reader.expect(begin)
        yield from reader.skip_space()
        yield from json_text.call(reader, ends=self.boundaries)
        yield from json_text.close(reader, "</tool_call>")

    def structure(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> dict[str, Any] | None:
        if not needs_structure(tools, required, parallel):
            return None
        tags = json_calls(tools, required, opening="<tool_call>\n", closing="\n</tool_call>")
        return marked_calls(tags, "<tool_call>", separator="\n", required=required, parallel=parallel)
