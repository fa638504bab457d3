"""The requests of `soak.py`: every dialect, whole and streamed, with images, grammars, tools, stored conversations, and
clients that leave or read slowly.
"""

from __future__ import annotations

import asyncio
import base64
import io
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

REQUEST_TIMEOUT = 120.0  # seconds without a byte after which a request is stuck
SLOW_SECONDS = 0.05  # between two reads of a slow reader
WORDS = ("one", "two", "three", "red", "green", "blue", "north", "south", "old", "new", "small", "river", "hill")
Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Kind:
    """`make` is a body for a random generator. `stream` are the fields that make it a stream; None: it has no
    stream.
    """

    name: str
    path: str
    make: Callable[[random.Random], Body]
    stream: Body | None = None
    statuses: tuple[int, ...] = (200,)


def text(rng: random.Random, most: int = 60) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(3, most)))


def messages(rng: random.Random, most: int = 60) -> list[Body]:
    return [{"role": "user", "content": text(rng, most)}]


def image(rng: random.Random) -> str:
    from PIL import Image

    color, file = tuple(rng.randrange(256) for _ in range(3)), io.BytesIO()
    Image.new("RGB", (rng.randrange(16, 48), rng.randrange(16, 48)), color).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def seen(rng: random.Random) -> list[Body]:
    parts = [{"type": "text", "text": text(rng, 10)}, {"type": "image_url", "image_url": {"url": image(rng)}}]
    return [{"role": "user", "content": parts}]


def seen_by_anthropic(rng: random.Random) -> list[Body]:
    source = {"type": "base64", "media_type": "image/png", "data": image(rng).partition(",")[2]}
    return [{"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": text(rng, 10)}]}]


def schema(rng: random.Random) -> Body:
    names = {f"{rng.choice(WORDS)}_{rng.randrange(10**6)}": {"type": "integer"} for _ in range(rng.randint(1, 6))}
    one = {"type": "object", "properties": names, "required": sorted(names)}
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": one}}


def tools(rng: random.Random) -> list[Body]:
    parameters = {"type": "object", "properties": {rng.choice(WORDS): {"type": "string"}}}
    return [{"type": "function", "function": {"name": f"f{rng.randrange(1000)}", "parameters": parameters}}]


def few(rng: random.Random) -> int:
    return rng.randint(1, 48)


