"""Draws the comparison with peers that the README shows, from figures of RESULTS.md: a row of panels for each
machine, a panel for each load, a bar for each server.

python -m benchmarks.draw [OUT.png] [--data comparison.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire.cli.bench.plot import require_plot

ROOT = Path(__file__).parent.parent
COLORS = ("#2563eb", "#9ca3af", "#d1d5db")  # the first server, then its peers
LOWER_IS_BETTER = "ms"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Draw the comparison with peers that the README shows.")
    parser.add_argument("out", nargs="?", default=str(ROOT / "docs" / "images" / "comparison.png"), metavar="OUT.png")
    parser.add_argument(
        "--data", type=Path, default=Path(__file__).with_name("comparison.json"), help="figures (default: RESULTS.md's)"
    )
    arguments = parser.parse_args(argv)
    try:
        require_plot(arguments.out)
    except RuntimeError as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")
    draw(json.loads(arguments.data.read_text(encoding="utf-8"))["machines"], arguments.out)
    return 0


def means(load: dict[str, Any]) -> list[float | None]:
    """Return the mean of each server's rounds; None if it was not measured."""
    return [None if rounds is None else statistics.fmean(rounds) for rounds in load["rounds"]]


def ratio(load: dict[str, Any]) -> float:
    """Return the ratio of the first server to the best other."""
    first, *others = means(load)
    measured = [value for value in others if value is not None]
    return first / (min(measured) if load["unit"].endswith(LOWER_IS_BETTER) else max(measured))


def draw(machines: Sequence[dict[str, Any]], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = max(len(machine["loads"]) for machine in machines)
    figure = pyplot.figure(figsize=(2.9 * columns, 3.1 * len(machines)), layout="constrained")
    rows = figure.subfigures(len(machines), 1, squeeze=False)[:, 0]
    for row, machine in zip(rows, machines, strict=True):
        panels = row.subplots(1, columns, squeeze=False)[0]
        for panel, load in zip(panels, machine["loads"], strict=False):
            _draw_load(panel, machine["peers"], load)
        for panel in panels[len(machine["loads"]) :]:
            panel.set_axis_off()
        row.supxlabel(machine["caption"], fontsize=8, color="#555555")
    figure.savefig(path, dpi=80)
    pyplot.close(figure)
    if path.lower().endswith(".png"):
        _reduce_colors(path)
    print(f"plot written to {path}")


def _reduce_colors(path: str) -> None:
    """Reduce the colors, of which the drawing has few: a third of the bytes."""
    from PIL import Image

    with Image.open(path) as image:
        reduced = image.convert("RGB").quantize(48)
    reduced.save(path, optimize=True)


def _draw_load(panel: Any, peers: Sequence[str], load: dict[str, Any]) -> None:
    values = means(load)
    bars = panel.bar([peer.replace(" ", "\n") for peer in peers], [value or 0 for value in values], color=COLORS)
    panel.bar_label(bars, [_label(value) for value in values], fontsize=8, padding=2)
    less = load["unit"].endswith(LOWER_IS_BETTER)
    panel.set_title(f"{load['title']}\n{ratio(load):.2f} x the best other", fontsize=9)
    panel.set_ylabel(f"{load['unit']} ({'less' if less else 'more'} is better)", fontsize=7)
    panel.margins(y=0.14)  # for the labels
    panel.tick_params(labelsize=8)
    panel.spines[["top", "right"]].set_visible(False)


def _label(value: float | None) -> str:
    if value is None:
        return "not measured"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


if __name__ == "__main__":
    sys.exit(main())
