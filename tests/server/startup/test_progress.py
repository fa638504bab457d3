"""Bars on a terminal, a few lines elsewhere."""

from __future__ import annotations

import io
import logging
from types import SimpleNamespace

from quire.server.startup import progress
from quire.server.startup.progress import StartProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run(stream: io.StringIO) -> None:
    shown = StartProgress(stream)
    for phase in ("loading weights", "warming up"):
        for percent in range(0, 101, 5):
            shown.update(phase, percent / 100)
    shown.close()
    shown.close()


def test_bars_on_a_terminal():
    terminal = Terminal()
    run(terminal)
    text = terminal.getvalue()
    assert "loading weights:  50%|" in text and "warming up: 100%|" in text and "\n" not in text  # no leftovers


def test_lines_elsewhere(caplog, monkeypatch):
    clock = iter(float(second) for second in range(1000))
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(clock)))  # other threads have theirs
    with caplog.at_level(logging.INFO, "quire.server.startup.progress"):
        run(io.StringIO())
    assert caplog.messages == [
        "loading weights",
        "loading weights: 25%",
        "loading weights: 50%",
        "loading weights: 75%",
        "loading weights: 100%",
        "warming up",
        "warming up: 25%",
        "warming up: 50%",
        "warming up: 75%",
        "warming up: 100%",
    ]
