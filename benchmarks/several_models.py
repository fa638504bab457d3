"""Measures what several models in one server cost.

python benchmarks/several_models.py MODEL OTHER [--rounds 3] [--streams 8] [--output-len 64]

Prints, for MODEL: its output tokens per second in a server of its own and in a server of both, in turn; the time
between tokens of one stream alone and while OTHER loads; and the seconds until OTHER, unloaded before, gives its first
token.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent.parent))  # works without an installation

from quire.cli.bench import serve
from quire.cli.bench.datasets import Sample, make_samples
from quire.cli.bench.load import Result, Target, run_load, send
from quire.cli.bench.process import ServerProcess, free_port
from quire.cli.bench.report import percentile, summarize

_PROMPT_TOKENS = 64
_PAUSE = 15.0  # seconds in which the server plans both models and prepares an engine process
_LONG = 2000  # output tokens of the stream that goes on while the other model loads


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("other")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each server (default: 3)")
    parser.add_argument("--streams", type=int, default=8, help="requests at once (default: 8)")
    parser.add_argument("--output-len", type=int, default=64, help="output tokens of a request (default: 64)")
    arguments = parser.parse_args(argv)
    asyncio.run(measure(arguments))
    return 0


async def measure(arguments: argparse.Namespace) -> None:
    alone, both = [], []
    for _ in range(arguments.rounds):
        alone.append(await throughput(arguments, [arguments.model]))
        both.append(await throughput(arguments, [arguments.model, arguments.other]))
    ratio = median(both) / median(alone)
    print(f"output tokens/s: alone {median(alone):.1f}, in a server of both {median(both):.1f}, ratio {ratio:.3f}")
    for _ in range(arguments.rounds):
        await loading(arguments)


def server(models: Sequence[str]) -> ServerProcess:
    names = [f"{name}={model}" for name, model in zip(("a", "b"), models, strict=False)]
    flags = ["--alias", *names] if len(models) > 1 else ["--served-model-name", "a"]
    command = [sys.executable, "-m", "quire", "serve", *models, "--port", "{port}", *flags]
    return ServerProcess(command, free_port())


def target(running: ServerProcess, name: str) -> Target:
    return Target(running.client, "/v1/completions", name, ignore_eos=True, temperature=0.0)


async def throughput(arguments: argparse.Namespace, models: Sequence[str]) -> float:
    with server(models) as running:
        await running.wait_for("/health")
        flags = ["--num-prompts", str(4 * arguments.streams), "--input-len", str(_PROMPT_TOKENS)]
        given = serve.parser().parse_args([*flags, "--output-len", str(arguments.output_len)])
        samples = make_samples(given, None, seed=1)
        await one(running, "a", 8)
        await asyncio.sleep(_PAUSE)
        results, seconds = await run_load(
            target(running, "a"), samples, [0.0] * len(samples), arguments.streams, lambda result: None
        )
        figures = summarize(results, seconds, [], {})
        assert not figures["failed"]
        return figures["output_throughput"]


async def one(running: ServerProcess, name: str, output_len: int) -> Result:
    result = await send(target(running, name), Sample("Once upon a time", 4, output_len))
    if result.error:
        raise RuntimeError(result.error)
    return result


async def loading(arguments: argparse.Namespace) -> None:
    with server([arguments.model, arguments.other]) as running:
        await running.wait_for("/health")
        await one(running, "a", 8)
        await asyncio.sleep(_PAUSE)
        before = sorted((await one(running, "a", 200)).itl)
        stream = asyncio.create_task(one(running, "a", _LONG))
        await asyncio.sleep(1.0)
        start = time.perf_counter()
        first = await one(running, "b", 1)
        seconds = time.perf_counter() - start
        gaps = (await stream).itl
    times, now = [], 0.0
    for gap in gaps:
        now += gap
        if 1.0 < now < 1.0 + seconds:
            times.append(gap)
    during = sorted(times)
    print(f"first token of the other model after {first.ttft:.2f} s (load and prompt)")
    for name, percent in (("mean", None), ("p50", 50), ("p99", 99)):
        old, new = (sum(s) / len(s) if percent is None else percentile(s, percent) for s in (before, during))
        print(f"time between tokens, {name}: {1e3 * old:.1f} ms, {1e3 * new:.1f} ms while it loads, {new / old:.2f} x")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
