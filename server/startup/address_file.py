"""Writes the address a server listens on to the file of `--address-file`, for `quire health` (`cli/health.py`)."""

from __future__ import annotations

import contextlib
import os
import socket

_LOCAL = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # wildcard address -> loopback address


def address_of(listener: socket.socket) -> str:
    """Return the address at which this machine reaches `listener`: "127.0.0.1:8000", "[::1]:8000" or "unix:/path"."""
    if listener.family == socket.AF_UNIX:
        return "unix:" + os.path.abspath(listener.getsockname())
    host, port = listener.getsockname()[:2]
    host = _LOCAL.get(host, host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def write_address(path: str, listener: socket.socket, scheme: str = "") -> None:
    """Replace the file `path` atomically. `scheme` is "https://" for a server with TLS. Raises OSError."""
    part = f"{path}.{os.getpid()}"
    with open(part, "w", encoding="utf-8") as file:
        file.write(scheme + address_of(listener))
    os.replace(part, path)


def remove_address(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
