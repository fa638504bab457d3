"""Shows the loading progress of a server that a command started: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import json
import logging
import sys
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any

from quire.cli.api_client import tls_context
from quire.server.startup import progress

TIMEOUT = 2.0  # seconds for an answer
_HTTPS = "https://"


class Loading:
    """Shows progress while `with Loading() as loading:` is open and `loading.is_ready(address)` is polled."""

    def __init__(self) -> None:
        self.bar = progress.StartProgress()
        if not sys.stderr.isatty():
            logging.basicConfig(level="INFO", format="%(message)s", stream=sys.stderr)

    def __enter__(self) -> Loading:
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.close()

    def is_ready(self, address: str) -> bool:
        """Return whether the server at HOST:PORT, or https://HOST:PORT, is ready; shows what it does until then."""
        health = _health(address)
        if health.get("status") == "ready":
            return True
        if "phase" in health:
            self.bar.update(health["phase"], health.get("percent", 0) / 100)
        return False


def _health(address: str) -> dict[str, Any]:
    host, _, port = address.removeprefix(_HTTPS).rpartition(":")
    place = (host.strip("[]"), int(port))
    connection = (
        HTTPSConnection(*place, timeout=TIMEOUT, context=tls_context(insecure=True))  # our own server
        if address.startswith(_HTTPS)
        else HTTPConnection(*place, timeout=TIMEOUT)
    )
    try:
        connection.request("GET", "/health")
        return json.load(connection.getresponse())
    except (OSError, HTTPException, ValueError):
        return {}  # does not listen yet
    finally:
        connection.close()
