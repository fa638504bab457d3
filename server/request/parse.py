"""The stage between generation and dialect that finds reasoning and tool calls in the text.

    Delta(text="<think>hm</think>Hi", token_ids=[...]) -> the same delta with events=[Reasoning("hm"), Content("Hi")]

Requests that need no parsing do not pass through it. Stop strings are looked for before, in the text as the model
writes it, as in vLLM: one that occurs in thoughts or in a call ends the answer there.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass

from quire.server.parsers.answer import AnswerParser
from quire.server.parsers.events import Event, Reasoning, ToolCallArguments, ToolCallBegin
from quire.server.parsers.tools.base import Tool
from quire.server.request.custom_input import CustomInput
from quire.server.request.delta import Delta
from quire.server.request.formats import Formats


@dataclass(frozen=True, slots=True)
class Parsing:
    """The parsing of the answers to one prompt.

    tools: those that may be called; none: text that looks like a call is text. custom: those that take a text.
    separate: whether reasoning is told from content. opened: whether the prompt ends within thoughts. stream: give
    reasoning in pieces, else whole. short_ids: the template takes ids of nine characters only. num_calls: calls that
    the conversation has already.
    """

    formats: Formats
    tools: tuple[Tool, ...] = ()
    custom: frozenset[str] = frozenset()
    separate: bool = True
    opened: bool = False
    stream: bool = True
    short_ids: bool = False
    num_calls: int = 0

    def parser(self) -> AnswerParser:
        formats = self.formats
        return AnswerParser(
            formats.tools if self.tools else None,
            formats.reasoning if self.separate else None,
            self.tools,
            self.opened and self.separate,
        )

    def call_id(self, event: ToolCallBegin) -> str:
        """Return the id of a call: the model's own, the format's, or a new one."""
        if event.call_id is not None:
            return event.call_id
        made = self.formats.tools.call_id(event.name, self.num_calls + event.index)
        if made is not None:
            return made
        return uuid.uuid4().hex[:9] if self.short_ids else f"call_{uuid.uuid4().hex[:24]}"

    async def __call__(self, deltas: AsyncIterator[Delta]) -> AsyncIterator[Delta]:
        """Yield the stage (`deltas.Stage`)."""
        choices: dict[int, _Choice] = {}
        async for delta in deltas:
            if delta.error is None:
                choice = choices.get(delta.index)
                if choice is None:
                    choice = choices[delta.index] = _Choice(self)
                choice.advance(delta)
            yield delta


class _Choice:
    """One choice as it is parsed."""

    def __init__(self, parsing: Parsing):
        self.parsing = parsing
        self.parser = parsing.parser()
        self.thoughts = ThoughtCounter(parsing)
        self.called = False
        self.inputs: dict[int, CustomInput] = {}  # calls of custom tools
        self.held: list[Reasoning] = []  # until the thoughts have ended, if they are not streamed

    def advance(self, delta: Delta) -> None:
        """Parse the delta's text into its `events`."""
        events = self.parser.push(delta.text) if delta.text else []
        if delta.finish_reason is not None:
            events += self.parser.finish()
        delta.num_reasoning_tokens = self.thoughts.count(delta.token_ids, events)
        events = [event for found in events for event in self._as_sent(found)]
        if not self.parsing.stream:
            events = self._without_pieces(events, delta.finish_reason is not None)
        delta.events = events
        if delta.finish_reason == "stop" and self.called:
            delta.finish_reason = "tool_calls"

    def _as_sent(self, event: Event) -> list[Event]:
        """Return the event as dialects need it: every call has an id, and a custom tool's arguments are its text."""
        if isinstance(event, ToolCallBegin):
            self.called = True
            if event.name in self.parsing.custom:
                self.inputs[event.index] = CustomInput()
            return [dataclasses.replace(event, call_id=self.parsing.call_id(event))]
        if isinstance(event, ToolCallArguments) and event.index in self.inputs:
            text = self.inputs[event.index].push(event.text)
            return [ToolCallArguments(event.index, text)] if text else []
        return [event]

    def _without_pieces(self, events: list[Event], ended: bool) -> list[Event]:
        out: list[Event] = []
        for event in events:
            if isinstance(event, Reasoning):
                self.held.append(event)
            else:
                out += self._whole()
                out.append(event)
        return out + self._whole() if ended else out

    def _whole(self) -> list[Event]:
        held, self.held = self.held, []
        return [Reasoning("".join(event.text for event in held))] if held else []


class ThoughtCounter:
    """Counts the tokens between the markers of thoughts, without the markers, as they arrive.

    Markers are found by their ids. Where these do not tell (a marker that is spelled in several ways), the parser's
    reading of the text does, up to the pieces in which the text comes.
    """

    def __init__(self, parsing: Parsing):
        formats = parsing.formats
        self.begin, self.end = formats.begin, formats.end
        self.inside = parsing.opened
        self.active = formats.reasoning is not None
        self.recent: list[int] = []  # as many tokens as the longer marker has
        self.num_inside = 0  # tokens since the thoughts began

    def count(self, token_ids: list[int], events: list[Event]) -> int:
        """Return how many of the tokens are thoughts; a marker of several tokens is taken back when it is complete."""
        if not self.active:
            return 0
        before, counted = self.inside, 0
        for token_id in token_ids:
            counted += self._token(token_id)
        if before and self.inside and events and not isinstance(events[-1], Reasoning):
            self.inside = False  # the text has left the thoughts, by a marker of other ids
        return counted

    def _token(self, token_id: int) -> int:
        self.recent = [*self.recent, token_id][-max(len(self.begin), len(self.end)) :]
        if not self.inside:
            if self._ends_with(self.begin):
                self.inside, self.num_inside = True, 0
            return 0
        self.num_inside += 1
        if self._ends_with(self.end):
            self.inside = False
            return 1 - min(len(self.end), self.num_inside)
        return 1

    def _ends_with(self, marker: tuple[int, ...]) -> bool:
        return bool(marker) and tuple(self.recent[-len(marker) :]) == marker
