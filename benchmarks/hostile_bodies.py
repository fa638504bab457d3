"""Measures how hostile bodies affect other requests: sends one after another while innocent streams run.

    python benchmarks/hostile_bodies.py [--streams 4] [--output-len 128] [--rounds 1] [--lists audit bounds kinds]

Starts a server of its own with the model that comes with quire; needs psutil.

Prints a table: the body, the answer, the time of the innocent streams and their longest gap between two events
(medians of all streams) next to those of the same streams alone just before, whether their texts are those of an
undisturbed run, and the memory of server and engine afterwards. The streams run with --deterministic, so that a
different text is an effect of the body.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))  # works without an installation

from quire.cli.bench.process import ServerProcess, free_port

CHAT, TEXT, TOKENIZE, DETOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"
HELLO = [{"role": "user", "content": "Hello"}]


@dataclass(frozen=True)
class Row:
    """One body. `make` builds it when it is sent."""

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
KINDS = [  # found since: a 500, a killed process, a wrong refusal, or delays of other clients
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
ECHOES = [  # with 30,400 positions: garbage collections of their objects are longer than other work on the loop
    Row(
        "16 echoes of 1,900 tokens with 20 logprobs", TEXT, text(prompt=[[300 + i] * 1900 for i in range(16)], **SCORED)
    ),
    Row(
        "these 16 as a stream",
        TEXT,
        text(prompt=[[400 + i] * 1900 for i in range(16)], stream=True, **SCORED),
    ),
]
LISTS = {"audit": AUDIT, "bounds": BOUNDS, "kinds": KINDS, "echoes": ECHOES}


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


def send(url: str, name: str) -> int:
    """Send a body from a process of its own, so that writing the body does not slow the streams."""
    row = next(row for rows in LISTS.values() for row in rows if row.name == name)
    return post(url + row.path, row.make())


@dataclass
class Stream:
    """Times of an innocent client, in seconds."""

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


async def measure(arguments: argparse.Namespace) -> bool:
    """Print the table; returns whether every stream kept its text."""
    port = free_port()
    command = [sys.executable, "-m", "quire", "serve", "--port", str(port), "--deterministic", "--log-level", "warning"]
    command += arguments.server_options
    well = True
    with ServerProcess(command, port) as server, multiprocessing.get_context("spawn").Pool(1) as pool:
        await server.wait_for("/health", timeout=120)
        process = psutil.Process(server.process.pid)
        loop = asyncio.get_running_loop()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=300, trust_env=False) as client:
            references = [stream.text for stream in (await crowd(client, arguments.streams, arguments.output_len))[0]]
            print(f"memory before: {memory(process)[0]} MiB server, {memory(process)[1]} MiB engine\n")
            print(
                "| body | answer | seconds of a stream: alone, with it | x | longest gap, ms: alone, with it | "
                "texts | MiB: server, engine |\n|---|---|---|---|---|---|---|"
            )
            for row in [row for name in arguments.lists for row in LISTS[name]]:
                alone, together, statuses, same = [], [], set(), True
                for _ in range(arguments.rounds):
                    control, _ = await crowd(client, arguments.streams, arguments.output_len)
                    streams, status = await crowd(
                        client,
                        arguments.streams,
                        arguments.output_len,
                        lambda row=row: loop.run_in_executor(
                            None, pool.apply, send, (f"http://127.0.0.1:{port}", row.name)
                        ),
                    )
                    alone += control
                    together += streams
                    statuses.add(status)
                    same = same and [stream.text for stream in streams] == references
                well = well and same
                times = [statistics.median(stream.duration for stream in group) for group in (alone, together)]
                gaps = [1000 * statistics.median(stream.gap for stream in group) for group in (alone, together)]
                print(
                    f"| {row.name} | {', '.join(str(status or 'closed') for status in sorted(statuses))} | "
                    f"{times[0]:.2f}, {times[1]:.2f} | {times[1] / times[0]:.1f} | "
                    f"{gaps[0]:.0f}, {gaps[1]:.0f} | {'the same' if same else 'CHANGED'} | {memory(process)[0]}, "
                    f"{memory(process)[1]} |",
                    flush=True,
                )
    return well


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=4, help="number of innocent streams (default: 4)")
    parser.add_argument("--output-len", type=int, default=128, help="tokens of each (default: 128)")
    parser.add_argument("--rounds", type=int, default=1, help="number of rounds (default: 1)")
    parser.add_argument("--lists", nargs="+", choices=LISTS, default=list(LISTS), help="which bodies (default: all)")
    parser.add_argument("server_options", nargs="*", help="options of `quire serve`, after --")
    return 0 if asyncio.run(measure(parser.parse_args(argv))) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
