"""Implements `quire bench latency`, which times batches of prompts of equal length in the engine, without HTTP, from
the call to the last token.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from pathlib import Path

from quire.cli.bench.datasets import non_negative_int, positive_int, random_text
from quire.cli.bench.plot import plot_latencies
from quire.cli.bench.report import percentile
from quire.cli.bench.throughput import engine_settings, parse_offline
from quire.cli.main import Parser
from quire.server.startup.bar import Bar

PERCENTILES = (10, 25, 50, 75, 90, 99)


def main(argv: list[str]) -> int:
    """Run `quire bench latency ARGV...`."""
    parser = Parser(
        prog="quire bench latency",
        usage="quire bench latency [MODEL] [flags]",
        description="Generate one batch after another, without HTTP, and report the seconds per batch.",
    )
    parser.add_argument(
        "--batch-size", type=positive_int, default=8, metavar="N", help="prompts per batch (default: 8)"
    )
    parser.add_argument("--input-len", type=positive_int, default=32, metavar="N", help="prompt tokens (default: 32)")
    parser.add_argument(
        "--output-len", type=positive_int, default=128, metavar="N", help="tokens to generate (default: 128)"
    )
    parser.add_argument(
        "--num-iters", type=positive_int, default=30, metavar="N", help="number of batches (default: 30)"
    )
    parser.add_argument(
        "--num-iters-warmup",
        type=non_negative_int,
        default=3,
        metavar="N",
        help="number of batches before the measurement (default: 3)",
    )
    arguments, settings = parse_offline(parser, argv, "the seconds of each batch")

    from quire.server.offline.llm import LLM
    from quire.server.offline.params import SamplingParams

    try:
        with LLM(**engine_settings(settings)) as llm:
            rng = random.Random(settings.values.get("seed", 0))
            params = SamplingParams(temperature=arguments.temperature, max_tokens=arguments.output_len, ignore_eos=True)
            times = []
            for i in Bar(
                range(arguments.num_iters_warmup + arguments.num_iters), disable=arguments.disable_tqdm, desc="batches"
            ):
                # new prompts per batch, so that no prefix is cached
                prompts = [random_text(rng, arguments.input_len, llm.tokenizer) for _ in range(arguments.batch_size)]
                start = time.perf_counter()
                llm.generate(prompts, params, use_tqdm=False)
                if i >= arguments.num_iters_warmup:
                    times.append(time.perf_counter() - start)
    except (ValueError, OSError, RuntimeError) as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")
    figures = {
        "avg_latency": statistics.fmean(times),
        "latencies": times,
        "percentiles": {str(percent): percentile(sorted(times), percent) for percent in PERCENTILES},
    }
    print(f"Avg latency: {figures['avg_latency']:.4f} seconds")
    print(
        "\n".join(
            f"{percent}% percentile latency: {value:.4f} seconds" for percent, value in figures["percentiles"].items()
        )
    )
    if arguments.output_json:
        Path(arguments.output_json).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    if arguments.plot:
        plot_latencies(times, arguments.plot)
    return 0
