"""Measures speculative decoding on text that repeats itself and on text that does not:
`python -m benchmarks.speculation [--streams 1 8 32] [--methods auto ngram] [--cpu-time] MODEL [flags of quire serve]`.

Three loads: "repeat this code with one change" and JSON of a schema with long keys, greedy, and prose at temperature 1,
which cannot be predicted. One server per method runs each load with drafts and, by `speculation: false`, without, in
turns, so that both meet the same machine; the best round counts. Each run has a cache salt of its own: no run drafts
from the texts of another. Reports output tokens per second (with `--cpu-time`: of the server's and the engine's CPU
time, for busy machines and one thread), the gain, the time to the first token, the acceptance rate, and how many texts
differ (none, where logits have the same bits).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import httpx

from benchmarks.server import cpu_seconds, family
from quire.cli.bench.process import ServerProcess, free_port

CODE = '''def read_records(path, separator=","):
    """Read all records of a file as lists of fields."""
    records = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            fields = [field.strip() for field in line.split(separator)]
            if len(fields) < 2:
                raise ValueError(f"{path}:{number}: expected two fields")
            records.append(fields)
    return records


def write_records(path, records, separator=","):
    """Write records to a file, one per line."""
    with open(path, "w", encoding="utf-8") as file:
        for fields in records:
            file.write(separator.join(fields) + "\\n")
'''
EDIT = f"Repeat this code, but rename the variable `records` to `rows`. Reply with code only.\n\n```python\n{CODE}```"
SCHEMA = {
    "type": "object",
    "properties": {
        "customer_identification_number": {"type": "integer", "minimum": 1, "maximum": 99999},
        "shipping_address_postal_code": {"type": "integer", "minimum": 10000, "maximum": 99999},
        "preferred_delivery_time_window": {"enum": ["morning", "afternoon", "evening"]},
        "is_subscribed_to_newsletter": {"type": "boolean"},
        "number_of_previous_orders": {"type": "integer", "minimum": 0, "maximum": 99},
    },
}
SCHEMA["required"] = list(SCHEMA["properties"])
JSON = {"type": "json_schema", "json_schema": {"name": "customer", "schema": SCHEMA}}
LOADS = {
    "edit": (lambda i: EDIT + "\n" * i, {"temperature": 0}),
    "json": (lambda i: f"Make up record {i} of a customer, as JSON.", {"temperature": 0, "response_format": JSON}),
    "prose": (lambda i: f"Tell me an unusual story about the number {i}.", {"temperature": 1.0, "top_p": 1.0}),
}


@dataclass
class Round:
    """Output tokens per second, mean seconds to the first token, and the texts of one run of a load."""

    rate: float
    first: float
    texts: list[str]


async def run(
    url: str, load: str, streams: int, max_tokens: int, speculation: bool, salt: str, clock: Callable[[], float]
) -> Round:
    """Send `streams` requests of a load at once."""
    prompt, sampling = LOADS[load]
    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as client:

        async def one(i: int) -> tuple[int, float, str]:
            body = {"messages": [{"role": "user", "content": prompt(i)}], "max_tokens": max_tokens, "seed": i}
            body |= {"speculation": speculation, "stream": True, "stream_options": {"include_usage": True}}
            body["cache_salt"] = salt
            begin, first, count, text = time.perf_counter(), 0.0, 0, ""
            async with client.stream("POST", "/v1/chat/completions", json=body | sampling) as answer:
                answer.raise_for_status()
                async for line in answer.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    chunk = json.loads(line.removeprefix("data: "))
                    for choice in chunk["choices"]:
                        text += choice["delta"].get("content") or ""
                        first = first or (time.perf_counter() - begin if text else 0.0)
                    count = (chunk.get("usage") or {}).get("completion_tokens", count)
            return count, first, text

        begin = clock()
        answers = await asyncio.gather(*map(one, range(streams)))
        elapsed = clock() - begin
    counts, firsts, texts = zip(*answers)
    return Round(sum(counts) / elapsed, sum(firsts) / streams, list(texts))


def acceptance(url: str) -> tuple[float, float]:
    """Return (draft tokens, accepted ones) so far."""
    page = httpx.get(f"{url}/metrics", trust_env=False).text
    return tuple(
        float(re.search(rf"^quire:spec_decode_num_{name}_tokens_total{{.*}} (.*)$", page, re.MULTILINE)[1])
        for name in ("draft", "accepted")
    )


async def compare(url: str, load: str, streams: int, max_tokens: int, rounds: int, clock: Callable[[], float]) -> str:
    """Return the cells of a row: rates without and with drafts, gain, times to the first token, acceptance,
    differences.
    """
    before, done = acceptance(url), {False: [], True: []}
    for number in range(rounds):
        for speculation in (False, True):
            salt = f"{load} {streams} {number} {speculation}"
            await run(url, load, streams, 2, False, salt, clock)  # the prompts are in the prefix cache then
            done[speculation].append(await run(url, load, streams, max_tokens, speculation, salt, clock))
    await asyncio.sleep(0.5)  # the engine sends its counts now and then
    drafted, accepted = (after - first for after, first in zip(acceptance(url), before))
    plain, fast = (max(done[speculation], key=lambda one: one.rate) for speculation in (False, True))
    firsts = [1000 * min(one.first for one in done[speculation]) for speculation in (False, True)]
    differing = sum(a != b for a, b in zip(plain.texts, fast.texts))
    share = f"{100 * accepted / drafted:.0f} % of {drafted:.0f}" if drafted else "-"
    rates = f"{plain.rate:.1f} | {fast.rate:.1f} | {fast.rate / plain.rate:.2f}"
    return f"{rates} | {firsts[0]:.0f}, {firsts[1]:.0f} | {share} | {differing}"


async def measure(args: argparse.Namespace, flags: list[str]) -> None:
    """Print the table."""
    print("| load | streams | method | tokens/s without | with | gain | first token, ms | accepted | differing texts |")
    print("|---" * 9 + "|")
    for method in args.methods:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        config = method if method.startswith("{") else json.dumps({"method": method})
        command = [sys.executable, "-m", "quire", "serve", *args.model, *flags, "--speculative-config", config]
        with ServerProcess([*command, "--port", str(port)], port) as server:
            await server.wait_for("/health")
            processes = family(server.process.pid)
            clock = partial(cpu_seconds, processes) if args.cpu_time else time.perf_counter
            for load in args.loads:
                for streams in args.streams:
                    cells = await compare(url, load, streams, args.max_tokens, args.rounds, clock)
                    print(f"| {load} | {streams} | {json.loads(config)['method']} | {cells} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--methods", nargs="+", default=["auto"], help="names, or whole JSON objects")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3, help="the best counts")
    parser.add_argument("--cpu-time", action="store_true", help="count CPU time")
    parser.add_argument("model", nargs="+", help="and flags of quire serve")
    args, flags = parser.parse_known_args()
    asyncio.run(measure(args, flags))


if __name__ == "__main__":
    main()
