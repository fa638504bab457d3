"""Measures servers by CPU time: the seconds of all processes of a server for the same prompts. Others on the machine
disturb this far less than they disturb times, so it compares servers on a machine that is never quiet.

    python benchmarks/cpu_seconds.py --tokenizer MODEL [--loads c1,c8] [--rounds N] [--results FILE.json]
        quire='quire serve MODEL --num-threads 1 --port {port} ...' vllm='vllm serve MODEL --port {port} ...'

Starts one server after the other with one thread each, as its command says, runs every load once to warm up and then
`--rounds` times, and stops it. Prints a Markdown table: CPU seconds and output tokens per second of wall-clock time in
every round, and the median CPU seconds of the best other server divided by those of the first one. With `--results`,
servers that an earlier call measured are in the table, too.
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
    parser.add_argument("--results", type=Path, metavar="FILE.json", help="file that collects the results of all calls")
    parser.add_argument("--tokenizer", required=True, help="folder of the tokenizer that makes the prompts")
    options = parser.parse_args(argv)
    if unknown := set(options.loads) - LOADS.keys():
        parser.error(f"unknown load {unknown.pop()}; known: {', '.join(LOADS)}")
    file, results = options.results, {}
    if file and file.exists():
        results = json.loads(file.read_text(encoding="utf-8"))
    for name, command in options.servers:
        results[name] = asyncio.run(measure(name, command, options))
        if file:
            file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print("\n".join(table(options.loads, results)))
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
        for load in options.loads:
            found[load] = []
            for number in range(options.rounds + 1):
                before = cpu_seconds(server.process.pid)
                figures = await run_load(server.port, load, number, options.tokenizer)
                seconds = cpu_seconds(server.process.pid) - before
                if number:  # the first one warms up
                    found[load].append((seconds, figures["output_throughput"]))
                    print(f"{name}: {LOADS[load][0]}: {seconds:.1f} s of CPU", file=sys.stderr, flush=True)
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


def table(loads: Sequence[str], results: dict[str, dict[str, Rounds]]) -> list[str]:
    """The results as Markdown."""
    names = list(results)
    lines = [f"| load | {' | '.join(names)} | best other / {names[0]} |", "|---" * (len(names) + 2) + "|"]
    for load in loads:
        medians = [statistics.median(seconds for seconds, _ in results[name][load]) for name in names]
        cells = [
            ", ".join(f"{seconds:.1f}" for seconds, _ in results[name][load])
            + " ("
            + ", ".join(f"{rate:.1f}" for _, rate in results[name][load])
            + " tok/s)"
            for name in names
        ]
        ratio = min(medians[1:], default=float("nan")) / medians[0]
        lines.append(f"| {LOADS[load][0]} | {' | '.join(cells)} | {ratio:.2f} |")
    return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