_ERROR = re.compile(rb'"error": ?[{"]|event: error')  # in a stream
STREAM = {"stream": True}
IN_TIME = (200, 408, 503, 504)  # or not
CHAT = "/v1/chat/completions"
KINDS = [
    Kind("chat", CHAT, lambda r: {"messages": messages(r), "max_tokens": few(r)}, STREAM),
    Kind("long", CHAT, lambda r: {"messages": messages(r, 400), "max_tokens": 4}, STREAM),
    Kind("choices", CHAT, lambda r: {"messages": messages(r), "max_tokens": few(r), "n": 3, "logprobs": True}, STREAM),
    Kind("image", CHAT, lambda r: {"messages": seen(r), "max_tokens": few(r)}, STREAM),
    Kind("schema", CHAT, lambda r: {"messages": messages(r), "max_tokens": 24, "response_format": schema(r)}, STREAM),
    Kind(
        "regex",
        CHAT,
        lambda r: {"messages": messages(r), "max_tokens": 12, "structured_outputs": {"regex": f"[a-z]{{{few(r)}}}"}},
        STREAM,
    ),
    Kind(
        "grammar",
        CHAT,
        lambda r: {"messages": messages(r), "max_tokens": 12, "grammar": f'root ::= "{r.choice(WORDS)}" [0-9]+'},
        STREAM,
    ),
    Kind("tools", CHAT, lambda r: {"messages": messages(r), "max_tokens": 24, "tools": tools(r)}, STREAM),
    Kind("penalties", CHAT, lambda r: {"messages": messages(r), "max_tokens": few(r), "frequency_penalty": 1}, STREAM),
    Kind("completions", "/v1/completions", lambda r: {"prompt": [text(r), text(r)], "max_tokens": few(r)}, STREAM),
    Kind("echo", "/v1/completions", lambda r: {"prompt": text(r), "max_tokens": 1, "echo": True, "logprobs": 2}),
    Kind("responses", "/v1/responses", lambda r: {"input": text(r), "max_output_tokens": few(r)}, STREAM),
    Kind("messages", "/v1/messages", lambda r: {"model": "m", "messages": messages(r), "max_tokens": few(r)}, STREAM),
    Kind(
        "image of messages",
        "/v1/messages",
        lambda r: {"model": "m", "messages": seen_by_anthropic(r), "max_tokens": few(r)},
        STREAM,
    ),
    Kind("count", "/v1/messages/count_tokens", lambda r: {"model": "m", "messages": messages(r)}),
    Kind(
        "ollama chat",
        "/api/chat",
        lambda r: {"model": "m", "messages": messages(r), "options": {"num_predict": few(r)}, "stream": False},
        STREAM,
    ),
    Kind(
        "ollama generate",
        "/api/generate",
        lambda r: {"model": "m", "prompt": text(r), "options": {"num_predict": few(r)}, "stream": False},
        STREAM,
    ),
    Kind("tgi", "/generate", lambda r: {"inputs": text(r), "parameters": {"max_new_tokens": few(r)}}),
    Kind("tgi stream", "/generate_stream", lambda r: {"inputs": text(r), "parameters": {"max_new_tokens": few(r)}}, {}),
    Kind("sglang", "/generate", lambda r: {"text": text(r), "sampling_params": {"max_new_tokens": few(r)}}, STREAM),
    Kind("invocations", "/invocations", lambda r: {"messages": messages(r), "max_tokens": few(r)}, STREAM),
    Kind("tokenize", "/tokenize", lambda r: {"prompt": text(r, 300)}),
    Kind("detokenize", "/detokenize", lambda r: {"tokens": [r.randrange(200) for _ in range(50)]}),
    Kind("wrong", CHAT, lambda r: {"messages": [], "max_tokens": r.choice([-1, "x", 0])}, statuses=(400,)),
    Kind("unknown route", "/v1/nothing", lambda r: {"x": 1}, statuses=(404,)),
    Kind("late", CHAT, lambda r: {"messages": messages(r), "max_tokens": 400, "timeout": 0.3}, None, IN_TIME),
]


@dataclass(slots=True)
class Outcome:
    kind: str
    how: str  # whole, stream, leaves or slow
    status: int | None  # None: stuck, or no HTTP
    is_wrong: bool = False
    error: str = ""


async def send(client: httpx.AsyncClient, kind: Kind, rng: random.Random, model: str) -> Outcome:
    """Send one request of a kind, and read the answer in one of four ways."""
    how = rng.choice(("whole", "stream", "stream", "leaves", "slow")) if kind.stream is not None else "whole"
    body = kind.make(rng) | (kind.stream if how != "whole" and kind.stream else {})
    if body.get("model"):
        body["model"] = model
    status = None
    try:
        async with client.stream("POST", kind.path, json=body, timeout=REQUEST_TIMEOUT) as answer:
            status, received = answer.status_code, b""
            leave_after = rng.randrange(1, 4)
            async for part in answer.aiter_bytes():
                received += part
                leave_after -= 1
                if how == "leaves" and not leave_after:
                    break
                if how == "slow":
                    await asyncio.sleep(SLOW_SECONDS)
    except httpx.HTTPError as error:
        return Outcome(kind.name, how, status, True, f"{type(error).__name__}: {error}")
    failed = status not in kind.statuses or (status == 200 and _ERROR.search(received) is not None)
    return Outcome(kind.name, how, status, failed, received[:300].decode(errors="replace") if failed else "")
