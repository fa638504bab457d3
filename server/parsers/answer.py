"""The parser of one choice: thoughts and content with calls, in any number and order."""

from __future__ import annotations

from collections.abc import Sequence

from quire.server.parsers.events import Event
from quire.server.parsers.harmony import HARMONY, HarmonyTools, read_harmony
from quire.server.parsers.markers import Markers
from quire.server.parsers.reader import Malformed, Reader, Wait
from quire.server.parsers.reasoning.base import ReasoningFormat
from quire.server.parsers.tools.base import Tool, ToolFormat


class AnswerParser:
    """An `OutputParser` (see events.py) for a tool format and a reasoning format, or one of them, or neither.

    `tools` are the functions that the request lets the model call; without any, no calls are looked for. `opened` says
    that the prompt ends inside a block of thoughts (`ReasoningFormat.opened`).
    """

    def __init__(
        self,
        tool_format: ToolFormat | None,
        reasoning: ReasoningFormat | None,
        tools: Sequence[Tool] = (),
        opened: bool = False,
    ):
        self._reader = Reader()
        if isinstance(tool_format, HarmonyTools) or reasoning is HARMONY:
            self._reading = read_harmony(self._reader, opened, may_call=bool(tools))
        else:
            answer = _Answer(self._reader, tool_format if tools else None, reasoning, tools)
            self._reading = answer.read(opened)
        next(self._reading, None)

    def push(self, text: str) -> list[Event]:
        self._reader.feed(text)
        next(self._reading, None)
        return self._reader.take_events()

    def finish(self) -> list[Event]:
        self._reader.ended = True
        next(self._reading, None)
        return self._reader.take_events()


class _Answer:
    """Reads an answer whose thoughts and calls are between markers."""

    def __init__(
        self, reader: Reader, tool_format: ToolFormat | None, reasoning: ReasoningFormat | None, tools: Sequence[Tool]
    ):
        self._reader = reader
        self._format = tool_format
        self._reasoning = reasoning
        self._tools = tools
        self._first = tool_format.first if tool_format else ()
        self._begins = frozenset(tool_format.begins if tool_format else ())
        self._interrupts = frozenset(reasoning.interrupts if reasoning and tool_format else ())
        # markers without their thoughts or calls are neither content nor thoughts
        strays = frozenset((*(tool_format.strays if tool_format else ()), *(reasoning.strays if reasoning else ())))
        self._strays = strays
        self._ends = Markers((*reasoning.ends, *self._interrupts, *strays) if reasoning else ())
        self._markers = Markers((*self._begins, *strays))

    def read(self, opened: bool) -> Wait[None]:
        reader = self._reader
        if opened:
            yield from reader.skip_space()
            yield from reader.accept(self._reasoning.begin)
            yield from self._thoughts()
        while True:
            yield from self._first_calls()
            if not (yield from self._content()):
                return

    def _content(self) -> Wait[bool]:
        """Yield content up to a block of thoughts or calls, and the block. Return False at the end of the text."""
        reader = self._reader
        while (marker := (yield from reader.text_until(self._markers, reader.content))) is not None:
            num_spaces = reader.text.index(marker, reader.position) - reader.position
            spaces = reader.text[reader.position : reader.position + num_spaces]
            if reader.code.is_inside(spaces):
                reader.content(reader.take(num_spaces + len(marker)))
                continue
            reader.take(num_spaces)
            if self._reasoning and marker in self._reasoning.begins:
                reader.take(len(marker))
                reader.gap(spaces)
                yield from self._thoughts()
                return True
            if marker in self._begins and (yield from self._finds_calls(marker)):
                yield from self._end_block(spaces)
                return True
            reader.take(len(marker))
            if marker in self._strays:
                yield from self._end_block(spaces)
            else:
                reader.content(spaces + marker)
        return False

    def _finds_calls(self, marker: str) -> Wait[bool]:
        """Read calls at `marker`, which is next. Return False if there is none; the marker then stays unread."""
        num_calls = self._reader.num_calls
        found = yield from self._reader.attempt(self._format.read(self._reader, marker, self._tools))
        return found or self._reader.num_calls > num_calls

    def _thoughts(self) -> Wait[None]:
        """Yield a block of thoughts from after its begin marker to after its end marker."""
        reader, reasoning = self._reader, self._reasoning
        yield from reader.skip_space()
        while True:
            marker = yield from reader.text_until(self._ends, reader.reasoning)
            if marker is None:
                return
            num_spaces = reader.text.index(marker, reader.position) - reader.position
            if marker in reasoning.ends:
                reader.take(num_spaces + len(marker))
                yield from self._end_block()
                return
            spaces = reader.take(num_spaces)
            if marker in self._interrupts and (yield from self._finds_calls(marker)):
                yield from self._end_block()
                return
            reader.take(len(marker))
            reader.reasoning(spaces)

    def _first_calls(self) -> Wait[None]:
        """Read calls without a marker, which count as calls only where content could begin."""
        while self._first and (yield from self._reader.attempt(self._first_call())):
            yield from self._end_block()

    def _first_call(self) -> Wait[None]:
        yield from self._reader.skip_space()
        for begin in self._first:
            if (yield from self._reader.starts_with(begin)):
                yield from self._format.read(self._reader, begin, self._tools)
                return
        raise Malformed

    def _end_block(self, before: str = "") -> Wait[None]:
        """End a block: the white space around it belongs to it, and the next text starts a new line."""
        reader = self._reader
        yield from reader.skip_space()
        reader.gap(before)
        reader.code.end_line()
