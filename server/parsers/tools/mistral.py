"""Mistral: `[TOOL_CALLS]NAME[ARGS]{...}` for every call (tokenizer v11 and later; in v11 with `[CALL_ID]ID`);
before that, `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`.

The templates accept only ids of nine letters and digits.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Sequence
from typing import Any

from quire.server.parsers import json_text
from quire.server.parsers.reader import Malformed, Reader, Wait
from quire.server.parsers.recognition import HasToken
from quire.server.parsers.tools.base import (
    Tool,
    ToolFormat,
    arguments,
    json_calls,
    json_schema,
    marked_calls,
    needs_structure,
    section_of_calls,
    sequence,
    tag,
    text,
)

_BEGIN, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAME = re.compile(r"[\w.\-]+")
_CALL_ID = re.compile(r"\w+")
_ID_CHARACTERS = string.ascii_letters + string.digits


class Mistral(ToolFormat):
    name = "mistral"
    markers = (_BEGIN, _ID, _ARGUMENTS)
    begins = (_BEGIN,)

    def recognize(self, template: str, has_token: HasToken) -> str | None:
        if _BEGIN in template and _ARGUMENTS in template:
            return f"the chat template writes {_BEGIN}name{_ARGUMENTS}"
        return None

    def call_id(self, name: str, index: int) -> str:
        return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(9))

    def read(self, reader: Reader, begin: str, tools: Sequence[Tool]) -> Wait[None]:
        yield from reader.expect(_BEGIN)
        yield from reader.skip_space()
        if (yield from reader.peek()) in ("[", "{"):
            yield from json_text.calls(reader, ends=self.boundaries)
            return
        yield from self._call(reader)
        while _NAME.match((yield from reader.peek())):  # some templates write the marker only before the first call
            reader.hold()
            yield from self._call(reader)

    def _call(self, reader: Reader) -> Wait[None]:
        name = (yield from reader.match(_NAME)).group()
        call_id = None
        if (yield from reader.accept(_ID)):
            call_id = (yield from reader.match(_CALL_ID)).group()
        if not (yield from reader.accept(_ARGUMENTS)) and not (yield from reader.starts_with("{")):
            raise Malformed
        reader.begin_call(name, call_id)
        yield from json_text.arguments(reader, self.boundaries)
        yield from json_text.closers(reader)

    def structure(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> dict[str, Any] | None:
        if not needs_structure(tools, required, parallel):
            return None
        call_id = {"type": "regex", "pattern": r"(\[CALL_ID\][a-zA-Z0-9]{9})?"}
        tags = [
            tag(
                _BEGIN + tool.name,
                sequence(call_id, text(_ARGUMENTS), arguments(tool, required, json_schema)),
                "",
            )
            for tool in tools
        ]
        return marked_calls(tags, _BEGIN, separator="", required=required, parallel=parallel)


class MistralJson(Mistral):
    """Mistral's calls up to tokenizer v7."""

    name = "mistral_json"

    def recognize(self, template: str, has_token: HasToken) -> str | None:
        for mark in (_BEGIN, "[AVAILABLE_TOOLS]"):
            if mark in template:
                return f"the chat template writes {mark}, and no {_ARGUMENTS}"
        return None

    def structure(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> dict[str, Any] | None:
        if not needs_structure(tools, required, parallel):
            return None
        tags = json_calls(tools, required)
        return section_of_calls(tags, _BEGIN, _BEGIN + " [", "]", separator=", ", required=required, parallel=parallel)
