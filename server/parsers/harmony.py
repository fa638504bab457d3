"""Harmony, the format of gpt-oss, in which thoughts, calls and content are all messages.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json
    <|message|>{...}<|call|>   or   <|channel|>final<|message|>...<|return|>

The prompt ends with `<|start|>assistant`. The recipient of a call (`to=`) may also stand before the channel. Format:
https://cookbook.openai.com/articles/openai-harmony
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from quire.server.parsers import json_text
from quire.server.parsers.markers import Markers
from quire.server.parsers.reader import Malformed, Reader, Wait
from quire.server.parsers.reasoning.base import ReasoningFormat
from quire.server.parsers.recognition import HasToken
from quire.server.parsers.tools.base import (
    Format,
    Tool,
    ToolFormat,
    arguments,
    json_schema,
    needs_structure,
    sequence,
    structural_tag,
    text,
)

_CHANNEL, _START, _MESSAGE = "<|channel|>", "<|start|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_STRAYS = (_MESSAGE, "<|constrain|>")  # dropped within a message
_MARKERS = Markers((*_ENDS, _START, _CHANNEL, *_STRAYS))
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")


def _recognize(template: str, has_token: HasToken) -> str | None:
    if _CHANNEL in template and _MESSAGE in template:
        return f"the chat template writes {_CHANNEL} and {_MESSAGE}"
    return None


HARMONY = ReasoningFormat(
    "gpt_oss",
    begin="<|channel|>analysis<|message|>",
    end="<|channel|>final<|message|>",
    recognize=_recognize,
    forced_end="<|end|><|start|>assistant<|channel|>final<|message|>",
    forced_to_calls="<|end|><|start|>assistant<|channel|>commentary",
    tokens=(_CHANNEL, _START, *_STRAYS, *_ENDS),
)


class HarmonyTools(ToolFormat):
    """The calls of Harmony. AnswerParser reads the whole answer with `read_harmony`."""

    name = "gpt_oss"
    markers = HARMONY.markers
    covers_reasoning = True

    def recognize(self, template: str, has_token: HasToken) -> str | None:
        return _recognize(template, has_token)

    def read(self, reader: Reader, begin: str, tools: Sequence[Tool]) -> Wait[None]:
        return read_harmony(reader)

    def structure(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> dict[str, Any] | None:
        """Return the structure of the whole answer, with thoughts. The model stops after a call: at most one."""
        if not needs_structure(tools, required, parallel):
            return None
        messages = [_message("analysis"), _message("commentary")]
        last = {"type": "or", "elements": [_call(tool, required) for tool in tools]}
        if not required:
            last["elements"].append(sequence(text(f"{_CHANNEL}final{_MESSAGE}"), _body()))
        return structural_tag(sequence({"type": "star", "content": {"type": "or", "elements": messages}}, last))


def _body() -> Format:
    return {"type": "any_text", "excludes": [*_ENDS, _START, _CHANNEL]}


def _message(channel: str) -> Format:
    """Return a message that is not the last."""
    return sequence(text(f"{_CHANNEL}{channel}{_MESSAGE}"), _body(), text(f"<|end|>{_START}assistant"))


def _call(tool: Tool, required: bool) -> Format:
    """Return a call up to its `<|call|>`, which ends generation and is not part of the grammar."""
    header = f"{_CHANNEL}commentary to=functions.{tool.name} <|constrain|>json{_MESSAGE}"
    return sequence(text(header), arguments(tool, required, json_schema))


def read_harmony(reader: Reader, opened: bool = False, may_call: bool = True) -> Wait[None]:
    """Read a whole answer. Text outside of messages is content, and so are calls without `may_call`."""
    if opened:
        yield from _read_body(reader, reader.reasoning)
    while (yield from reader.at_least(1)):
        if not (yield from reader.attempt(_read_message(reader, may_call))) and (yield from reader.at_least(1)):
            yield from _read_stray(reader)


def _read_stray(reader: Reader) -> Wait[None]:
    """Yield text up to the next message; drop a marker that begins none."""
    for marker in HARMONY.markers:
        if (yield from reader.accept(marker)):
            return
    reader.content(reader.take(1))
    yield from reader.text_until(_MARKERS, reader.content, strip=False)


def _read_message(reader: Reader, may_call: bool) -> Wait[None]:
    yield from _expect_header(reader)
    header = yield from reader.name(_MESSAGE)
    reader.hold()
    recipient = _RECIPIENT.search(header)
    channel = _CHANNEL_NAME.search(header)
    to_function = recipient is not None and recipient[1].startswith("functions.") and recipient[1] != "functions."
    if to_function and may_call:
        reader.begin_call(recipient[1].removeprefix("functions."))
        yield from _read_arguments(reader)
    elif to_function or not (recipient or (channel and channel[1] == "analysis")):
        yield from _read_body(reader, reader.content)
    else:  # thoughts, or the call of a built-in tool, which the client does not see as a call
        yield from _read_body(reader, reader.reasoning)


def _expect_header(reader: Reader) -> Wait[None]:
    for begin in (_CHANNEL, _START, " to="):
        if (yield from reader.starts_with(begin)):
            return
    raise Malformed


def _read_body(reader: Reader, emit: Callable[[str], None]) -> Wait[None]:
    """Yield text up to a marker, and the marker if it only ends the message."""
    while True:
        marker = yield from reader.text_until(_MARKERS, emit, strip=False)
        if marker in _ENDS or marker in _STRAYS:
            reader.take(len(marker))
        if marker not in _STRAYS:
            break
    if marker in _ENDS:
        yield from reader.skip_space()


def _read_arguments(reader: Reader) -> Wait[None]:
    """Read arguments; if the message is not JSON up to its end, the text is content."""
    yield from reader.skip_space()
    if not (yield from reader.starts_with("<|")):
        yield from json_text.arguments(reader, _MARKERS)
    reader.end_call()
    yield from json_text.closers(reader)
    yield from reader.skip_space()
    yield from _read_body(reader, reader.content)
