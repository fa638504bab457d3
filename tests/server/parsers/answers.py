"""Runs a parser over text in pieces and adds up its events."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from quire.server.parsers.answer import AnswerParser
from quire.server.parsers.events import Content, Event, Reasoning, ToolCallArguments, ToolCallBegin
from quire.server.parsers.registry import reasoning_format, tool_format
from quire.server.parsers.tools.base import Tool

TOOLS = [
    Tool(
        "get_weather",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "unit": {"enum": ["celsius", "fahrenheit"]},
                "metric": {"type": "boolean"},
                "where": {"type": "object"},
                "names": {"type": "array", "items": {"type": "string"}},
                "level": {"type": "number"},
                "note": {"type": ["string", "null"]},
            },
        },
    ),
    Tool("now", {"type": "object", "properties": {}}),
]


@dataclass
class Call:
    name: str
    arguments: str = ""
    call_id: str | None = None


@dataclass
class Answer:
    """The sum of events."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)


def add_up(events: Iterable[Event]) -> Answer:
    answer = Answer()
    for event in events:
        match event:
            case Content(text):
                answer.content += text
            case Reasoning(text):
                answer.reasoning += text
            case ToolCallBegin(index, name, call_id):
                assert index == len(answer.calls)
                answer.calls.append(Call(name, "", call_id))
            case ToolCallArguments(index, text):
                assert text and index == len(answer.calls) - 1
                answer.calls[index].arguments += text
    return answer


def parser(tools: str | None, reasoning: str | None = None, opened: bool = False, functions: Sequence[Tool] = TOOLS):
    return AnswerParser(
        tool_format(tools) if tools else None, reasoning_format(reasoning) if reasoning else None, functions, opened
    )


def events_of(parser: AnswerParser, pieces: Iterable[str]) -> list[Event]:
    return [*(event for piece in pieces for event in parser.push(piece)), *parser.finish()]


def parse(text: str, tools: str | None, reasoning: str | None = None, opened: bool = False) -> Answer:
    return add_up(events_of(parser(tools, reasoning, opened), [text]))


def cut(text: str, places: Iterable[int]) -> list[str]:
    """`text` cut at `places` (modulo its length)."""
    ends = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    return [text[start:end] for start, end in itertools.pairwise(ends)]
