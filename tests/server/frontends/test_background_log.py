"""Logging while the reader is stalled."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
import threading
import time
from pathlib import Path

from quire.server.frontends.background_log import BackgroundHandler


class Stalled(io.StringIO):
    """Blocks in its first write until it is read."""

    def __init__(self):
        super().__init__()
        self.is_read = threading.Event()

    def write(self, text: str) -> int:
        self.is_read.wait(20)
        return super().write(text)


def record(number: int) -> logging.LogRecord:
    return logging.LogRecord("a", logging.INFO, "", 0, "line %d", (number,), None)


def test_a_reader_that_stalls_stops_nobody():
    stream = Stalled()
    handler = BackgroundHandler(stream, max_lines=100)
    started = time.monotonic()
    for number in range(5000):
        handler.handle(record(number))
    assert time.monotonic() - started < 5
    stream.is_read.set()
    handler.flush()
    handler.handle(record(5000))
    handler.flush()
    lines = stream.getvalue().splitlines()
    written = [line for line in lines if line.startswith("line ")]
    num_dropped = sum(int(line.split()[0]) for line in lines if "lines were dropped" in line)
    assert num_dropped > 4000 and num_dropped + len(written) == 5001
    assert written[0] == "line 0" and written[-1] == "line 5000"


def test_a_stream_that_fails_stops_nobody():
    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError("no space left on device")

    stream = Full()
    handler = BackgroundHandler(stream)
    for number in range(3):
        handler.handle(record(number))
    handler.flush()
    assert stream.getvalue() == "line 0\nline 1\nline 2\n"


def test_the_end_of_the_process_writes_what_is_queued():
    code = """
import logging, sys
from quire.server.frontends.background_log import BackgroundHandler
logging.basicConfig(handlers=[BackgroundHandler(sys.stderr)])
for number in range(500):
    logging.warning("line %d", number)
sys.exit(1)
"""
    root = Path(__file__).parents[2]
    ended = subprocess.run([sys.executable, "-c", code], cwd=root, stderr=subprocess.PIPE, text=True, timeout=30)
    lines = ended.stderr.splitlines()
    assert ended.returncode == 1 and len(lines) == 500 and lines[-1].endswith("line 499")
