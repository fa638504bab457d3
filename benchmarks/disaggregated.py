"""Measures what long prompts cost running streams if another engine computes them.

python benchmarks/disaggregated.py MODEL [--rounds 3] [--streams 4] [--prompt-len 4096] [--seconds 40] [--cores 0 1]

Starts a server that prefills and one that decodes, each on a core of its own. Streams run at the second one: alone;
while the first one computes prompts, one after the other; while these prompts go on at the second one; and with
--one-engine while the second one computes them, too. Prints the time between tokens of the streams and the second
server's CPU time per token in each case, and as multiples of the first. On a busy machine compare the CPU time, and
"both" with "first server busy".
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # works without an installation

from benchmarks.server import cpu_seconds, family
from quire.cli.bench.process import ServerProcess, free_port
from quire.cli.bench.report import percentile

_PATH = "/v1/completions"
_STREAM_TOKENS = 4000
_OUTPUT_TOKENS = 4  # of a long prompt
_SETTLE = 2.0  # seconds until the streams run
_MEASURES = ("mean", "p50", "p99", "CPU time")

Arrive = Callable[[list[int]], Awaitable[int]]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each case (default: 3)")
    parser.add_argument("--streams", type=int, default=4, help="streams that run (default: 4)")
    parser.add_argument("--prompt-len", type=int, default=4096, help="tokens of a prompt (default: 4096)")
    parser.add_argument("--seconds", type=float, default=40.0, help="time of a measurement (default: 40)")
    parser.add_argument("--cores", type=int, nargs=2, default=(0, 1), help="of the servers (default: 0 1)")
    parser.add_argument("--one-engine", action="store_true", help="also send the prompts to the second server only")
    asyncio.run(measure(parser.parse_args(argv)))
    return 0


def server(arguments: argparse.Namespace, core: int, role: str) -> ServerProcess:
    transfer = {"kv_connector": "NixlConnector", "kv_role": role, "kv_port": free_port(), "kv_buffer_size": 4e9}
    flags = ["--max-model-len", str(arguments.prompt_len + _STREAM_TOKENS), "--served-model-name", "m"]
    flags += ["--kv-transfer-config", json.dumps(transfer)]
    start = ["taskset", "-c", str(core), sys.executable, "-m", "quire", "serve", arguments.model]
    return ServerProcess([*start, "--port", "{port}", *flags], free_port())


async def measure(arguments: argparse.Namespace) -> None:
    first, second = arguments.cores
    with server(arguments, first, "kv_producer") as prefill, server(arguments, second, "kv_consumer") as decode:
        await asyncio.gather(prefill.wait_for("/health"), decode.wait_for("/health"))

        async def through_both(prompt: list[int]) -> int:
            sent = await complete(prefill, prompt, 1, {"do_remote_decode": True})
            answer = await complete(decode, prompt, _OUTPUT_TOKENS, sent["kv_transfer_params"])
            return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

        async def only_first(prompt: list[int]) -> int:
            await complete(prefill, prompt, 1, {"do_remote_decode": True})
            return 0

        async def direct(prompt: list[int]) -> int:
            await complete(decode, prompt, _OUTPUT_TOKENS, {})
            return 0

        await through_both([7] * 64)
        cases: dict[str, Arrive | None] = {"alone": None, "first server busy": only_first, "both": through_both}
        if arguments.one_engine:
            cases["one engine"] = direct
        ratios: dict[str, list[list[float]]] = {name: [] for name in cases}
        for number in range(arguments.rounds):
            base: list[float] = []
            for name, arrive in cases.items():
                gaps, cached, cpu = await streams(arguments, decode, arrive, number)
                times = [sum(gaps) / len(gaps), percentile(gaps, 50), percentile(gaps, 99), cpu / len(gaps)]
                base = base or times
                ratios[name].append([one / other for one, other in zip(times, base)])
                figures = ", ".join(f"{what} {1e3 * one:.1f} ms" for what, one in zip(_MEASURES, times))
                print(f"{name}: {figures}; {len(cached)} prompts, cached tokens {cached}", flush=True)
        for name, found in ratios.items():
            multiples = ", ".join(f"{what} {median(one):.2f} x" for what, one in zip(_MEASURES, zip(*found)))
            print(f"median of {arguments.rounds} rounds, {name}: {multiples}")


async def streams(
    arguments: argparse.Namespace, decode: ServerProcess, arrive: Arrive | None, number: int
) -> tuple[list[float], list[int], float]:
    """Return the times between tokens of streams while prompts arrive, the cached tokens of each prompt, and the CPU
    time of the server.
    """
    gaps: list[float] = []
    running = [asyncio.create_task(stream(decode, [i + 1] * 64, gaps)) for i in range(arguments.streams)]
    await asyncio.sleep(_SETTLE)
    gaps.clear()
    before = cpu_seconds(family(decode.process.pid))
    cached: list[int] = []
    end = time.perf_counter() + arguments.seconds
    rng = random.Random(f"{number} {arrive}")
    while arrive is not None and time.perf_counter() < end:
        cached.append(await arrive([rng.randrange(1000, 20_000) for _ in range(arguments.prompt_len)]))
    await asyncio.sleep(max(end - time.perf_counter(), 0.0))
    found, cpu = sorted(gaps), cpu_seconds(family(decode.process.pid)) - before
    for task in running:
        assert not task.done(), "a stream ended before the measurement"
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    return found, cached, cpu


async def stream(running: ServerProcess, prompt: list[int], gaps: list[float]) -> None:
    """Add the times between the tokens of a stream to `gaps`."""
    response, connection = await running.client.request("POST", _PATH, _body(prompt, _STREAM_TOKENS, {}, stream=True))
    try:
        last = 0.0
        async for _ in response.events():
            now = time.perf_counter()
            if last:
                gaps.append(now - last)
            last = now
    finally:
        running.client.release(connection)  # closes it: the stream has not ended


async def complete(running: ServerProcess, prompt: list[int], max_tokens: int, transfer: dict[str, Any]) -> Any:
    response, connection = await running.client.request("POST", _PATH, _body(prompt, max_tokens, transfer))
    try:
        content = await response.read()
        if response.status != 200:
            raise RuntimeError(f"HTTP {response.status}: {content.decode(errors='replace')[:500]}")
        return json.loads(content)
    finally:
        running.client.release(connection)


def _body(prompt: list[int], max_tokens: int, transfer: dict[str, Any], stream: bool = False) -> bytes:
    body = {"model": "m", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return json.dumps(body | {"stream": stream} | ({"kv_transfer_params": transfer} if transfer else {})).encode()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
