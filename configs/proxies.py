"""Parses `--forwarded-allow-ips`: the proxies whose headers about the client are trusted, in uvicorn's form."""

from __future__ import annotations

import ipaddress


def read_proxies(text: str) -> list[str]:
    """Return addresses and networks, or `*`. Raises ValueError for anything else: uvicorn would trust no proxy."""
    found = [one.strip() for one in text.split(",")]
    for one in found:
        if one == "*" and len(found) == 1:
            continue
        try:
            ipaddress.ip_network(one)
        except ValueError:
            raise ValueError(f"'{one}' is no address, no network and not *") from None
    return found
