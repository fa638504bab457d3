"""Ollama's `keep_alive`. The model always stays; here it says how long the cached prefix of a prompt is wanted."""

from __future__ import annotations

import math
import re

from quire.server.errors import BadRequest
from quire.server.http.cache_hint import MAX_SECONDS

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+\.?\d*|\.\d+)(ns|us|µs|μs|ms|s|m|h)")


def keep_alive_seconds(value: str | float | None) -> float:
    """Seconds: a number of them, or a duration of Go such as 5m or 1h30m. 0: not at all; below 0: as long as possible.
    Raises BadRequest for an invalid duration.
    """
    if value is None or value == "":
        return 0.0
    seconds = _duration(value) if isinstance(value, str) else float(value)
    if math.isnan(seconds):
        message = f"keep_alive: {value!r} is no duration such as 5m or 1h30m, and no number of seconds."
        raise BadRequest(message, param="keep_alive")
    return MAX_SECONDS if seconds < 0 else min(seconds, MAX_SECONDS)


def asks_to_unload(value: str | float | None) -> bool:
    """Return whether a request without a prompt asks to unload the model, rather than to load it."""
    return value not in (None, "") and keep_alive_seconds(value) == 0


def _duration(text: str) -> float:
    sign, digits = (-1, text[1:]) if text.startswith("-") else (1, text.removeprefix("+"))
    if re.fullmatch(r"[0-9]{1,18}", digits):
        return sign * float(digits)
    parts = _PART.findall(digits)
    if not parts or "".join(map("".join, parts)) != digits:
        return math.nan
    return sign * sum(float(number) * _UNITS[unit] for number, unit in parts)
