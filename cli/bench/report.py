"""Aggregates per-request times to figures.

The figures have vLLM's names, so that tools that read its JSON also read quire's.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from quire.cli.bench.load import Result

METRICS = {
    "ttft": "Time to first token",
    "tpot": "Time per output token (after the first)",
    "itl": "Inter-token latency",
    "e2el": "End-to-end latency",
}


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Interpolate linearly between the closest ranks of an ascending sequence, as numpy does; nan if it is empty."""
    if not ordered:
        return math.nan
    rank = (len(ordered) - 1) * percent / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def metric_values(results: Sequence[Result]) -> dict[str, list[float]]:
    """Return ascending seconds for every metric in METRICS, over the successful `results`."""
    return {
        "ttft": sorted(result.ttft for result in results),
        "tpot": sorted(result.tpot for result in results if result.tpot is not None),
        "itl": sorted(gap for result in results for gap in result.itl),
        "e2el": sorted(result.latency for result in results),
    }


def summarize(
    results: Sequence[Result], duration: float, percentiles: Sequence[float], goodput: dict[str, float]
) -> dict[str, Any]:
    """Return the figures of one run: counts, throughputs per second of `duration`, and mean, median, std and
    percentiles of every metric in milliseconds.

    `goodput` maps a metric to its limit in ms; requests within all limits count.
    """
    good = [result for result in results if result.error is None]
    input_tokens, output_tokens = (
        sum(result.prompt_tokens for result in good),
        sum(result.output_tokens for result in good),
    )
    figures: dict[str, Any] = {
        "duration": duration,
        "completed": len(good),
        "failed": len(results) - len(good),
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": len(good) / duration,
        "output_throughput": output_tokens / duration,
        "total_token_throughput": (input_tokens + output_tokens) / duration,
    }
    if goodput:
        figures["request_goodput"] = sum(_meets(result, goodput) for result in good) / duration
    for name, values in metric_values(good).items():
        milliseconds = [value * 1000 for value in values]
        figures[f"mean_{name}_ms"] = statistics.fmean(milliseconds) if milliseconds else math.nan
        figures[f"median_{name}_ms"] = percentile(milliseconds, 50)
        figures[f"std_{name}_ms"] = statistics.pstdev(milliseconds) if milliseconds else math.nan
        for percent in percentiles:
            figures[f"p{percent:g}_{name}_ms"] = percentile(milliseconds, percent)
    return figures


def _meets(result: Result, goodput: dict[str, float]) -> bool:
    seconds = {"ttft": result.ttft, "tpot": result.tpot or 0.0, "e2el": result.latency}
    return all(seconds[name] * 1000 <= limit for name, limit in goodput.items())


def parse_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """Return limits in ms of texts such as "ttft:500" by metric. Raises ValueError."""
    limits = {}
    for pair in pairs:
        name, _, limit = pair.partition(":")
        if name not in ("ttft", "tpot", "e2el"):
            raise ValueError(f"--goodput: expected ttft, tpot or e2el, then `:` and milliseconds, got {pair!r}")
        try:
            limits[name] = float(limit)
        except ValueError:
            raise ValueError(f"--goodput: {limit!r} in {pair!r} is not a number of milliseconds") from None
    return limits


def render(figures: dict[str, Any], metrics: Sequence[str]) -> str:
    """Return the figures as a readable table."""
    rows = [
        ("Successful requests", f"{figures['completed']}"),
        ("Failed requests", f"{figures['failed']}"),
        ("Benchmark duration (s)", f"{figures['duration']:.2f}"),
        ("Total input tokens", f"{figures['total_input_tokens']}"),
        ("Total generated tokens", f"{figures['total_output_tokens']}"),
        ("Request throughput (req/s)", f"{figures['request_throughput']:.2f}"),
        ("Output token throughput (tok/s)", f"{figures['output_throughput']:.2f}"),
        ("Total token throughput (tok/s)", f"{figures['total_token_throughput']:.2f}"),
    ]
    if "request_goodput" in figures:
        rows.insert(6, ("Request goodput (req/s)", f"{figures['request_goodput']:.2f}"))
    lines = ["=" * 56, *(f"{name:<40} {value:>15}" for name, value in rows)]
    for metric in metrics:
        lines.append(f"{f' {METRICS[metric]} ':-^56}")
        names = [key for key in figures if key.endswith(f"_{metric}_ms") and not key.startswith("std_")]
        lines += [f"{f'{_title(key)} {metric.upper()} (ms)':<40} {figures[key]:>15.2f}" for key in names]
    return "\n".join([*lines, "=" * 56])


def _title(key: str) -> str:
    word = key.split("_")[0]
    return word.upper() if word[1:2].isdigit() else word.capitalize()
