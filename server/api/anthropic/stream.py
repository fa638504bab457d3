"""Events of an answer -> Anthropic's content blocks, whole or as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from typing import Any

import msgspec

from quire.server.api.anthropic.caching import Caching
from quire.server.api.anthropic.protocol import ContentBlock, MessageResponse
from quire.server.error_shapes import anthropic_body
from quire.server.errors import ApiError
from quire.server.http import sse
from quire.server.parsers.events import Content, Event, Reasoning, ToolCallArguments, ToolCallBegin
from quire.server.parsers.model_json import raw_object
from quire.server.request.delta import Delta
from quire.server.request.usage import TokenUsage
from quire.server.values import Json

_STOP_REASONS = {"length": "max_tokens", "timeout": "max_tokens", "tool_calls": "tool_use"}


def error_event(error: ApiError) -> bytes:
    return sse.event(anthropic_body(error.status, error.message), "error")


def stopped(finish_reason: str | None, stop_reason: int | str | None, clipped: bool) -> tuple[str | None, str | None]:
    """Return (stop_reason, stop_sequence). `clipped`: the context holds less than the request's max_tokens."""
    if finish_reason == "length" and clipped and stop_reason != "timeout":
        return "model_context_window_exceeded", None
    if finish_reason == "stop" and isinstance(stop_reason, str):
        return "stop_sequence", stop_reason
    return finish_reason and _STOP_REASONS.get(finish_reason, "end_turn"), None


def events_of(delta: Delta) -> list[Event]:
    """Return the events of a parsed delta, or its text as content."""
    if delta.events is not None:
        return delta.events
    return [Content(delta.text)] if delta.text else []


# ---- whole


def blocks(events: list[Event]) -> list[ContentBlock]:
    """Return the content of a whole answer."""
    out: list[ContentBlock] = []
    arguments: dict[int, list[str]] = {}
    for event in events:
        match event:
            case Content(text):
                if out and out[-1].type == "text":
                    out[-1].text += text
                else:
                    out.append(ContentBlock(type="text", text=text))
            case Reasoning(text):
                if out and out[-1].type == "thinking":
                    out[-1].thinking += text
                else:
                    out.append(ContentBlock(type="thinking", thinking=text, signature=""))
            case ToolCallBegin():
                arguments[len(out)] = []
                out.append(ContentBlock(type="tool_use", id=event.call_id, name=event.name))
            case ToolCallArguments(_, text):
                arguments[max(arguments)].append(text)
    for i, texts in arguments.items():
        out[i].input = raw_object("".join(texts))
    return [block for block in out if block.type != "text" or block.text.strip() or len(out) == 1]


# ---- streamed


class Stream:
    """Writes the deltas of one choice as events."""

    def __init__(self, message: MessageResponse, used: TokenUsage, clipped: bool, cached: Caching):
        self.message, self.used, self.clipped, self.cached = message, used, clipped, cached
        self.started = False
        self.index = -1  # of the open block
        self.open: str | None = None  # its type

    async def frames(self, stream: AsyncGenerator[Delta, None]) -> AsyncGenerator[bytes, None]:
        """Yield bytes of whole events. Closing it aborts the generation."""
        try:
            async for delta in stream:
                if frame := b"".join(self._frames(delta)):
                    yield frame
        finally:
            await stream.aclose()

    def _frames(self, delta: Delta) -> Iterator[bytes]:
        self.used.add(delta)
        if not self.started:
            self.started = True
            self.message.usage = self.cached.usage(self.used)
            self.message.usage.output_tokens = 0
            yield _event("message_start", message=self.message)
        for event in events_of(delta):
            yield from self._event(event)
        if delta.finish_reason is not None:
            yield from self._close()
            reason, sequence = stopped(delta.finish_reason, delta.stop_reason, self.clipped)
            yield _event(
                "message_delta",
                delta={"stop_reason": reason, "stop_sequence": sequence},
                usage=self.cached.usage(self.used),
            )
            yield _event("message_stop")

    def _event(self, event: Event) -> Iterator[bytes]:
        match event:
            case Content(text):
                if self.open == "text" or text.strip():  # white space alone between blocks makes no block
                    yield from self._in("text", {"type": "text", "text": ""})
                    yield self._delta("text_delta", text=text)
            case Reasoning(text):
                yield from self._in("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                yield self._delta("thinking_delta", thinking=text)
            case ToolCallBegin():
                yield from self._close()
                block = {"type": "tool_use", "id": event.call_id, "name": event.name, "input": {}}
                yield from self._in("tool_use", block)
            case ToolCallArguments(_, text):
                yield self._delta("input_json_delta", partial_json=text)

    def _in(self, kind: str, block: dict[str, Any]) -> Iterator[bytes]:
        """Open a block of this kind unless one is open."""
        if self.open != kind:
            yield from self._close()
            self.index, self.open = self.index + 1, kind
            yield _event("content_block_start", index=self.index, content_block=block)

    def _close(self) -> Iterator[bytes]:
        if self.open == "thinking":
            yield self._delta("signature_delta", signature="")
        if self.open is not None:
            yield _event("content_block_stop", index=self.index)
            self.open = None

    def _delta(self, kind: str, **fields: str) -> bytes:
        return _event("content_block_delta", index=self.index, delta={"type": kind} | fields)


def _event(kind: str, **fields: Json) -> bytes:
    return sse.event(msgspec.json.encode({"type": kind} | fields), kind)
