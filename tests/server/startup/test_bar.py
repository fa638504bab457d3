"""Counted work is a bar on a terminal and whole lines elsewhere."""

from __future__ import annotations

import io
import re
import sys

import pytest

from quire.server.offline.progress import Progress
from quire.server.startup.bar import LINE_INTERVAL, Bar


class Stream(io.StringIO):
    def __init__(self, terminal: bool):
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    return now


def work(stream: Stream, clock: list[float], **options) -> str:
    with Bar(total=40, desc="requests", unit="req", file=stream, **options) as bar:
        for _ in range(40):
            clock[0] += LINE_INTERVAL / 10
            bar.update()
    return stream.getvalue()


def test_a_bar_on_a_terminal(clock):
    text = work(Stream(True), clock, ascii=True)
    assert "\r" in text and "|#" in text and text.count("\n") == 1 and "40/40" in text


def test_few_whole_lines_elsewhere(clock):
    text = work(Stream(False), clock)
    lines = text.splitlines()
    assert "\r" not in text and "|" not in text and text.endswith("\n")
    assert all(line.startswith("requests: ") for line in lines)
    assert re.findall(r"(\d+)/40", text) == ["0", "10", "20", "30", "40"]


@pytest.mark.parametrize("terminal", [True, False])
def test_nothing_if_disabled(clock, terminal):
    assert work(Stream(terminal), clock, disable=True) == ""


def test_the_offline_engine_writes_lines(clock, monkeypatch):
    stream = Stream(False)
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress(2, shown=True) as progress:
        for _ in range(2):
            clock[0] += LINE_INTERVAL
            progress.add(num_input=30, num_output=10)
    first, *_, last = stream.getvalue().splitlines()
    assert "0/2" in first and "2/2" in last and "|" not in last.split("[")[0] and "output: 2.00 toks/s" in last
