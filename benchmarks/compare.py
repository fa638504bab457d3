"""Measures two servers in turn, A B A B, under the same load on one machine. Times drift by tens of percent, ratios
within one run are stable.

python benchmarks/compare.py --a 'quire serve MODEL --port {port}' --b 'vllm serve MODEL --port {port}' [--rounds 2] --
[flags of quire bench serve]
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

sys.path.insert(0, str(Path(__file__).parent.parent))  # works without an installation

from quire.cli.bench import serve
from quire.cli.bench.process import ServerProcess, free_port
from quire.cli.bench.report import parse_goodput

FIGURES = {
    "output_throughput": "output tok/s",
    "total_token_throughput": "total tok/s",
    "median_ttft_ms": "TTFT median ms",
    "p99_ttft_ms": "TTFT p99 ms",
    "median_tpot_ms": "TPOT median ms",
    "p99_tpot_ms": "TPOT p99 ms",
    "median_e2el_ms": "E2E median ms",
}
DEFAULT_LOAD = [
    "--num-prompts",
    "32",
    "--random-input-len",
    "128",
    "--random-output-len",
    "64",
    "--ignore-eos",
    "--max-concurrency",
    "1,8,32",
]


def main(argv: Sequence[str]) -> int:
    own, load = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, DEFAULT_LOAD)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--a", required=True, metavar="COMMAND", help="command line of the first server; {port} is replaced"
    )
    parser.add_argument("--b", required=True, metavar="COMMAND", help="command line of the second server")
    parser.add_argument("--rounds", type=int, default=2, help="number of starts of each server (default: 2)")
    parser.add_argument(
        "--startup-timeout", type=float, default=900.0, help="seconds to wait for readiness (default: 900)"
    )
    parser.add_argument("--output-json", metavar="FILE", help="write every run as JSON")
    arguments = parser.parse_args(own)
    runs: dict[str, list[list[dict[str, Any]]]] = {"a": [], "b": []}
    for round_number in range(arguments.rounds):
        for name in runs:
            print(f"== round {round_number + 1}: {name}: {getattr(arguments, name)}", flush=True)
            runs[name].append(asyncio.run(measure(getattr(arguments, name), load, arguments.startup_timeout)))
    print("\n".join(table(runs)))
    if arguments.output_json:
        Path(arguments.output_json).write_text(
            json.dumps({"load": load, "commands": {"a": arguments.a, "b": arguments.b}, "runs": runs}, indent=1) + "\n",
            encoding="utf-8",
        )
    return 0


async def measure(command: str, load: Sequence[str], timeout: float) -> list[dict[str, Any]]:
    """One run per concurrency on a newly started server."""
    port = free_port()
    arguments = serve.parser().parse_args([*load, "--port", str(port), "--disable-tqdm"])
    with ServerProcess(shlex.split(command), port) as server:
        ready = await server.wait_for("/health", timeout=timeout)
        print(f"ready after {ready:.1f} s", flush=True)
        return await serve.measure(arguments, parse_goodput(arguments.goodput))


def table(runs: dict[str, list[list[dict[str, Any]]]]) -> list[str]:
    """A Markdown table: medians over the rounds, and the ratio of A to B (above 1: A has more)."""
    lines = ["| concurrency | figure | A | B | A / B |", "|---|---|---|---|---|"]
    for i, first in enumerate(runs["a"][0]):
        for key, title in FIGURES.items():
            if key in first:
                a, b = (statistics.median(one[i][key] for one in runs[name]) for name in ("a", "b"))
                lines.append(
                    f"| {first['max_concurrency'] or 'none'} | {title} | {a:.1f} | {b:.1f} | "
                    f"{a / b if b else float('nan'):.2f} |"
                )
    return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
