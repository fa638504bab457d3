"""Lists hostile bodies, and runs innocent streams while they are sent."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass

import httpx
import psutil

CHAT, TEXT, TOKENIZE, DETOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"
HELLO = [{"role": "user", "content": "Hello"}]


@dataclass(frozen=True)
class Row:
    """Describes one body, which `make` builds when it is sent."""

    name: str
    path: str
    make: Callable[[], bytes]


def _compact(fields: dict) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()


def chat(**fields: object) -> Callable[[], bytes]:
    return lambda: _compact({"messages": HELLO, "max_tokens": 32, **fields})


def text(**fields: object) -> Callable[[], bytes]:
    return lambda: _compact({"prompt": "Hello", "max_tokens": 32, **fields})


def plain(**fields: object) -> Callable[[], bytes]:
    return lambda: _compact(fields)


def words(count: int, length: int = 0) -> list[str]:
    return [f"word {i}".ljust(length, "é") for i in range(count)]


AUDIT = [  # each was answered with 200 or blocked all streams before parameters had bounds
    Row("800 bad_words and one of 60,000 repetitions", CHAT, chat(bad_words=[*words(800), "x " * 60_000])),
    Row("bad_words: 3,000", CHAT, chat(bad_words=words(3000))),
    Row("bad_words: 30,000", CHAT, chat(bad_words=words(30_000))),
    Row("stop: 10,000 strings", CHAT, chat(stop=words(10_000))),
    Row("300,000 empty messages", CHAT, plain(messages=[{"role": "user", "content": ""}] * 300_000)),
    Row("300 prompts of 3,780 characters", TEXT, text(prompt=["word " * 756] * 300, max_tokens=1)),
    Row(
        "/tokenize of 4.8 MB with return_token_strs", TOKENIZE, plain(prompt="word " * 960_000, return_token_strs=True)
    ),
    Row("/detokenize of 3,000,000 ids", DETOKENIZE, plain(tokens=[300] * 3_000_000)),
    Row("stop_token_ids: 2,000,000 copies", CHAT, chat(stop_token_ids=[7] * 2_000_000)),
    Row("allowed_token_ids: 2,000,000 copies", CHAT, chat(allowed_token_ids=[7] * 2_000_000)),
    Row("logit_bias: 100,000 entries", CHAT, chat(logit_bias={str(i): 1 for i in range(100_000)})),
    Row("24 prompts of 1,900 tokens, n 128", TEXT, text(prompt=[[300] * 1900] * 24, n=128, max_tokens=1)),
    Row("128 prompts, n 128", TEXT, text(prompt=[[300]] * 128, n=128, max_tokens=1)),
    Row("60 MB of text", CHAT, plain(messages=[{"role": "user", "content": "x" * 60_000_000}])),
    Row("chat_template_kwargs: self", CHAT, chat(chat_template_kwargs={"self": 1})),
]
BOUNDS = [  # every parameter at its bound
    Row("bad_words: 256 of 10 characters", CHAT, chat(bad_words=words(256))),
    Row("bad_words: 256 of 128 characters", CHAT, chat(bad_words=words(256, 128))),
    Row("stop: 64 strings of 256 characters", CHAT, chat(stop=["e" * (193 + i) + "x" * (63 - i) for i in range(64)])),
    Row("stop: 64 short strings, n 16", CHAT, chat(stop=words(64), n=16)),
    Row("stop_token_ids: 128", CHAT, chat(stop_token_ids=list(range(300, 428)))),
    Row("allowed_token_ids: 16,384", CHAT, chat(allowed_token_ids=[300 + i % 200 for i in range(2**14)])),
    Row("logit_bias: 16,384 entries", CHAT, chat(logit_bias={str(i): 1 for i in range(2**14)})),
    Row("10,000 messages", CHAT, plain(messages=[{"role": "user", "content": "a"}] * 10_000, max_tokens=1)),
    Row(
        "10,000 messages of 5 parts",
        CHAT,
        plain(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}] * 5}] * 10_000, max_tokens=1),
    ),
    Row("2,048 prompts", TEXT, text(prompt=["word"] * 2048, max_tokens=1)),
    Row("500 prompts of 3,780 characters", TEXT, text(prompt=["word " * 756] * 500, max_tokens=1)),
    Row("900,000 token ids", TEXT, text(prompt=[7] * 900_000, max_tokens=1)),
    Row("2 MB of text, cut to fit", TEXT, text(prompt="word " * 400_000, max_tokens=1, truncate_prompt_tokens=100)),
    Row("/tokenize of 2 MB with return_token_strs", TOKENIZE, plain(prompt="word " * 400_000, return_token_strs=True)),
    Row("/tokenize of 10,000 messages", TOKENIZE, plain(messages=[{"role": "user", "content": "a"}] * 10_000)),
    Row("/detokenize of 500,000 ids", DETOKENIZE, plain(tokens=[300] * 500_000)),
    Row("1,000 documents", CHAT, chat(documents=[{"text": "word " * 300}] * 1000)),
    Row("chat_template_kwargs: 64 kB", CHAT, chat(chat_template_kwargs={"a": [{}] * 16_000})),
    Row(
        "200,000 unknown fields",
        CHAT,
        lambda: b'{"messages":[],' + b",".join(b'"%x":1' % i for i in range(200_000)) + b"}",
    ),
    Row("600,000 objects", CHAT, lambda: b'{"messages":[' + b",".join([b"{}"] * 600_000) + b"]}"),
    Row("900,000 levels of lists", CHAT, lambda: b'{"messages":' + b"[" * 900_000),
    Row(
        "echo of 2,000 tokens with 20 logprobs",
        TEXT,
        text(prompt=[300 + i % 200 for i in range(2000)], echo=True, logprobs=20, max_tokens=1),
    ),
    Row(
        "the same as a stream",
        TEXT,
        text(prompt=[300 + i % 200 for i in range(2000)], echo=True, logprobs=20, max_tokens=1, stream=True),
    ),
    Row("n 128 with 20 logprobs", CHAT, chat(n=128, max_tokens=4, logprobs=True, top_logprobs=20)),
]


def schema(value: object, **fields: object) -> Callable[[], bytes]:
    return chat(response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": value}}, **fields)


def grammar(**fields: object) -> Callable[[], bytes]:
    return chat(structured_outputs=fields)


def called(arguments: str) -> Callable[[], bytes]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "c", "content": "done"}
    return chat(messages=[*HELLO, {"role": "assistant", "tool_calls": [call]}, result])


def fields(count: int, length: int) -> dict:
    names = (f"field_{i}".ljust(length, "x") for i in range(count))
    return {"type": "object", "properties": {name: {"type": "string", "maxLength": 40} for name in names}}


SCORED = {"echo": True, "logprobs": 20, "max_tokens": 1}
KINDS = [  # found later: a 500, a killed process, a wrong refusal, or delays of other clients
    Row("history: half a surrogate pair in arguments", CHAT, called('{"city": "\\ud83d"}')),
    Row("schema: 300 fields", CHAT, schema(fields(300, 12))),
    Row("schema: 89 kB", CHAT, schema(fields(900, 50))),
    Row("schema: minimum -1.797e308", CHAT, schema({"minimum": -1.797e308})),
    Row("schema: maxLength 1e30", CHAT, schema({"type": "string", "maxLength": 1e30})),
    Row("schema: an integer of 5,000 digits", CHAT, lambda: schema({"const": 7})().replace(b"7}", b"7" * 5000 + b"}")),
    Row("schema: dependentSchemas that is a string", CHAT, schema({"dependentSchemas": "x"})),
    Row("schema: it refers to itself", CHAT, schema({"$ref": "#"})),
    Row("GBNF: an undefined rule", CHAT, grammar(grammar="root ::= foo")),
    Row("GBNF: 100,000,000 repetitions", CHAT, grammar(grammar='root ::= "a"{99999999}')),
    Row("regex: 10,000 repetitions of a choice", CHAT, grammar(regex="(ab|cd){10000}")),
    Row("temperature: 1e999", TEXT, lambda: text(temperature=7)().replace(b"7", b"1e999")),
    Row("images: 66,000,000 pixels asked for", CHAT, chat(mm_processor_kwargs={"max_pixels": 66_000_000})),
    Row("chat_template: a width of 1,000,000,000", CHAT, chat(chat_template="{{ 'a'.ljust(1000000000) }}")),
]


def post(url: str, body: bytes) -> int:
    """Return the status, 0 for a connection that the server closed."""
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            answer.read()
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


@dataclass
class Stream:
    """Records the times of an innocent client, in seconds."""

    text: str
    duration: float
    gap: float  # the longest between two events


def innocent_body(number: int, num_tokens: int) -> dict:
    return {
        "messages": [{"role": "user", "content": f"Tell me the story of number {number}."}],
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "temperature": 0.8,
        "seed": number,
        "stream": True,
    }


async def innocent(
    client: httpx.AsyncClient, number: int, num_tokens: int, under_way: asyncio.Event | None = None
) -> Stream:
    """Read one stream; raises AssertionError if it is lost or has an error. `under_way` is set at its first text."""
    started = last = time.perf_counter()
    pieces, gap, done = [], 0.0, False
    async with client.stream("POST", CHAT, json=innocent_body(number, num_tokens)) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                now = time.perf_counter()
                if under_way is None or under_way.is_set():
                    gap = max(gap, now - last)
                last = now
                pieces.append(event["choices"][0]["delta"].get("content") or "")
                if under_way is not None and len(pieces) > 2:
                    under_way.set()
            done = done or line == "data: [DONE]"
    assert done, "a stream was lost"
    return Stream("".join(pieces), time.perf_counter() - started, gap)


async def crowd(
    client: httpx.AsyncClient,
    num_streams: int,
    num_tokens: int,
    disturb: Callable[[], asyncio.Future[int]] | None = None,
) -> tuple[list[Stream], int | None]:
    """Return the results of the streams and of `disturb`, which starts after all streams have started."""
    events = [asyncio.Event() for _ in range(num_streams)]
    tasks = [asyncio.create_task(innocent(client, number, num_tokens, event)) for number, event in enumerate(events)]
    disturbance = None
    if disturb is not None:
        waiter = asyncio.create_task(_all_set(events))
        await asyncio.wait([*tasks, waiter], return_when=asyncio.FIRST_COMPLETED)
        waiter.cancel()
        disturbance = disturb()
    streams = await asyncio.gather(*tasks)
    return streams, None if disturbance is None else await disturbance


async def _all_set(events: list[asyncio.Event]) -> None:
    for event in events:
        await event.wait()


def memory(process: psutil.Process) -> tuple[int, int]:
    """Return the resident MiB of the server and of its engine."""
    engine = max((child.memory_info().rss for child in process.children(recursive=True)), default=0)
    return process.memory_info().rss >> 20, engine >> 20
