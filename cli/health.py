"""`quire health`: is the server on this machine ready?

A container's health check runs this file every few seconds, by itself and without site-packages: it needs a little of
the standard library and nothing else.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence

TIMEOUT = 4.0  # seconds
_UNIX = "unix:"
_LOCAL = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # how this machine reaches a server that listens on every address


class Unhealthy(Exception):
    """The server is not ready, or does not answer; the text says which."""


def find_address(environ: Mapping[str, str]) -> str:
    """From the file that QUIRE_ADDRESS_FILE names, else from the variables of `quire serve`.

    Raises Unhealthy when that file is not there (yet).
    """
    if path := environ.get("QUIRE_ADDRESS_FILE"):
        try:
            with open(path, encoding="utf-8") as file:
                return file.read().strip()
        except OSError as error:
            raise Unhealthy(f"no server has written its address to {path}: {error.strerror}") from None
    if path := environ.get("QUIRE_UDS"):
        return _UNIX + path
    host = environ.get("QUIRE_HOST") or "127.0.0.1"
    return f"{_LOCAL.get(host, host)}:{environ.get('QUIRE_PORT') or 8000}"


def ask(address: str, timeout: float = TIMEOUT) -> str:
    """The body of /health of a server that is ready. Raises Unhealthy."""
    try:
        with _connect(address, timeout) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            answer = b""
            while part := connection.recv(65536):
                answer += part
    except OSError as error:
        raise Unhealthy(f"{address}: {error}") from None
    head, _, body = answer.partition(b"\r\n\r\n")
    status = head.split(b" ")[1:2]
    if status != [b"200"]:
        raise Unhealthy(
            f"{address}: HTTP {b''.join(status).decode(errors='replace')} {body.decode(errors='replace')[:500]}"
        )
    return body.decode(errors="replace")


def _connect(address: str, timeout: float) -> socket.socket:
    """Raises OSError."""
    if not address.startswith(_UNIX):
        host, _, port = address.rpartition(":")
        if not port.isdigit():
            raise OSError("expected HOST:PORT or unix:PATH")
        return socket.create_connection((host.strip("[]"), int(port)), timeout)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout)
    try:
        connection.connect(address.removeprefix(_UNIX))
    except OSError:
        connection.close()
        raise
    return connection


def report(address: str | None = None) -> int:
    """Print what /health says; 0 when the server is ready, else 1."""
    try:
        print(ask(address or find_address(os.environ)))
    except Unhealthy as error:
        print(f"not healthy: {error}", file=sys.stderr)
        return 1
    return 0


def main(argv: Sequence[str]) -> int:
    """Run `quire health ARGV...`."""
    from quire.cli.main import Parser

    parser = Parser(
        prog="quire health", description="Say whether a running server is ready, by its exit status and its /health."
    )
    parser.add_argument(
        "address",
        nargs="?",
        metavar="ADDRESS",
        help="HOST:PORT or unix:PATH "
        "(default: from QUIRE_ADDRESS_FILE, QUIRE_UDS, QUIRE_HOST and QUIRE_PORT, as the server has them)",
    )
    address = parser.parse_args(argv).address
    return report(address and address.removeprefix("http://").rstrip("/"))


if __name__ == "__main__":
    sys.exit(report())
