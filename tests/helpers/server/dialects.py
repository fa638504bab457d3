"""Asks in every dialect, streamed or not, and collects content, reasoning and arguments of calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.helpers.server.running import MODEL

ASK = [{"role": "user", "content": "Weather?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "parameters": SCHEMA}


@dataclass
class Said:
    """Collects an answer. `calls` are arguments as JSON text; `texts` are all texts of the answer, for comparison."""

    content: str = ""
    reasoning: str = ""
    calls: list[str] = field(default_factory=list)
    texts: str = ""

    def add(self, kind: str, text: str | None, index: int = -1) -> None:
        text = text or ""
        self.texts += text
        if kind != "calls":
            setattr(self, kind, getattr(self, kind) + text)
            return
        while len(self.calls) <= index:
            self.calls.append("")
        self.calls[index] += text


def events(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    """Return the events of a stream, or the lines of Ollama's."""
    for line in answer.text.splitlines():
        data = line.removeprefix("data: ") if line.startswith("data: ") else line if line.startswith("{") else ""
        if data and data != "[DONE]":
            yield json.loads(data)


def _chat_message(said: Said, message: dict[str, Any]) -> None:
    said.add("content", message.get("content"))
    said.add("reasoning", message.get("reasoning_content"))
    for i, call in enumerate(message.get("tool_calls") or ()):
        said.add("calls", call["function"].get("arguments"), call.get("index", i))


def chat(said: Said, answer: httpx.Response, stream: bool) -> None:
    for part in events(answer) if stream else [answer.json()]:
        for choice in part["choices"]:
            _chat_message(said, choice["delta" if stream else "message"])


def completions(said: Said, answer: httpx.Response, stream: bool) -> None:
    for part in events(answer) if stream else [answer.json()]:
        for choice in part["choices"]:
            said.add("content", choice["text"])


_RESPONSE_DELTAS = {"response.output_text.delta": "content", "response.reasoning_text.delta": "reasoning"}


def responses(said: Said, answer: httpx.Response, stream: bool) -> None:
    parts = list(events(answer)) if stream else []
    whole = parts[-1]["response"] if stream else answer.json()
    calls = 0
    for item in whole["output"]:
        if item["type"] == "function_call":
            said.add("calls", item["arguments"], calls)
            calls += 1
        for part in item.get("content") or ():
            said.add("reasoning" if item["type"] == "reasoning" else "content", part["text"])
    if stream:
        of_deltas = Said()
        for part in parts:
            if part["type"] in _RESPONSE_DELTAS:
                of_deltas.add(_RESPONSE_DELTAS[part["type"]], part["delta"])
            elif part["type"] == "response.function_call_arguments.delta":
                of_deltas.add("calls", part["delta"], 0)
        assert (of_deltas.content, of_deltas.reasoning) == (said.content, said.reasoning)
        assert "".join(of_deltas.calls) == "".join(said.calls)


def messages(said: Said, answer: httpx.Response, stream: bool) -> None:
    kinds = {"text": "content", "thinking": "reasoning"}
    if not stream:
        blocks = answer.json()["content"]
        for block in blocks:
            if block["type"] in kinds:
                said.add(kinds[block["type"]], block[block["type"]])
        for i, block in enumerate(block for block in blocks if block["type"] == "tool_use"):
            said.add("calls", json.dumps(block["input"], ensure_ascii=False), i)
        return
    calls: list[int] = []  # numbers of blocks
    for part in events(answer):
        if part["type"] == "content_block_start" and part["content_block"]["type"] == "tool_use":
            calls.append(part["index"])
            said.add("calls", "", len(calls) - 1)
        if part["type"] == "content_block_delta":
            delta = part["delta"]
            if delta["type"] == "input_json_delta":
                said.add("calls", delta["partial_json"], calls.index(part["index"]))
            for name, kind in kinds.items():
                said.add(kind, delta.get(name))


def ollama_chat(said: Said, answer: httpx.Response, stream: bool) -> None:
    for part in events(answer) if stream else [answer.json()]:
        message = part["message"]
        said.add("content", message["content"])
        said.add("reasoning", message.get("thinking"))
        for call in message.get("tool_calls", ()):
            said.add("calls", json.dumps(call["function"]["arguments"], ensure_ascii=False), len(said.calls))


def ollama_generate(said: Said, answer: httpx.Response, stream: bool) -> None:
    for part in events(answer) if stream else [answer.json()]:
        said.add("content", part["response"])
        said.add("reasoning", part.get("thinking"))


def tgi(said: Said, answer: httpx.Response, stream: bool) -> None:
    if not stream:
        said.add("content", answer.json()["generated_text"])
        return
    parts = list(events(answer))
    said.add("content", "".join(part["token"]["text"] for part in parts if not part["token"]["special"]))
    assert parts[-1]["generated_text"] == said.content


def sglang(said: Said, answer: httpx.Response, stream: bool) -> None:
    said.add("content", (list(events(answer))[-1] if stream else answer.json())["text"])


def infill(said: Said, answer: httpx.Response, stream: bool) -> None:
    for part in events(answer) if stream else [answer.json()]:
        said.add("content", part["content"])


@dataclass(frozen=True)
class Dialect:
    """Describes a dialect. `body` has all fields except the number of tokens, whose field is `limit`. `plain`: thoughts
    and calls are text.
    """

    path: str
    body: dict[str, Any]
    read: Callable[[Said, httpx.Response, bool], None]
    limit: str = "max_tokens"
    tools: Any = None
    plain: bool = False

    def ask(self, http: httpx.Client, stream: bool, max_tokens: int = 1000, **fields: Any) -> Said:
        *nested, name = self.limit.split(".")
        limit: dict[str, Any] = {name: max_tokens}
        for outer in reversed(nested):
            limit = {outer: limit}
        body = self.body | limit | ({} if self.tools is None else {"tools": self.tools}) | {"stream": stream} | fields
        answer = http.post(self.path, json=body)
        assert answer.status_code == 200, answer.text
        said = Said()
        self.read(said, answer, stream)
        return said


_OPENAI_TOOL = {"type": "function", "function": FUNCTION}
DIALECTS = {
    "chat": Dialect("/v1/chat/completions", {"messages": ASK}, chat, tools=[_OPENAI_TOOL]),
    "completions": Dialect("/v1/completions", {"prompt": "x"}, completions, plain=True),
    "responses": Dialect(
        "/v1/responses",
        {"model": MODEL, "input": "Weather?"},
        responses,
        "max_output_tokens",
        [{"type": "function", "strict": False, **FUNCTION}],
    ),
    "messages": Dialect(
        "/v1/messages",
        {"model": MODEL, "messages": ASK, "thinking": {"type": "enabled", "budget_tokens": 1024}},
        messages,
        tools=[{"name": "weather", "input_schema": SCHEMA}],
    ),
    "ollama chat": Dialect(
        "/api/chat", {"model": MODEL, "messages": ASK}, ollama_chat, "options.num_predict", [_OPENAI_TOOL]
    ),
    "ollama generate": Dialect(
        "/api/generate", {"model": MODEL, "prompt": "x"}, ollama_generate, "options.num_predict", plain=True
    ),
    "tgi": Dialect("/generate", {"inputs": "x"}, tgi, "parameters.max_new_tokens", plain=True),
    "sglang": Dialect("/generate", {"text": "x"}, sglang, "sampling_params.max_new_tokens", plain=True),
    "infill": Dialect("/infill", {"input_prefix": "a", "input_suffix": "b"}, infill, "n_predict", plain=True),
}
