"""The answer to one request: the response as it changes, and its events as server-sent ones."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from quire.server.api.openai.responses.items import legible
from quire.server.api.openai.responses.namespaces import by_joined_name, joined
from quire.server.api.openai.responses.objects import (
    IncompleteDetails,
    OutputCompaction,
    OutputFunctionCall,
    OutputMessage,
    OutputReasoning,
    ResponseError,
    ResponseObject,
)
from quire.server.api.openai.responses.output import CUT, Output
from quire.server.error_shapes import INTERNAL
from quire.server.errors import ApiError, BadRequest, EngineError
from quire.server.http import sse
from quire.server.parsers.events import Content, Event, Reasoning, ToolCallArguments, ToolCallBegin
from quire.server.request.delta import Delta
from quire.server.request.usage import TokenUsage
from quire.server.values import Json

logger = logging.getLogger(__name__)


class Answer:
    """The answer. `transferred` returns the parameters for a server that continues the computed prompt."""

    def __init__(
        self,
        response: ResponseObject,
        output: Output,
        transferred: Callable[[], dict[str, Json] | UnsetType] = lambda: UNSET,
    ):
        self.response, self.output, self._transferred = response, output, transferred
        self.num_events = 0

    async def events(self, generation: AsyncGenerator[Delta, None]) -> AsyncGenerator[list[bytes], None]:
        """Yield all events but the last, one or several at a time. Closing it aborts the generation; a generation error
        becomes the response's error.
        """
        try:
            yield self.first()
            async for delta in generation:
                if events := [self.event(kind, fields) for kind, fields in self.output.push(delta)]:
                    yield events
            self.complete()
        except ApiError as error:
            self.fail(error)
        except Exception:
            logger.exception("%s failed", self.response.id)
            self.fail(EngineError(INTERNAL))
        finally:
            await generation.aclose()

    def first(self) -> list[bytes]:
        """Begin the response."""
        kinds = ["response.created", "response.in_progress"]
        if self.response.background:
            self.response.status = "queued"
            kinds.insert(1, "response.queued")
        out = []
        for kind in kinds:
            if kind == "response.in_progress":
                self.response.status = "in_progress"
            out.append(self.event(kind, {"response": self.response}))
        return out

    def last(self, body: bytes) -> bytes:
        """Return the event of the end; `body` is the response's JSON."""
        return last_event(self.response.status, body, self.num_events)

    def complete(self) -> None:
        """Handle an answer that ended by itself."""
        cut = self.output.finish_reason in CUT
        self._end("incomplete" if cut else "completed")
        if cut:
            self.response.incomplete_details = IncompleteDetails(reason="max_output_tokens")
        else:
            self.response.completed_at = int(time.time())

    def fail(self, error: ApiError) -> None:
        code = "invalid_prompt" if isinstance(error, BadRequest) else "server_error"
        self.response.error = ResponseError(code=code, message=error.message)
        self._end("failed")

    def cancel(self) -> None:
        self._end("cancelled")

    def _end(self, status: str) -> None:
        for _ in self.output.abandon():
            pass
        self.response.status = status
        self.response.output = self.output.items
        self.response.usage = self.output.usage()
        self.response.kv_transfer_params = self._transferred()

    def event(self, kind: str, fields: dict[str, Any]) -> bytes:
        self.num_events += 1
        return _encoded(kind, self.num_events - 1, fields)


def _encoded(kind: str, number: int, fields: dict[str, Any]) -> bytes:
    data = msgspec.json.encode({"type": kind, "sequence_number": number} | fields)
    return sse.event(data, kind)


def last_event(status: str, body: bytes, number: int) -> bytes:
    """Return the event with `number` that ends a response; `body` is its JSON."""
    kind = status if status in ("completed", "incomplete") else "failed"
    return _encoded(f"response.{kind}", number, {"response": msgspec.Raw(body)})


def replay(response: ResponseObject, body: bytes) -> list[bytes]:
    """Return the events of a response that has ended, its items whole."""
    encrypted = any(isinstance(item, OutputReasoning) and item.encrypted_content for item in response.output)
    key = response.id.removeprefix("resp_")
    tools, summarized = by_joined_name(response.tools), bool(response.reasoning.summary)
    compacts = any(isinstance(item, OutputCompaction) for item in response.output)
    output = Output(key, TokenUsage(0), tools, summarized, encrypted, None, compacts=compacts)
    answer = Answer(msgspec.structs.replace(response, output=[], usage=None, error=None, completed_at=None), output)
    events = answer.first()
    for event in _events_of(response):
        events += [answer.event(kind, fields) for kind, fields in output.add(event, [])]
    output.finish_reason = "length" if response.status == "incomplete" else None
    if response.output:
        events += [answer.event(kind, fields) for kind, fields in output.finish()]
    answer.response.status = response.status
    return [*events, answer.last(body)]


def _events_of(response: ResponseObject) -> Iterable[Event]:
    num_calls = 0
    for item in response.output:
        match item:
            case OutputMessage():
                yield Content("".join(part.text for part in item.content))
            case OutputCompaction():
                yield Content(legible(item.encrypted_content, item.id))
            case OutputReasoning():
                yield Reasoning("".join(part.text for part in (*item.summary, *item.content)))
            case _:
                yield ToolCallBegin(num_calls, joined(item.namespace or None, item.name), item.call_id)
                text = item.arguments if isinstance(item, OutputFunctionCall) else item.input
                yield ToolCallArguments(num_calls, text)
                num_calls += 1
