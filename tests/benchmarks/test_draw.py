"""The comparison of the README: its figures are those of RESULTS.md, and it is drawn."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import draw

ROOT = Path(__file__).parents[2]
MACHINES = json.loads((ROOT / "benchmarks" / "comparison.json").read_text(encoding="utf-8"))["machines"]
RESULTS = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine["peers"][1])
def test_the_figures_are_those_of_the_results(machine):
    commits = re.findall(r"\b[0-9a-f]{7}\b", machine["caption"])
    (section,) = [part for part in RESULTS.split("\n## ") if all(f"`{commit}`" in part for commit in commits)][:1]
    tables = [part for part in section.split("\n\n") if all(peer.split()[0] in part for peer in machine["peers"])]
    rows = [[cell.strip(" *") for cell in line.split("|")] for table in tables for line in table.splitlines()]
    for load in machine["loads"]:
        cells = ["-" if rounds is None else ", ".join(f"{value}" for value in rounds) for rounds in load["rounds"]]
        assert [row for row in rows if row[3:7] == [*cells, f"{load['ratio']:.2f}"]], load
        assert draw.ratio(load) == pytest.approx(load["ratio"], abs=0.006)


@pytest.mark.slow
def test_the_picture_is_drawn_and_small(tmp_path):
    pytest.importorskip("matplotlib")
    assert draw.main([str(tmp_path / "c.png")]) == 0
    data = (tmp_path / "c.png").read_bytes()
    assert data.startswith(b"\x89PNG") and len(data) < 60_000


@pytest.mark.slow
def test_the_captions_name_machine_and_commit(tmp_path):
    pytest.importorskip("matplotlib")
    draw.main([str(tmp_path / "c.svg")])
    texts = re.findall(r"<!-- (.*?) -->", (tmp_path / "c.svg").read_text(encoding="utf-8"), re.DOTALL)
    assert all(machine["caption"] in texts for machine in MACHINES)
    assert any("2.02 x the best other" in text for text in texts) and "not measured" in texts
