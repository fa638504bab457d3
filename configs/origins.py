"""Parses origins of web servers: a scheme, a host and optionally a port, such as https://tools.example:8443."""

from __future__ import annotations

import re

_ORIGIN = re.compile(r"https?://(?:[a-z0-9.-]+|\[[0-9a-f:.]+\])(?::\d{1,5})?")


def read_origins(origins: list[str]) -> list[str]:
    """Return the origins. Raises ValueError for other texts: they become part of the page's policy."""
    for origin in origins:
        if not _ORIGIN.fullmatch(origin):
            raise ValueError(f"'{origin}' is no origin such as http://127.0.0.1:9000 (no path, lower case)")
    return origins
