"""Deltas of an answer -> the items of its output, and the events that tell of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec import UNSET

from quire.server.api.openai.logprobs import Formatter
from quire.server.api.openai.responses.items import opaque
from quire.server.api.openai.responses.namespaces import Named
from quire.server.api.openai.responses.objects import (
    InputTokensDetails,
    OutputCompaction,
    OutputCustomCall,
    OutputFunctionCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    OutputTokensDetails,
    ReasoningText,
    ResponseUsage,
    SummaryText,
)
from quire.server.parsers.events import Content, Event, Reasoning, ToolCallArguments, ToolCallBegin
from quire.server.request.delta import Delta
from quire.server.request.usage import TokenUsage
from quire.server.values import Json

CUT = ("length", "timeout")  # reasons why an answer ends early

ServerEvent = tuple[str, dict[str, Any]]  # type, and fields without `sequence_number`


class Output:
    """The output as it grows. Each method yields its events; `items` are complete after `finish`.

    key: prefix of the item ids. tools: those of the request, by the names that the model knows. summarized: thoughts
    are given as a summary. encrypted: thoughts have an `encrypted_content`. formatter: of log-probabilities, None
    without. prewarm: the request asks for no output. compacts: the content is the summary of a compaction.
    """

    def __init__(
        self,
        key: str,
        used: TokenUsage,
        tools: dict[str, Named],
        summarized: bool,
        encrypted: bool,
        formatter: Formatter | None,
        prewarm: bool = False,
        compacts: bool = False,
    ):
        self.compacts = compacts
        self.key, self.used, self.tools, self.prewarm = key, used, tools, prewarm
        self.summarized, self.encrypted, self.formatter = summarized, encrypted, formatter
        self.items: list[OutputItem] = []
        self.open = False  # whether the last item may still grow
        self.pieces: list[str] = []  # for its text
        self.logprobs: list[Any] = []
        self.space = ""  # white space that may begin a message or separate items
        self.finish_reason: str | None = None

    def push(self, delta: Delta) -> Iterator[ServerEvent]:
        self.used.add(delta)
        events = delta.events
        if events is None:
            events = [Content(delta.text)] if delta.text else []
        logprobs = self.formatter.chat(delta.logprobs).content if self.formatter and delta.logprobs else []
        for event in events:
            own = logprobs if isinstance(event, Content) else []
            yield from self.add(event, own)
            logprobs = [] if own else logprobs
        if delta.finish_reason is not None:
            self.finish_reason = "stop" if self.prewarm else delta.finish_reason
            yield from self.finish()

    def usage(self) -> ResponseUsage:
        used, counts = self.used, self.used.counts
        accepted, rejected = used.predicted or (UNSET, UNSET)
        return ResponseUsage(
            input_tokens=used.num_prompt,
            input_tokens_details=InputTokensDetails(
                cached_tokens=counts.cached,
                image_tokens=used.num_images or UNSET,
                video_tokens=used.num_videos or UNSET,
            ),
            output_tokens=used.num_output,
            output_tokens_details=OutputTokensDetails(
                reasoning_tokens=used.num_reasoning,
                accepted_prediction_tokens=accepted,
                rejected_prediction_tokens=rejected,
            ),
            total_tokens=used.num_prompt + used.num_output,
        )

    def add(self, event: Event, logprobs: list[Any]) -> Iterator[ServerEvent]:
        match event:
            case Content(text) if self.compacts:
                if not self.items:
                    yield from self._begin(OutputCompaction(id=self._id("cmp")))
                self.pieces.append(text)
            case Reasoning() if self.compacts:
                pass  # the thoughts end with the items that the summary replaces
            case Content(text):
                yield from self._content(text, logprobs)
            case Reasoning(text):
                if not self._is_open(OutputReasoning):
                    yield from self._begin(OutputReasoning(id=self._id("rs")))
                yield self._delta("reasoning_summary_text" if self.summarized else "reasoning_text", text)
            case ToolCallBegin():
                name, namespace, custom = self.tools.get(event.name) or Named(event.name, None, False)
                kind, prefix = (OutputCustomCall, "ctc") if custom else (OutputFunctionCall, "fc")
                call = kind(id=self._id(prefix), call_id=event.call_id, name=name, namespace=namespace or UNSET)
                yield from self._begin(call)
            case ToolCallArguments(_, text):
                custom = isinstance(self.items[-1], OutputCustomCall)
                yield self._delta("custom_tool_call_input" if custom else "function_call_arguments", text)

    def finish(self) -> Iterator[ServerEvent]:
        """End the answer. An empty answer becomes an empty message, unless no output was requested."""
        if not self.items and self.compacts:
            yield from self._begin(OutputCompaction(id=self._id("cmp")))
        elif not self.items and not self.prewarm:
            yield from self._begin(OutputMessage(id=self._id("msg")))
            if self.space:
                yield self._delta("output_text", self.space, logprobs=[])
        yield from self._close("incomplete" if self.finish_reason in CUT else "completed")

    def abandon(self) -> Iterator[ServerEvent]:
        """End the answer early; an open item stays incomplete."""
        yield from self._close("incomplete")

    def _content(self, text: str, logprobs: list[Any]) -> Iterator[ServerEvent]:
        if not self._is_open(OutputMessage):
            self.space += text
            self.logprobs += logprobs
            if not self.space.strip():
                return
            text, logprobs = self.space, self.logprobs
            yield from self._begin(OutputMessage(id=self._id("msg")))
        self.logprobs += logprobs
        yield self._delta("output_text", text, logprobs=logprobs)

    # ---- items

    def _id(self, prefix: str) -> str:
        return f"{prefix}_{self.key}o{len(self.items)}"

    def _is_open(self, kind: type) -> bool:
        return self.open and isinstance(self.items[-1], kind)

    def _begin(self, item: OutputItem) -> Iterator[ServerEvent]:
        yield from self._close()
        self.items.append(item)
        self.open, self.pieces, self.space, self.logprobs = True, [], "", []
        yield "response.output_item.added", {"output_index": len(self.items) - 1, "item": item}
        if (part := self._part("")) is not None:
            yield self._part_event("added", part)

    def _close(self, status: str = "completed") -> Iterator[ServerEvent]:
        """End the last item if it is open."""
        if not self.open:
            return
        self.open = False
        item, text = self.items[-1], "".join(self.pieces)
        part = self._part(text)
        match item:
            case OutputMessage():
                item.content = [part]
                yield self._event("output_text.done", content_index=0, text=text, logprobs=part.logprobs)
            case OutputReasoning() if self.summarized:
                item.summary = [part]
                yield self._event("reasoning_summary_text.done", summary_index=0, text=text)
            case OutputReasoning():
                item.content = [part]
                yield self._event("reasoning_text.done", content_index=0, text=text)
            case OutputFunctionCall():
                item.arguments = text
                yield self._event("function_call_arguments.done", name=item.name, arguments=text)
            case OutputCompaction():
                item.encrypted_content = opaque(text.strip())
            case OutputCustomCall():
                item.input = text
                yield self._event("custom_tool_call_input.done", input=text)
        if part is not None:
            yield self._part_event("done", part)
        if self.encrypted and isinstance(item, OutputReasoning):
            item.encrypted_content = opaque(text)
        if not isinstance(item, OutputCompaction):
            item.status = status
        yield "response.output_item.done", {"output_index": len(self.items) - 1, "item": item}

    def _part(self, text: str) -> OutputText | SummaryText | ReasoningText | None:
        """Return the last item's text as a part; None for a call."""
        match self.items[-1]:
            case OutputMessage():
                return OutputText(text=text, logprobs=self.logprobs if text else [])
            case OutputReasoning():
                return SummaryText(text=text) if self.summarized else ReasoningText(text=text)
        return None

    # ---- events

    def _event(self, kind: str, **fields: Json) -> ServerEvent:
        return f"response.{kind}", {
            "item_id": self.items[-1].id,
            "output_index": len(self.items) - 1,
        } | fields

    def _delta(self, kind: str, text: str, **fields: Json) -> ServerEvent:
        self.pieces.append(text)
        if kind == "reasoning_summary_text":
            fields["summary_index"] = 0
        elif kind in ("output_text", "reasoning_text"):
            fields["content_index"] = 0
        return self._event(f"{kind}.delta", delta=text, **fields)

    def _part_event(self, what: str, part: OutputText | SummaryText | ReasoningText) -> ServerEvent:
        if isinstance(part, SummaryText):
            return self._event(f"reasoning_summary_part.{what}", summary_index=0, part=part)
        return self._event(f"content_part.{what}", content_index=0, part=part)
