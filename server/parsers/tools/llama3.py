"""Llama 3.1 and later: the answer is `{"name": ..., "parameters": {...}}`, or several of these with `; ` between them.

`<|python_tag|>` may come before it. Nothing else marks a call, so only functions of the request are calls.
"""

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
    separated,
)


class Llama3Json(ToolFormat):
    name = "llama3_json"
    markers = ("<|python_tag|>",)
    begins = ("<|python_tag|>",)
    first = ("{",)

    def recognize(self, template: str, has_token: HasToken) -> str | None:
        if "<|start_header_id|>" in template and '"parameters": ' in template:
            return 'the chat template writes {"name": ..., "parameters": ...} after <|start_header_id|>'
        return None

    def read(self, reader: Reader, begin: str, tools: Sequence[Tool]) -> Wait[None]:
        names = frozenset(tool.name for tool in tools)
        yield from reader.accept("<|python_tag|>")
        while True:
            yield from reader.skip_space()
            yield from json_text.call(reader, names, self.boundaries)
            yield from json_text.closers(reader)
            yield from reader.skip_space()
            reader.hold()
            if not (yield from reader.accept(";")):
                return

    def structure(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> dict[str, Any] | None:
        if not needs_structure(tools, required, parallel):
            return None
        tags = json_calls(tools, required, key="parameters")
        return first_calls(separated(tags, "; ", parallel), "{", self.markers, required=required)
