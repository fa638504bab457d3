"""The loads of RESULTS.md against servers that already run on this machine, one loaded at a time, in turn: A B A B.
Machines drift by tens of percent; ratios of one run do not.

    python benchmarks/side_by_side.py OUT.json quire=http://127.0.0.1:8102 vllm=http://127.0.0.1:8101
    llama.cpp=http://127.0.0.1:8103 [--rounds 2] [--loads c1,c8]

Prints a Markdown table: per load and figure the rounds of every server, and what the first server has over the best of
the others (throughput: more is better; times: less is).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # works uninstalled, too

from quire.cli.bench import serve

_SHARED = (
    "--dataset-name prefix-repetition --prefix-repetition-prefix-len 900 --prefix-repetition-suffix-len 32 "
    "--prefix-repetition-num-prefixes 1 --prefix-repetition-output-len 32"
)
LOADS: dict[str, tuple[str, str, list[str]]] = {  # name -> (what it is, flags of `quire bench serve`, figures)
    "c1": (
        "1 stream, 32 in / 64 out",
        "--random-input-len 32 --random-output-len 64 --num-prompts 4 --max-concurrency 1 --num-warmups 1",
        ["output_throughput", "median_tpot_ms"],
    ),
    "c8": (
        "8 streams, 128 in / 64 out",
        "--random-input-len 128 --random-output-len 64 --num-prompts 16 --max-concurrency 8",
        ["output_throughput"],
    ),
    "c32": (
        "32 streams, 128 in / 64 out",
        "--random-input-len 128 --random-output-len 64 --num-prompts 64 --max-concurrency 32",
        ["output_throughput", "median_ttft_ms"],
    ),
    "p1024": (
        "1024-token prompt",
        "--random-input-len 1024 --random-output-len 2 --num-prompts 4 --max-concurrency 1",
        ["median_ttft_ms"],
    ),
    "prefix": (
        "32 requests with a common prefix of 900 tokens, 32 in / 32 out",
        f"{_SHARED} --num-prompts 32 --max-concurrency 32",
        ["output_throughput"],
    ),
}
TITLES = {
    "output_throughput": "output tok/s",
    "median_tpot_ms": "time per output token, ms",
    "median_ttft_ms": "median time to first token, ms",
}

Runs = dict[str, dict[str, list[dict[str, Any]]]]  # load -> server -> figures of each round


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", metavar="OUT.json", help="every figure of every run is written here")
    parser.add_argument(
        "servers",
        nargs="+",
        metavar="NAME=URL",
        type=named_url,
        help="running servers of one model; the first is compared with the others",
    )
    parser.add_argument("--rounds", type=int, default=2, help="default: 2")
    parser.add_argument(
        "--loads", type=load_names, default=list(LOADS), help=f"comma-separated, of {','.join(LOADS)} (default: all)"
    )
    parser.add_argument(
        "--tokenizer",
        metavar="FOLDER",
        help="count prompt tokens with this tokenizer, so that all servers get the same prompts",
    )
    arguments = parser.parse_args(argv)
    seed = secrets.randbelow(1 << 20) * 1000  # of this invocation: a server that has met another one's prompts would find them in its prefix cache
    runs: Runs = {load: {name: [] for name, _ in arguments.servers} for load in arguments.loads}
    for number in range(1, arguments.rounds + 1):
        for name, url in arguments.servers:
            for load in arguments.loads:
                print(f"== round {number}: {name}: {LOADS[load][0]}", flush=True)
                runs[load][name].append(asyncio.run(run_load(url, load, seed + 100 * number, arguments.tokenizer)))
                Path(arguments.output).write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")
    print("\n".join(table(runs)))
    return 0


def named_url(text: str) -> tuple[str, str]:
    name, separator, url = text.partition("=")
    if not separator or not url.startswith("http"):
        raise argparse.ArgumentTypeError(f"must be NAME=URL, got {text}")
    return name, url


def load_names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in LOADS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(LOADS)}")
    return names


async def run_load(url: str, load: str, seed: int, tokenizer: str | None) -> dict[str, Any]:
    """The figures of one load.

    Every round has prompts of its own, the same for all servers, so that none finds the last round's in its prefix
    cache.
    """
    flags = ["--base-url", url, "--ignore-eos", "--disable-tqdm", "--seed", str(seed), *LOADS[load][1].split()]
    (figures,) = await serve.measure(
        serve.parser().parse_args(flags + (["--tokenizer", tokenizer] if tokenizer else [])), {}
    )
    if figures["failed"]:
        raise RuntimeError(f"{figures['failed']} requests of {load} failed at {url}")
    return figures


def table(runs: Runs) -> list[str]:
    """Markdown; medians over the rounds make the ratios."""
    names = list(next(iter(runs.values())))
    others = " / best other" if len(names) > 2 else f" / {names[-1]}"
    lines = [f"| load | figure | {' | '.join(names)} | {names[0]}{others} |", "|---" * (len(names) + 3) + "|"]
    for load, by_server in runs.items():
        for i, figure in enumerate(LOADS[load][2]):
            values = {name: [round_[figure] for round_ in rounds] for name, rounds in by_server.items()}
            medians = [statistics.median(rounds) for rounds in values.values()]
            best = (max if figure == "output_throughput" else min)(medians[1:], default=float("nan"))
            cells = [
                ", ".join(f"{value:.0f}" if value >= 100 else f"{value:.1f}" for value in rounds)
                for rounds in values.values()
            ]
            lines.append(
                f"| {'' if i else LOADS[load][0]} | {TITLES[figure]} | {' | '.join(cells)} | {medians[0] / best:.2f} |"
            )
    return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
