"""Deltas of an answer -> Ollama's objects, whole or as lines of a stream. Durations are in nanoseconds."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from datetime import UTC, datetime
from typing import Any

import msgspec

from quire.engine.messages import TokenLogprobs
from quire.server.http import sse
from quire.server.parsers.events import Content, Event, Reasoning, ToolCallArguments, ToolCallBegin
from quire.server.parsers.model_json import raw_object
from quire.server.request.delta import Delta
from quire.server.request.generation_request import GenerationRequest
from quire.server.request.progress import PromptProgress
from quire.server.request.usage import TokenUsage
from quire.server.text.tokenizer import Tokenizer

LOWEST = -9999.0  # replaces minus infinity, which JSON lacks


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class Answer:
    """Writes the deltas of one choice. `chat`: as messages, else as texts. With a `tokenizer`, also logprobs."""

    def __init__(self, model: str, one: GenerationRequest, chat: bool, tokenizer: Tokenizer | None = None):
        self.model, self.chat, self.tokenizer = model, chat, tokenizer
        self.num_alternatives = one.sampling.logprobs or 0
        self.started, self.first_token, self.ended = time.monotonic_ns(), 0, 0
        self.used = TokenUsage.for_requests([one])
        self.call: dict[str, Any] | None = None  # being received
        self.arguments: list[str] = []

    async def lines(self, stream: AsyncGenerator[Delta, None]) -> AsyncGenerator[bytes, None]:
        """Yield lines of JSON. Closing it aborts the generation."""
        try:
            async for delta in stream:
                if lines := [sse.one_line(msgspec.json.encode(part)) + b"\n" for part in self.parts(delta)]:
                    yield b"".join(lines)
        finally:
            await stream.aclose()

    def progress(self, now: PromptProgress) -> bytes:
        """Return a line with the progress of the prompt and no text."""
        part = self._part({"content": ""}) | {"prompt_progress": now}
        return msgspec.json.encode(part) + b"\n"

    def observe(self, delta: Delta) -> None:
        """Note when a delta came, unless it was observed before."""
        if delta.token_ids and not self.first_token:
            self.first_token = time.monotonic_ns()
        if delta.finish_reason is not None and not self.ended:
            self.ended = time.monotonic_ns()

    def parts(self, delta: Delta) -> list[dict[str, Any]]:
        """Return the objects of a delta; the last one of the last delta is done."""
        self.observe(delta)
        self.used.add(delta)
        events = delta.events if delta.events is not None else [Content(delta.text)] if delta.text else []
        messages = [message for event in events for message in self._messages(event)]
        if self.tokenizer is not None and delta.logprobs and not messages:
            messages = [{"content": ""}]
        out = [self._part(message) for message in messages]
        if self.tokenizer is not None and delta.logprobs:
            out[0]["logprobs"] = [self._logprob(position) for position in delta.logprobs]
        if delta.finish_reason is not None:
            out += [self._part(message) for message in self._ended_call()]
            out.append(self._last(delta.finish_reason))
        return out

    def whole(self, deltas: list[Delta]) -> dict[str, Any]:
        """Return one object that combines all parts."""
        parts = [part for delta in deltas for part in self.parts(delta)]
        whole = parts[-1]
        if self.tokenizer is not None:
            whole["logprobs"] = [one for part in parts for one in part.get("logprobs", ())]
        if not self.chat:
            texts = {name: "".join(part.get(name, "") for part in parts) for name in ("response", "thinking")}
            return whole | {name: text for name, text in texts.items() if text or name == "response"}
        messages = [part["message"] for part in parts]
        message: dict[str, Any] = {"role": "assistant", "content": "".join(one["content"] for one in messages)}
        if thinking := "".join(one.get("thinking", "") for one in messages):
            message["thinking"] = thinking
        if calls := [call for one in messages for call in one.get("tool_calls", ())]:
            message["tool_calls"] = calls
        return whole | {"message": message}

    def _logprob(self, position: TokenLogprobs) -> dict[str, Any]:
        entries = [
            {"token": self.tokenizer.id_to_token(token_id), "logprob": max(logprob, LOWEST)}
            | {"bytes": list(self.tokenizer.token_bytes(token_id))}
            for token_id, logprob in zip(position.token_ids[: 1 + self.num_alternatives], position.logprobs)
        ]
        return entries[0] | ({"top_logprobs": entries[1:]} if self.num_alternatives else {})

    def _messages(self, event: Event) -> list[dict[str, Any]]:
        match event:
            case Content(text):
                return [*self._ended_call(), {"content": text}]
            case Reasoning(text):
                return [*self._ended_call(), {"content": "", "thinking": text}]
            case ToolCallBegin():
                ended = self._ended_call()
                self.call, self.arguments = {"id": event.call_id, "name": event.name, "index": event.index}, []
                return ended
            case ToolCallArguments(_, text):
                self.arguments.append(text)
                return []

    def _ended_call(self) -> list[dict[str, Any]]:
        """Return a call once its arguments, a JSON object, are complete."""
        if self.call is None:
            return []
        call, self.call = self.call, None
        arguments = raw_object("".join(self.arguments))
        function = {"name": call["name"], "arguments": arguments, "index": call["index"]}
        return [{"content": "", "tool_calls": [{"id": call["id"], "function": function}]}]

    def _part(self, message: dict[str, Any]) -> dict[str, Any]:
        head = {"model": self.model, "created_at": now()}
        if self.chat:
            return head | {"message": {"role": "assistant"} | message, "done": False}
        fields = {"response": message["content"]}
        if "thinking" in message:
            fields["thinking"] = message["thinking"]
        return head | fields | {"done": False}

    def _last(self, finish_reason: str) -> dict[str, Any]:
        end, first = self.ended, self.first_token or self.ended
        return self._part({"content": ""}) | {
            "done": True,
            "done_reason": "length" if finish_reason in ("length", "timeout") else "stop",
            "total_duration": end - self.started,
            "load_duration": 0,  # the model was already loaded
            "prompt_eval_count": self.used.num_prompt,
            "prompt_eval_duration": first - self.started,
            "eval_count": self.used.num_output,
            "eval_duration": end - first,
        }
