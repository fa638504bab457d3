"""Plots throughput against latency over a sweep of concurrencies. The only file that needs matplotlib."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any


def require_matplotlib() -> None:
    """Raises RuntimeError naming the package to install. Called before a long measurement."""
    if importlib.util.find_spec("matplotlib") is None:
        raise RuntimeError("--plot needs matplotlib: pip install 'quire[plot]'")


def plot(runs: Sequence[dict[str, Any]], path: str) -> None:
    """Two panels over output throughput: time to first token and time per output token, each as median and highest
    measured percentile.
    """
    require_matplotlib()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4.5))
    throughput = [run["output_throughput"] for run in runs]
    for panel, (metric, title) in zip(
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
        panel.set(xlabel="output tokens per second", ylabel="ms", title=title)
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
        panel.legend()
    figure.suptitle(f"{runs[0]['model_id']}: points are concurrencies")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    print(f"plot written to {path}")
