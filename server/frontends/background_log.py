"""A log handler that never blocks, so that a stalled reader of stderr does not stall the event loop."""

from __future__ import annotations

import contextlib
import logging
import queue
import sys
import threading
from typing import TextIO

from quire.configs.log_format import apply_log_config, formatter
from quire.configs.log_ring import LogRing
from quire.configs.serving import ServerConfig

MAX_LINES = 10_000  # waiting to be written; further lines are dropped and counted
FLUSH_TIMEOUT = 1.0  # seconds, at process exit


class BackgroundHandler(logging.Handler):
    """Writes to `stream` from a thread."""

    def __init__(self, stream: TextIO, max_lines: int = MAX_LINES):
        super().__init__()
        self._stream = stream
        self._lines: queue.Queue[str] = queue.Queue(max_lines)
        self._num_dropped = 0
        self._counting = threading.Lock()  # not the handler's own lock, which is held during `flush`
        threading.Thread(target=self._write, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.put_nowait(self.format(record) + "\n")
        except queue.Full:
            with self._counting:
                self._num_dropped += 1
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        """Wait until all lines are written, at most FLUSH_TIMEOUT seconds."""
        with self._lines.all_tasks_done:
            self._lines.all_tasks_done.wait_for(lambda: not self._lines.unfinished_tasks, FLUSH_TIMEOUT)

    def _write(self) -> None:
        while True:
            line = self._lines.get()
            with self._counting:
                num_dropped, self._num_dropped = self._num_dropped, 0
            if num_dropped:
                line = f"{num_dropped} lines were dropped here: the log was not read\n{line}"
            with contextlib.suppress(OSError, ValueError):  # disk full, or the reader has closed the pipe
                self._stream.write(line)
                self._stream.flush()
            self._lines.task_done()


def configure_logging(config: ServerConfig, name: str = "server") -> None:
    """Log to stderr; every line has the process's name. Raises ValueError for a --log-config-file that cannot be used.
    """
    handler = BackgroundHandler(sys.stderr)
    handler.setFormatter(formatter(config.log_format, name))
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler, LogRing()])
    for noisy in ("uvicorn", "uvicorn.error", "httpx", "httpx2", "filelock"):
        logging.getLogger(noisy).setLevel("WARNING")
    if config.log_config_file is not None:
        apply_log_config(config.log_config_file)
