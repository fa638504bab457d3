"""Formats log lines as text, or as JSON objects for programs that collect logs."""

from __future__ import annotations

import json
import logging
import logging.config
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

_LOGGERS = {"vllm": "quire", "uvicorn": "quire", "uvicorn.error": "quire", "uvicorn.access": "quire.access"}


def formatter(kind: str, process: str) -> logging.Formatter:
    """Return the formatter of a `kind`, text or json. Every line has the name of the process, `process`."""
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


def read_log_config(path: str) -> dict[str, Any]:
    """Return the contents of --log-config-file for `logging.config.dictConfig`. Files for vLLM work, too: its loggers
    and uvicorn's are those of this server, its formatters the standard one.

    Raises ValueError for a file that cannot be used.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{getattr(error, 'strerror', None) or error}") from None
    if not isinstance(found, dict):
        raise ValueError("it must be a JSON object")
    config = {"disable_existing_loggers": False} | found
    loggers = config.get("loggers", {})
    config["loggers"] = {_LOGGERS.get(name, name): value for name, value in loggers.items()}
    config["formatters"] = {name: _own_class(one) for name, one in config.get("formatters", {}).items()}
    return config


def apply_log_config(path: str) -> None:
    """Apply --log-config-file to this process. Raises ValueError for a file that cannot be used."""
    try:
        logging.config.dictConfig(read_log_config(path))
    except (ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
        cause = error.__cause__
        reason = f"{error}: {cause}" if cause is not None else f"{error}"
        raise ValueError(f"--log-config-file {path}: {reason}") from None


def _own_class(formatter: dict[str, Any]) -> dict[str, Any]:
    theirs = str(formatter.get("class", "")).startswith("vllm.") or str(formatter.get("()", "")).startswith("uvicorn.")
    return {key: value for key, value in formatter.items() if key not in ("class", "()")} if theirs else formatter
