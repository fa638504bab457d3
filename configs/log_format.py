"""The format of a log line: as text, or as a JSON object for programs that collect logs."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime


def formatter(kind: str, process: str) -> logging.Formatter:
    """`kind` is text or json; `process` is the name of the process, which every line has."""
    if kind == "json":
        return _Json(process)
    return logging.Formatter(f"%(asctime)s %(levelname)s {process}: %(message)s")


class _Json(logging.Formatter):
    def __init__(self, process: str):
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC)
        line = {
            "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "process": self._process,
            "pid": record.process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= getattr(record, "fields", {})  # for the access log
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)
