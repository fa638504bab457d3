"""DeepSeek V3, R1 and V3.1: a section of calls between special tokens.

<｜tool▁calls▁begin｜> CALL ... <｜tool▁calls▁end｜>

CALL of V3, R1:  <｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\\n```json\\n{...}\\n```<｜tool▁call▁end｜>
CALL of V3.1:    <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>
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
    tag,
)

_SECTION, _SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEPARATOR, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


class DeepseekV31(ToolFormat):
    name = "deepseek_v31"
    markers = (_SECTION, _SECTION_END, _CALL, _SEPARATOR, _CALL_END)
    begins = (_SECTION,)
    before_arguments, after_arguments = _SEPARATOR, _CALL_END
    before_name = _CALL
    between_calls = ""

    def recognize(self, template: str, has_token: HasToken) -> str | None:
        if _SECTION in template:
            return f"the chat template writes {_SECTION}, and arguments as plain JSON"
        return None

    def read(self, reader: Reader, begin: str, tools: Sequence[Tool]) -> Wait[None]:
        yield from read_section(reader, _SECTION, _CALL, _SECTION_END, self._call)

    def _call(self, reader: Reader) -> Wait[None]:
        yield from reader.expect(self.before_name)
        name = yield from reader.name(self.before_arguments)
        if not name:
            raise Malformed
        reader.begin_call(name)
        yield from json_text.arguments(reader, self.boundaries)
        yield from json_text.close(reader, self.after_arguments.lstrip())
        yield from reader.close(_CALL_END)

    def structure(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> dict[str, Any] | None:
        if not needs_structure(tools, required, parallel):
            return None
        tags = [
            tag(
                self.before_name + tool.name + self.before_arguments,
                arguments(tool, required, json_schema),
                self.after_arguments,
            )
            for tool in tools
        ]
        return section_of_calls(
            tags, _SECTION, _SECTION, _SECTION_END, separator=self.between_calls, required=required, parallel=parallel
        )


class DeepseekV3(DeepseekV31):
    name = "deepseek_v3"
    before_name = f"{_CALL}function{_SEPARATOR}"
    before_arguments = "\n```json\n"
    after_arguments = f"\n```{_CALL_END}"
    between_calls = "\n"

    @property
    def strays(self) -> tuple[str, ...]:
        return (self.after_arguments, *self.markers)  # otherwise its fence would open a code block in the content

    def recognize(self, template: str, has_token: HasToken) -> str | None:
        if _SECTION in template and "```json" in template:
            return f"the chat template writes {_SECTION}, and arguments in ```json"
        return None
