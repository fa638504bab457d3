"""Kimi K2: a section of calls whose ids are `functions.NAME:INDEX`; INDEX counts the calls of the conversation.

<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>
<|tool_calls_section_end|>
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.server.parsers import json_text
from quire.server.parsers.reader import Malformed, Reader, Wait
from quire.server.parsers.recognition import HasToken
from quire.server.parsers.tools.base import (
    Tool,
    ToolFormat,
    arguments,
    json_schema,
    needs_structure,
    read_section,
    section_of_calls,
    sequence,
    tag,
    text,
)

_SECTION, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _ARGUMENTS, _CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


class KimiK2(ToolFormat):
    name = "kimi_k2"
    markers = (_SECTION, _SECTION_END, _CALL, _ARGUMENTS, _CALL_END)
    begins = (_SECTION,)

    def recognize(self, template: str, has_token: HasToken) -> str | None:
        return f"the chat template writes {_SECTION}" if _SECTION in template else None

    def call_id(self, name: str, index: int) -> str:
        return f"functions.{name}:{index}"

    def read(self, reader: Reader, begin: str, tools: Sequence[Tool]) -> Wait[None]:
        yield from read_section(reader, _SECTION, _CALL, _SECTION_END, self._call)

    def _call(self, reader: Reader) -> Wait[None]:
        yield from reader.expect(_CALL)
        call_id = yield from reader.name(_ARGUMENTS)
        name, colon, index = call_id.rpartition(":")
        name = (name if colon and index.isdigit() else call_id).removeprefix("functions.")
        if not name:
            raise Malformed
        reader.begin_call(name, call_id)
        yield from json_text.arguments(reader, self.boundaries)
        yield from json_text.close(reader, _CALL_END)

    def structure(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> dict[str, Any] | None:
        if not needs_structure(tools, required, parallel):
            return None
        index = {"type": "regex", "pattern": "[0-9]{1,4}"}
        tags = [
            tag(
                f"{_CALL}functions.{tool.name}:",
                sequence(index, text(_ARGUMENTS), arguments(tool, required, json_schema)),
                _CALL_END,
            )
            for tool in tools
        ]
        return section_of_calls(tags, _SECTION, _SECTION, _SECTION_END, required=required, parallel=parallel)
