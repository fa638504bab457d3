"""The events of a parser: content, reasoning and tool calls, in the order of the text.

A parser sees one choice. Splitting the text differently changes where events are split, never their concatenation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True, frozen=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(slots=True, frozen=True)
class Reasoning:
    """Text of the model's thinking."""

    text: str


@dataclass(slots=True, frozen=True)
class ToolCallBegin:
    """A tool call begins. `index` counts the calls of a choice from 0. `call_id` is the id that the model wrote, None
    in formats without one.
    """

    index: int
    name: str
    call_id: str | None = None


@dataclass(slots=True, frozen=True)
class ToolCallArguments:
    """The next part of a call's arguments: JSON text for a function, plain text for a custom tool."""

    index: int
    text: str


Event = Content | Reasoning | ToolCallBegin | ToolCallArguments


class OutputParser(Protocol):
    """Turns the text of one choice into events. Never raises for any text: what is malformed or cut off becomes
    content, or the arguments received so far, closed. The arguments of a function are always a JSON object.
    """

    def push(self, text: str) -> list[Event]: ...

    def finish(self) -> list[Event]:
        """End the text."""
