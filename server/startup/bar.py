"""Progress bars of counted work: requests, prompts, batches. The bars are those of huggingface_hub, which uses tqdm."""

from __future__ import annotations

import logging
import sys

from huggingface_hub.utils import tqdm

LINE_INTERVAL = 5.0  # seconds between lines


class Bar(tqdm):
    """tqdm on a terminal. Elsewhere, where its carriage returns would fill a log with one long line: a line at the
    start, every LINE_INTERVAL seconds and at the end.
    """

    def __init__(self, *arguments: object, **options: object):
        file = options.get("file") or sys.stderr
        self.lines = not file.isatty()
        if self.lines:
            # no drawn bar in a line; every update looks at the clock
            options |= {"mininterval": LINE_INTERVAL, "miniters": 1, "ncols": 0, "dynamic_ncols": False}
        super().__init__(*arguments, **(options | {"file": file}))

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        if not self.lines:
            return super().display(msg, pos)
        self.fp.write(f"{self if msg is None else msg}\n")
        self.fp.flush()
        return True

    def close(self) -> None:
        if not self.lines or self.disable:
            super().close()
            return
        self.disable = True
        self._decr_instances(self)
        if self.last_print_n != self.n:
            self.display()


class LinesAboveBars(logging.Handler):
    """Write log records to stderr above the bars that are drawn there."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stderr)
