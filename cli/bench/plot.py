"""Draws the figure of each benchmark for `--plot`, with machine and commit in its caption. No other file of the package
needs matplotlib.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quire.cli.bench.report import percentile
from quire.cli.collect_env import cpu_model, version
from quire.configs import platforms

FORMATS = (".png", ".svg", ".pdf")


def add_plot_flag(parser: argparse._ActionsContainer, what: str) -> None:
    parser.add_argument("--plot", metavar="FILE.png", help=f"draw {what} (needs matplotlib)")


def require_plot(path: str | None) -> None:
    """Raise RuntimeError if `--plot path` cannot work. Called before a long measurement."""
    if path is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise RuntimeError("--plot needs matplotlib: pip install 'quire[plot]'")
    if Path(path).suffix.lower() not in FORMATS:
        raise RuntimeError(f"--plot {path}: the name must end with {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")
    if not Path(path).parent.is_dir():
        raise RuntimeError(f"--plot {path}: there is no folder {Path(path).parent}")


def caption() -> str:
    """Return the caption: processor, number of cores, quire's version and the commit of a git checkout."""
    cores = len(platforms.usable_cpus())
    parts = [f"{cpu_model()}, {cores} core{'s' * (cores != 1)}", f"quire {version('quire')}"]
    return "; ".join([*parts, f"commit {found}"] if (found := commit()) else parts)


def commit() -> str | None:
    """Return the commit of the checkout that has this file, with "-dirty" if it was changed; None for an installed
    copy.
    """
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        # an installed copy may be inside another project's repository, which does not track it
        subprocess.run([*git, "ls-files", "--error-unmatch", Path(__file__).name], capture_output=True, check=True)
        described = subprocess.run(
            [*git, "describe", "--always", "--dirty", "--exclude=*"], capture_output=True, check=True, text=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return described.stdout.strip()


@contextmanager
def figure(path: str, title: str, caption_text: str, panels: int = 1, size: tuple[float, float] = (8, 4.5)) -> Iterator:
    """Yield `panels` axes to draw on, then write the figure to `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn, axes = pyplot.subplots(1, panels, figsize=size, squeeze=False)
    try:
        yield axes[0]
        drawn.suptitle(title)
        drawn.text(0.5, 0.01, caption_text, ha="center", va="bottom", fontsize=8, color="#555555", wrap=True)
        drawn.tight_layout(rect=(0, 0.05, 1, 1))
        drawn.savefig(path, dpi=120)
    finally:
        pyplot.close(drawn)
    print(f"plot written to {path}")


def plot_sweep(runs: Sequence[dict[str, Any]], path: str) -> None:
    """Draw time to first token and time per output token over output throughput, each as median and highest measured
    percentile.
    """
    throughput = [run["output_throughput"] for run in runs]
    title = f"{runs[0]['model_id']}: points are concurrencies"
    with figure(path, title, f"load from {caption()}", panels=2, size=(11, 4.8)) as panels:
        for panel, (metric, name) in zip(
            panels, [("ttft", "time to first token"), ("tpot", "time per output token")], strict=True
        ):
            tail = max(
                (key for key in runs[0] if key.startswith("p") and key.endswith(f"_{metric}_ms")),
                key=lambda key: float(key[1:].split("_")[0]),
            )
            for key, label in [(f"median_{metric}_ms", "median"), (tail, tail.split("_")[0])]:
                panel.plot(throughput, [run[key] for run in runs], marker="o", label=label)
            for run, x in zip(runs, throughput, strict=True):
                panel.annotate(
                    str(run["max_concurrency"] or run["request_rate"]),
                    (x, run[f"median_{metric}_ms"]),
                    textcoords="offset points",
                    xytext=(5, 5),
                )
            panel.margins(x=0.1)  # for the last label
            panel.set(xlabel="output tokens per second", ylabel="ms", title=name)
            panel.set_ylim(bottom=0)
            panel.grid(alpha=0.3)
            panel.legend()


def plot_transcriptions(runs: Sequence[dict[str, Any]], path: str) -> None:
    """Draw the real-time factor of all files together over the number of concurrent requests."""
    with figure(path, f"{runs[0]['model_id']}: transcription", f"load from {caption()}") as (panel,):
        panel.plot([run["max_concurrency"] for run in runs], [run["rtf"] for run in runs], marker="o")
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.set(xlabel="concurrent requests", ylabel="real-time factor (less is faster)")
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)


def plot_throughput(figures: dict[str, Any], path: str) -> None:
    """Draw tokens per second of prompts, of answers and of both as bars."""
    bars = {
        "prompts": figures["total_input_tokens"] / figures["elapsed_time"],
        "answers": figures["output_tokens_per_second"],
        "both": figures["tokens_per_second"],
    }
    title = f"{figures['num_requests']} requests at once: {figures['requests_per_second']:.2f} requests per second"
    with figure(path, title, caption()) as (panel,):
        panel.bar_label(panel.bar(list(bars), list(bars.values())), fmt="{:,.1f}", padding=3)
        panel.margins(y=0.12)  # for the labels
        panel.set(ylabel="tokens per second")
        panel.grid(alpha=0.3, axis="y")


def plot_latencies(seconds: Sequence[float], path: str) -> None:
    """Draw the seconds of each batch in order, with lines at their median and 90th percentile."""
    with figure(path, "seconds per batch", caption()) as (panel,):
        panel.plot(range(1, len(seconds) + 1), seconds, marker="o", label="batch")
        for percent, style in ((50, "--"), (90, ":")):
            value = percentile(sorted(seconds), percent)
            panel.axhline(value, color="#555555", linestyle=style, label=f"p{percent}: {value:.3f} s")
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.set(xlabel="batch", ylabel="seconds")
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
        panel.legend()


def plot_starts(figures: dict[str, list[float]], titles: dict[str, str], path: str) -> None:
    """Draw a bar per stage: the median seconds from the command, with a point for each start."""
    stages = list(titles)
    medians = [statistics.median(figures[stage]) for stage in stages]
    with figure(path, "seconds from the command", caption(), size=(8, 3.5)) as (panel,):
        panel.barh([titles[stage] for stage in stages], medians, alpha=0.6)
        for i, stage in enumerate(stages):
            panel.plot(figures[stage], [i] * len(figures[stage]), "k.", markersize=5)
            panel.annotate(f"{medians[i]:.2f} s", (max(figures[stage]), i), textcoords="offset points", xytext=(6, 8))
        panel.margins(x=0.15)
        panel.invert_yaxis()
        panel.set(xlabel="seconds (bars are medians, points are starts)")
        panel.set_xlim(left=0)
        panel.grid(alpha=0.3, axis="x")
