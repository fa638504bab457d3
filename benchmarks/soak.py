"""Tests that a server stays healthy under mixed traffic: `python -m benchmarks.soak [--minutes 30] [serve flags]`.

Some clients send requests of all dialects, with images, grammars and tools, leave early or read slowly. At the end:
the slope of the resident memory of every process with its noise, whether all blocks of the KV cache are free, answers
that were wrong, and requests that got no answer. Exits with 1 unless all of it is as it should be. `--distinct KIND`
(may be repeated) then sends 5,000 requests of a kind, each with an own schema, image or conversation
(`soak_memory.py`). MODEL is a tiny one that reads images, written to a temporary folder, unless `--model` names
another. Every cache is small, so that it is full before the measurement begins.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import httpx

from benchmarks import soak_memory
from benchmarks.server import Server, serving
from benchmarks.soak_memory import slope
from benchmarks.soak_traffic import KINDS, Kind, Outcome, send

FLAGS = ["--kv-cache-memory-bytes", "4M", "--max-model-len", "2048", "--max-num-seqs", "16"]
FLAGS += ["--mm-processor-cache-gb", "0.002", "--responses-store-size", "1M", "--log-stats-interval", "0"]
WARM_UP = 0.3  # fraction of the time before the measurement
NUM_BLOCKS = 12  # blocks of samples, whose means are independent enough for the noise of a slope
DRAIN_SECONDS = 60.0
Samples = dict[str, list[tuple[float, float]]]  # (hours, MB) of each process


def fitted(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Return (MB per hour, twice the standard error of it) of means over blocks of samples."""
    size = max(len(points) // NUM_BLOCKS, 1)
    blocks = [points[i : i + size] for i in range(0, len(points) - size + 1, size)]
    means = [tuple(sum(values) / len(block) for values in zip(*block, strict=True)) for block in blocks]
    if len(means) < 3:
        return 0.0, math.inf
    rise = slope(means)
    mean_x, mean_y = (sum(values) / len(means) for values in zip(*means, strict=True))
    rest = sum((y - mean_y - rise * (x - mean_x)) ** 2 for x, y in means) / (len(means) - 2)
    return rise, 2 * math.sqrt(rest / sum((x - mean_x) ** 2 for x, _ in means))


async def client(
    http: httpx.AsyncClient, kinds: list[Kind], model: str, seed: int, until: float, outcomes: list[Outcome]
) -> None:
    rng = random.Random(seed)
    while time.monotonic() < until:
        outcomes.append(await send(http, rng.choice(kinds), rng, model))


async def watch(server: Server, started: float, until: float, every: float) -> Samples:
    samples: Samples = {}
    warm = started + WARM_UP * (until - started)
    while (now := time.monotonic()) < until:
        if now >= warm:
            for name, size in server.resident().items():
                samples.setdefault(name, []).append(((now - started) / 3600, size))
        await asyncio.sleep(every)
    return samples


async def traffic(server: Server, kinds: list[Kind], minutes: float, num_clients: int) -> tuple[list[Outcome], Samples]:
    started = time.monotonic()
    until = started + 60 * minutes
    outcomes: list[Outcome] = []
    limits = httpx.Limits(max_connections=2 * num_clients)
    async with httpx.AsyncClient(base_url=server.url, trust_env=False, limits=limits) as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
        watching = asyncio.create_task(watch(server, started, until, max(60 * minutes / 400, 0.5)))
        await asyncio.gather(*(client(http, kinds, model, seed, until, outcomes) for seed in range(num_clients)))
        return outcomes, await watching


def is_idle(server: Server) -> dict[str, object]:
    """Return the requests and blocks that the server still holds after all requests; empty if none."""
    end, left = time.monotonic() + DRAIN_SECONDS, {}
    with httpx.Client(base_url=server.url, trust_env=False, timeout=30) as http:
        while time.monotonic() < end:
            load, requests = http.get("/load").json(), http.get("/requests").json()["requests"]
            left = {name: value for name, value in load.items() if value and name != "server_load"}
            left |= {"requests": len(requests)} if requests else {}
            if not left:
                return {}
            time.sleep(0.5)
    return left


def report(outcomes: list[Outcome], samples: Samples, left: dict[str, object], limit: float) -> bool:
    """Print it. Returns whether something is not as it should be."""
    counts = Counter((one.kind, one.status) for one in outcomes)
    print(f"{len(outcomes)} requests: " + ", ".join(f"{k} {s}: {n}" for (k, s), n in sorted(counts.items(), key=str)))
    wrong = [one for one in outcomes if one.is_wrong]
    for one in wrong[:20]:
        print(f"  wrong: {one.kind} ({one.how}) {one.status} {one.error}")
    stuck = sum(one.status is None for one in outcomes)
    failures = sum(one.status is not None and one.status >= 500 and one.is_wrong for one in outcomes)
    print(f"{len(wrong)} wrong answers, {failures} of them 5xx, {stuck} stuck; left over: {left or 'nothing'}")
    grows = False
    print("| process | MB at the end | MB per hour | noise (two standard errors) |\n|---|---|---|---|")
    for name, points in samples.items():
        rise, noise = fitted(points)
        late = points[-1][0] - points[0][0]  # hours
        grows |= len(points) > NUM_BLOCKS and rise - noise > limit and rise * late > 1.0
        print(f"| {name.rpartition('-')[0]} | {points[-1][1]:.1f} | {rise:+.2f} | {noise:.2f} |", flush=True)
    return bool(wrong or left or grows)


def write_model(folder: Path) -> str:
    from tests.helpers.models.seeing_models import write_qwen

    write_qwen(folder)
    return str(folder)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--model", help="folder, GGUF file or Hub id")
    parser.add_argument("--limit", type=float, default=4.0, help="MB per hour that a process may grow beyond noise")
    parser.add_argument("--distinct", choices=soak_memory.KINDS, action="append", default=[])
    parser.add_argument("--kinds", help="of requests, comma-separated (default: all)")
    args, flags = parser.parse_known_args(argv)
    kinds = [kind for kind in KINDS if args.kinds is None or kind.name in args.kinds.split(",")]
    with tempfile.TemporaryDirectory() as name:
        model = args.model or write_model(Path(name))
        with serving([model, *FLAGS, *flags]) as server:
            outcomes, samples = asyncio.run(traffic(server, kinds, args.minutes, args.clients))
            is_bad = report(outcomes, samples, is_idle(server), args.limit)
        for kind in args.distinct:
            is_bad |= bool(soak_memory.main(["--kind", kind, model, *FLAGS[2:], *flags]))
    return int(is_bad)


if __name__ == "__main__":
    sys.exit(main())
