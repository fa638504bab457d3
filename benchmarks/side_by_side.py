"""Measures the loads of RESULTS.md on servers of one machine, one at a time, in turn: A B A B. Times drift by tens of
percent, ratios within one run are stable.

    python benchmarks/side_by_side.py OUT.json quire=http://127.0.0.1:8102 vllm='vllm serve MODEL --port {port}'
    [--rounds 2] [--loads c1,c8] [--by-server] [-- flags of quire bench serve]

A server is the URL of one that runs, or a command, which is started in each round and warmed up by the first load.
`--by-server` runs all rounds of a server before the next one starts, for models that load slowly. Flags after `--` are
a load in place of the named ones.

Prints a Markdown table: the rounds of each server per load and figure, and the ratio of the first server's median to
that of the best other (throughput: more is better; times: less is). The CPU seconds of a started server's processes
depend less than times on other work of the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import shlex
import statistics
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # works without an installation

from benchmarks.server import cpu_seconds, family
from quire.cli.bench import serve
from quire.cli.bench.process import ServerProcess, free_port

_SHARED = (
    "--dataset-name prefix-repetition --prefix-repetition-prefix-len 900 --prefix-repetition-suffix-len 32 "
    "--prefix-repetition-num-prefixes 1 --prefix-repetition-output-len 32"
)


def _sizes(input_len: int, output_len: int, num_prompts: int, concurrency: int) -> str:
    lengths = f"--random-input-len {input_len} --random-output-len {output_len}"
    return f"{lengths} --num-prompts {num_prompts} --max-concurrency {concurrency}"


TPOT = "median_tpot_ms"
LOADS: dict[str, tuple[str, str, list[str]]] = {  # name -> (description, flags of `quire bench serve`, figures)
    "c1": ("1 stream, 32 in / 64 out", _sizes(32, 64, 4, 1) + " --num-warmups 1", ["output_throughput", TPOT]),
    "c8": ("8 streams, 128 in / 64 out", _sizes(128, 64, 16, 8), ["output_throughput"]),
    "c32": ("32 streams, 128 in / 64 out", _sizes(128, 64, 64, 32), ["output_throughput", "median_ttft_ms"]),
    "p1024": ("1024-token prompt", _sizes(1024, 2, 4, 1), ["median_ttft_ms"]),
    "prefix": (
        "32 requests with a common prefix of 900 tokens, 32 in / 32 out",
        f"{_SHARED} --num-prompts 32 --max-concurrency 32",
        ["output_throughput"],
    ),
}
TITLES = {
    "output_throughput": "output tok/s",
    TPOT: "time per output token, ms",
    "median_ttft_ms": "median time to first token, ms",
    "cpu_seconds": "CPU time of the server, s",
}

Runs = dict[str, dict[str, list[dict[str, Any]]]]  # load -> server -> figures of each round


def main(argv: Sequence[str]) -> int:
    own, load = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", metavar="OUT.json", help="file for every figure of every run")
    parser.add_argument("servers", nargs="+", metavar="NAME=URL|COMMAND", type=named_server)
    parser.add_argument("--rounds", type=int, default=2, help="number of rounds (default: 2)")
    parser.add_argument("--loads", type=load_names, default=list(LOADS), help=f"default: {','.join(LOADS)}")
    parser.add_argument("--by-server", action="store_true", help="all rounds of a server before the next one starts")
    parser.add_argument("--tokenizer", metavar="FOLDER", help="makes the same prompts for all servers")
    arguments = parser.parse_args(own)
    if load:
        LOADS["given"] = " ".join(load), " ".join(load), ["output_throughput", "median_ttft_ms", "median_tpot_ms"]
        arguments.loads = ["given"]
    # a new seed per invocation: the server may have cached the prompts of an earlier one
    seed = secrets.randbelow(1 << 20) * 1000
    runs: Runs = {load: {name: [] for name, _ in arguments.servers} for load in arguments.loads}
    rounds = range(1, arguments.rounds + 1)
    for numbers in [[*rounds]] if arguments.by_server else [[number] for number in rounds]:
        for name, server in arguments.servers:
            asyncio.run(measure(runs, name, server, numbers, seed, arguments.tokenizer))
            Path(arguments.output).write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")
    print("\n".join(table(runs)))
    return 0


def named_server(text: str) -> tuple[str, str]:
    name, separator, server = text.partition("=")
    if not separator or not (server.startswith("http") or "{port}" in server):
        raise argparse.ArgumentTypeError(f"must be NAME=URL, or NAME=COMMAND with {{port}} in the command, got {text}")
    return name, server


async def measure(runs: Runs, name: str, server: str, numbers: list[int], seed: int, tokenizer: str | None) -> None:
    """Run each load of `runs` in the rounds of `numbers` on one server."""
    async with running(server) as (url, pid):
        if pid:
            await run_load(url, next(iter(runs)), seed, tokenizer)  # warm up
        for number in numbers:
            for load in runs:
                print(f"== round {number}: {name}: {LOADS[load][0]}", flush=True)
                before = cpu_seconds(family(pid) if pid else [])
                figures = await run_load(url, load, seed + 100 * number, tokenizer)
                runs[load][name].append(figures | {"cpu_seconds": cpu_seconds(family(pid) if pid else []) - before})


@asynccontextmanager
async def running(server: str) -> AsyncIterator[tuple[str, int | None]]:
    """Yield the URL of a server and its process id, or None if it ran before."""
    if server.startswith("http"):
        yield server, None
        return
    port = free_port()
    with ServerProcess(shlex.split(server), port) as started:
        await started.wait_for("/health")
        yield f"http://127.0.0.1:{port}", started.process.pid


def load_names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in LOADS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(LOADS)}")
    return names


async def run_load(url: str, load: str, seed: int, tokenizer: str | None) -> dict[str, Any]:
    """Return the figures of one load. All servers get the same prompts, new ones in each round, so that no server
    finds them in its prefix cache.
    """
    flags = ["--base-url", url, "--ignore-eos", "--disable-tqdm", "--seed", str(seed), *LOADS[load][1].split()]
    flags += ["--tokenizer", tokenizer] if tokenizer else []
    (figures,) = await serve.measure(serve.parser().parse_args(flags), {})
    if figures["failed"]:
        raise RuntimeError(f"{figures['failed']} requests of {load} failed at {url}")
    return figures


def table(runs: Runs) -> list[str]:
    """Return the results as Markdown. Ratios are those of the medians over the rounds."""
    names = list(next(iter(runs.values())))
    others = " / best other" if len(names) > 2 else f" / {names[-1]}"
    lines = [f"| load | figure | {' | '.join(names)} | {names[0]}{others} |", "|---" * (len(names) + 3) + "|"]
    for load, by_server in runs.items():
        measured = any(round_.get("cpu_seconds") for rounds in by_server.values() for round_ in rounds)
        for i, figure in enumerate([*LOADS[load][2], *(["cpu_seconds"] if measured else [])]):
            values = {name: [round_[figure] for round_ in rounds] for name, rounds in by_server.items()}
            medians = [statistics.median(rounds) for rounds in values.values()]
            best = (max if figure == "output_throughput" else min)(medians[1:], default=float("nan"))
            cells = ["" if i else LOADS[load][0], TITLES[figure]]
            cells += [", ".join(f"{one:.{0 if one >= 100 else 1}f}" for one in rounds) for rounds in values.values()]
            lines.append(f"| {' | '.join(cells)} | {medians[0] / best:.2f} |")
    return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
