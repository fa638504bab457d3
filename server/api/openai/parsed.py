"""Events of a parsed answer (`server/parsers/events.py`) in the API's form: a message, or the deltas of a stream."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET

from quire.server.api.openai.objects import (
    ChatDelta,
    CustomCall,
    FunctionCall,
    ResponseMessage,
    ToolCall,
    ToolCallDelta,
)
from quire.server.api.openai.protocol import ChatCompletionRequest
from quire.server.parsers.events import Content, Event, Reasoning, ToolCallArguments, ToolCallBegin


class EventWriter:
    """Writes the events of one request, of any of its choices."""

    def __init__(self, body: ChatCompletionRequest, reasoning_field: str):
        excluded = body.include_reasoning is False or (body.reasoning is not None and body.reasoning.exclude)
        names = ("reasoning_content", "reasoning") if reasoning_field == "both" else (reasoning_field,)
        self.reasoning_fields = () if excluded else names
        self.old_form = bool(body.functions)  # a single call, as `function_call`
        self.custom = frozenset(tool.custom.name for tool in body.tools or () if tool.custom is not None)
        self.custom_calls: set[tuple[int, int]] = set()  # (choice, call) of a stream

    def finish_reason(self, reason: str | None) -> str | None:
        return "function_call" if reason == "tool_calls" and self.old_form else reason

    # ---- streamed

    def delta(self, index: int, event: Event) -> ChatDelta | None:
        """Return the delta of choice `index` for an event; None if the client does not see it."""
        match event:
            case Content(text):
                return ChatDelta(content=text)
            case Reasoning(text):
                return self._reasoning(text)
            case ToolCallBegin():
                return self._begin(index, event)
            case ToolCallArguments():
                return self._arguments(index, event)

    def _reasoning(self, text: str) -> ChatDelta | None:
        return ChatDelta(**dict.fromkeys(self.reasoning_fields, text)) if self.reasoning_fields else None

    def _begin(self, index: int, event: ToolCallBegin) -> ChatDelta | None:
        if self.old_form:
            return ChatDelta(function_call=FunctionCall(event.name, "")) if event.index == 0 else None
        if event.name in self.custom:
            self.custom_calls.add((index, event.index))
            call = ToolCallDelta(event.index, event.call_id, "custom", custom=CustomCall(event.name, ""))
        else:
            call = ToolCallDelta(event.index, event.call_id, "function", FunctionCall(event.name, ""))
        return ChatDelta(tool_calls=[call])

    def _arguments(self, index: int, event: ToolCallArguments) -> ChatDelta | None:
        if self.old_form:
            return ChatDelta(function_call=FunctionCall(UNSET, event.text)) if event.index == 0 else None
        if (index, event.index) in self.custom_calls:
            return ChatDelta(tool_calls=[ToolCallDelta(event.index, custom=CustomCall(UNSET, event.text))])
        return ChatDelta(tool_calls=[ToolCallDelta(event.index, function=FunctionCall(UNSET, event.text))])

    # ---- whole

    def message(self, events: Sequence[Event]) -> ResponseMessage:
        content = "".join(event.text for event in events if isinstance(event, Content))
        reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
        begins = [event for event in events if isinstance(event, ToolCallBegin)]
        arguments: dict[int, list[str]] = {event.index: [] for event in begins}
        for event in events:
            if isinstance(event, ToolCallArguments):
                arguments[event.index].append(event.text)
        calls = [self._call(event, "".join(arguments[event.index])) for event in begins]
        message = ResponseMessage(content=content if content or not (calls or reasoning) else None)
        if reasoning:
            for name in self.reasoning_fields:
                setattr(message, name, reasoning)
        if calls and self.old_form:
            message.function_call = calls[0].function
        elif calls:
            message.tool_calls = calls
        return message

    def _call(self, event: ToolCallBegin, arguments: str) -> ToolCall:
        if event.name in self.custom:
            return ToolCall(event.call_id, "custom", custom=CustomCall(event.name, arguments))
        return ToolCall(event.call_id, "function", FunctionCall(event.name, arguments))
