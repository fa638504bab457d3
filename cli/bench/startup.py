"""Implements `quire bench startup`, which measures the seconds from the command to the first answered probe, to
readiness, and to the first token of the first request.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from quire.cli.bench.datasets import Sample, positive_int
from quire.cli.bench.load import Target, send
from quire.cli.bench.plot import add_plot_flag, plot_starts, require_plot
from quire.cli.bench.process import ServerProcess, free_port
from quire.cli.bench.serve import find_model, positive_float
from quire.cli.main import Parser
from quire.server.startup.bar import Bar

STAGES = {"live": "HTTP answers (/live)", "ready": "ready (/ready)", "first_token": "first token of the first request"}


def main(argv: list[str]) -> int:
    """Run `quire bench startup ARGV...`; other flags are passed to `quire serve`."""
    parser = Parser(
        prog="quire bench startup",
        usage=(
            "quire bench startup [MODEL] [flags of quire serve] [--num-iters N] [--serve-command COMMAND] "
            "[--output-json FILE] [--plot FILE.png] [--disable-tqdm]"
        ),
        description=(
            "Start a server several times and report the seconds from the command to each stage. Other flags are "
            "passed to `quire serve`."
        ),
    )
    parser.add_argument("--num-iters", type=positive_int, default=3, metavar="N", help="number of starts (default: 3)")
    parser.add_argument(
        "--serve-command", metavar="COMMAND", help='measure this server instead, as in "vllm serve MODEL --port {port}"'
    )
    parser.add_argument(
        "--startup-timeout",
        type=positive_float,
        default=900.0,
        metavar="S",
        help="seconds to wait for readiness (default: 900)",
    )
    parser.add_argument("--output-json", metavar="FILE", help="write the figures as JSON")
    parser.add_argument("--disable-tqdm", action="store_true", help="show no progress bar")
    add_plot_flag(parser, "the seconds to each stage")
    arguments, rest = parser.parse_known_args(argv)
    if arguments.serve_command and rest:
        parser.unknown(rest)
    command = (
        shlex.split(arguments.serve_command)
        if arguments.serve_command
        else [sys.executable, "-m", "quire", "serve", *rest, "--port", "{port}"]
    )
    try:
        require_plot(arguments.plot)
        disable = arguments.disable_tqdm
        with Bar(range(arguments.num_iters), desc="starts", unit="start", disable=disable) as starts:
            runs = [asyncio.run(measure(command, arguments.startup_timeout)) for _ in starts]
    except (RuntimeError, OSError) as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")
    figures = {stage: [run[stage] for run in runs] for stage in STAGES}
    print(render(figures))
    if arguments.output_json:
        Path(arguments.output_json).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    if arguments.plot:
        plot_starts(figures, STAGES, arguments.plot)
    return 0


async def measure(command: Sequence[str], timeout: float) -> dict[str, float]:
    """Return the seconds from the start of `command` to every stage. Raises RuntimeError if a stage is not reached."""
    with ServerProcess(command, free_port()) as server:
        live = await server.wait_for("/live", "/health", timeout=timeout)
        ready = await server.wait_for("/ready", "/health", timeout=timeout)
        model, _ = await find_model(server.client, None)
        target = Target(server.client, "/v1/completions", model, ignore_eos=True, temperature=0.0)
        asked = time.perf_counter() - server.started
        result = await send(target, Sample("The first words of this server are", 7, 2))
        if result.error:
            raise RuntimeError(f"the first request failed: {result.error}\n{server.log_tail()}")
        return {"live": live, "ready": ready, "first_token": asked + result.ttft}


def render(figures: dict[str, list[float]]) -> str:
    lines = [f"{'seconds from the command to':<36} {'median':>8} {'min':>8} {'max':>8}"]
    lines += [
        f"{title:<36} {statistics.median(figures[stage]):>8.2f} {min(figures[stage]):>8.2f} {max(figures[stage]):>8.2f}"
        for stage, title in STAGES.items()
    ]
    return "\n".join(lines)
