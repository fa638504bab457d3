"""Measures servers that do not fit into memory together, one after the other, with the same prompts: output tokens per
second, and the CPU seconds of all processes of a server. Others on the machine disturb CPU seconds far less than times,
so `--by cpu` compares servers of one thread each on a machine that is never quiet.

    python benchmarks/in_sequence.py --tokenizer MODEL [--loads c1,c8] [--rounds N] [--by cpu|time] [--results FILE]
        quire='quire serve MODEL --num-threads 1 --port {port} ...' vllm='vllm serve MODEL --port {port} ...'

Starts a server as its command says, runs the first load once to warm up (`--warm-up all`: every load), every load
`--rounds` times, and stops it. Prints a Markdown table: CPU seconds and output tokens per second in every round, and
the ratio of the medians, which is above 1 if the first server is better than the best other. With `--results`, what
earlier calls measured is in the table, too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))  # works without an installation

from quire.cli.bench import serve
from quire.cli.bench.process import ServerProcess, free_port

# those of side_by_side.py with fewer requests: name -> (description, flags of `quire bench serve`)
LOADS: dict[str, tuple[str, str]] = {
    "c1": (
        "1 stream, 32 in / 64 out",
        "--random-input-len 32 --random-output-len 64 --num-prompts 1 --max-concurrency 1",
    ),
    "c8": (
        "8 streams, 128 in / 64 out",
        "--random-input-len 128 --random-output-len 64 --num-prompts 8 --max-concurrency 8",
    ),
    "c32": (
        "32 streams, 128 in / 64 out",
        "--random-input-len 128 --random-output-len 64 --num-prompts 32 --max-concurrency 32",
    ),
    "p1024": (
        "1024-token prompt",
        "--random-input-len 1024 --random-output-len 2 --num-prompts 1 --max-concurrency 1",
    ),
}
Rounds = list[tuple[float, float]]  # (CPU seconds, output tokens per second)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="+", metavar="NAME=COMMAND", type=named_command)
    parser.add_argument("--loads", type=lambda text: text.split(","), default=list(LOADS), help=",".join(LOADS))
    parser.add_argument("--rounds", type=int, default=2, help="measured rounds of each load (default: 2)")
    parser.add_argument("--warm-up", choices=["first", "all"], default="all", help="loads to run once more before")
    parser.add_argument("--by", choices=["cpu", "time"], default="cpu", help="what the ratio compares")
    parser.add_argument("--results", type=Path, metavar="FILE.json", help="file that collects the results of all calls")
    parser.add_argument("--tokenizer", required=True, help="folder of the tokenizer that makes the prompts")
    options = parser.parse_args(argv)
    if unknown := set(options.loads) - LOADS.keys():
        parser.error(f"unknown load {unknown.pop()}; known: {', '.join(LOADS)}")
    file, results = options.results, {}
    if file and file.exists():
        results = json.loads(file.read_text(encoding="utf-8"))
    for name, command in options.servers:
        results[name] = results.get(name, {}) | asyncio.run(measure(name, command, options))
        if file:
            file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print("\n".join(table(results, options.by)))
    return 0


def named_command(text: str) -> tuple[str, list[str]]:
    name, separator, command = text.partition("=")
    if not separator or "{port}" not in command:
        raise argparse.ArgumentTypeError(f"must be NAME=COMMAND with {{port}} in the command, got {text}")
    return name, shlex.split(command)


async def measure(name: str, command: list[str], options: argparse.Namespace) -> dict[str, Rounds]:
    """The rounds of every load on a server of its own."""
    found: dict[str, Rounds] = {}
    with ServerProcess(command, free_port()) as server:
        await server.wait_for("/health")
        for i, load in enumerate(options.loads):
            found[load] = []
            for number in range(0 if i == 0 or options.warm_up == "all" else 1, options.rounds + 1):
                before = cpu_seconds(server.process.pid)
                figures = await run_load(server.port, load, number, options.tokenizer)
                seconds, rate = cpu_seconds(server.process.pid) - before, figures["output_throughput"]
                if number:  # the first one warms up
                    found[load].append((seconds, rate))
                    what = f"{name}: {LOADS[load][0]}: {seconds:.1f} s of CPU, {rate:.2f} tok/s"
                    print(what, file=sys.stderr, flush=True)
    return found


def cpu_seconds(pid: int) -> float:
    """CPU time that a process and its descendants have used."""
    root = psutil.Process(pid)
    times = [process.cpu_times() for process in (root, *root.children(recursive=True))]
    return sum(time.user + time.system for time in times)


async def run_load(port: int, load: str, number: int, tokenizer: str) -> dict[str, Any]:
    """The figures of one load. Every round has prompts of its own, the same for all servers, which no server has in
    its prefix cache.
    """
    flags = f"--base-url http://127.0.0.1:{port} --ignore-eos --disable-tqdm --num-warmups 0 --seed {1000 + number}"
    arguments = [*flags.split(), "--tokenizer", tokenizer, *LOADS[load][1].split()]
    (figures,) = await serve.measure(serve.parser().parse_args(arguments), {})
    if figures["failed"]:
        raise RuntimeError(f"{figures['failed']} requests of {load} failed")
    return figures


def table(results: dict[str, dict[str, Rounds]], by: str) -> list[str]:
    """The results as Markdown. A server that did not run a load has a dash."""
    names = list(results)
    lines = [f"| load | {' | '.join(names)} | {names[0]} / best other |", "|---" * (len(names) + 2) + "|"]
    for load, (title, _) in LOADS.items():
        rounds = {name: results[name][load] for name in names if load in results[name]}
        if names[0] not in rounds:
            continue
        own, *others = (speed(found, by) for found in rounds.values())
        cells = [f"{cell(rounds[name])}" if name in rounds else "-" for name in names]
        lines.append(f"| {title} | {' | '.join(cells)} | {own / max(others, default=float('nan')):.2f} |")
    return lines


def speed(rounds: Rounds, by: str) -> float:
    """Tokens per second, or the inverse of the CPU seconds: the median of the rounds."""
    return statistics.median(rate if by == "time" else 1 / seconds for seconds, rate in rounds)


def cell(rounds: Rounds) -> str:
    seconds, rates = (", ".join(f"{value:.1f}" for value in values) for values in zip(*rounds, strict=True))
    return f"{seconds} s ({rates} tok/s)"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
