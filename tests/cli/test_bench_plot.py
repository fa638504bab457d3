"""`--plot` of `quire bench`: refused before measuring if it cannot be drawn, else with machine and commit."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from quire.cli import main as cli
from quire.cli.bench import plot, startup
from quire.cli.bench.main import COMMANDS

SERVE_RUN = {"model_id": "m", "output_throughput": 40.0, "max_concurrency": 7, "request_rate": "inf"} | {
    f"{name}_{metric}_ms": 3.0 for name in ("median", "p90") for metric in ("ttft", "tpot")
}
EXPECTED_TEXT = {
    "serve": "points are concurrencies",
    "throughput": "1.50 requests per second",
    "latency": "p50: 0.500 s",
    "startup": "2.00 s",
    "audio": "real-time factor",
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("path, message", [("x.txt", "must end with .png"), ("no-such/x.png", "there is no folder")])
def test_a_plot_that_cannot_be_written_fails_before_measuring(command, path, message, capsys):
    pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit) as exit:
        cli.main(["bench", command, "--plot", path])
    assert exit.value.code == 1 and f"error: --plot {path}: " in (shown := capsys.readouterr().err)
    assert message in shown


def drawn_texts(path: Path) -> str:
    """The texts of an SVG figure, which matplotlib writes as shapes after a comment with the text."""
    return " ".join(re.findall(r"<!-- (.*?) -->", path.read_text(encoding="utf-8"), re.DOTALL))


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_every_benchmark_draws_with_machine_and_commit(command, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    path = tmp_path / "p.svg"
    draw = {
        "serve": lambda: plot.plot_sweep([SERVE_RUN], str(path)),
        "throughput": lambda: plot.plot_throughput(
            {"total_input_tokens": 30, "elapsed_time": 2.0, "output_tokens_per_second": 5.0, "num_requests": 3}
            | {"requests_per_second": 1.5, "tokens_per_second": 20.0},
            str(path),
        ),
        "latency": lambda: plot.plot_latencies([0.25, 0.75], str(path)),
        "startup": lambda: plot.plot_starts({stage: [1.5, 2.5] for stage in startup.STAGES}, startup.STAGES, str(path)),
        "audio": lambda: plot.plot_transcriptions([{"model_id": "m", "max_concurrency": 2, "rtf": 0.1}], str(path)),
    }
    monkeypatch.setattr(plot, "cpu_model", lambda: "Abacus 9000")
    draw[command]()
    texts = drawn_texts(path)
    assert "Abacus 9000" in texts and EXPECTED_TEXT[command] in texts
    described = subprocess.run(
        ["git", "-C", str(Path(plot.__file__).parent), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    )
    assert described.returncode or f"commit {described.stdout.strip()}" in texts


def test_a_copy_outside_its_repository_has_no_commit(tmp_path, monkeypatch):
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "plot.py").write_text("")
    monkeypatch.setattr(plot, "__file__", str(tmp_path / "plot.py"))
    assert plot.commit() is None and "commit" not in plot.caption()
