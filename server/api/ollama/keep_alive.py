"""Ollama's `keep_alive`. The model always stays; here it says how long the cached prefix of a prompt is wanted."""

from __future__ import annotations

from quire.configs.several import read_duration
from quire.server.errors import BadRequest
from quire.server.http.cache_hint import MAX_SECONDS


def keep_alive_seconds(value: str | float | None) -> float:
    """Return the seconds of a number, or of a Go duration such as 5m or 1h30m. 0: not kept; negative: as long as
    possible. Raises BadRequest for an invalid duration.
    """
    if value is None or value == "":
        return 0.0
    try:
        seconds = read_duration(value)
    except ValueError as error:
        raise BadRequest(f"keep_alive: {error}.", param="keep_alive") from None
    return MAX_SECONDS if seconds < 0 else min(seconds, MAX_SECONDS)


def asks_to_unload(value: str | float | None) -> bool:
    """Return whether a request without a prompt asks to unload the model, rather than to load it."""
    return value not in (None, "") and keep_alive_seconds(value) == 0
