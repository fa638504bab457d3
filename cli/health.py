"""Implements `quire health`, which checks whether the server on this machine is ready.

A container's health check runs this file as a script every few seconds, without site-packages: it imports only a small
part of the standard library.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence

TIMEOUT = 4.0  # seconds
_UNIX, _HTTPS = "unix:", "https://"
_LOCAL = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # addresses of this machine for a server that listens on all addresses


class Unhealthy(Exception):
    """Raised when the server is not ready or does not answer. The message says which."""


def find_address(environ: Mapping[str, str]) -> str:
    """Return the address from the file that QUIRE_ADDRESS_FILE names, else from the variables of `quire serve`.

    A server on a read-only file system cannot write that file, so the variables also count if it does not exist.
    Raises Unhealthy if it does not exist (yet) and no variable is set.
    """
    if path := environ.get("QUIRE_ADDRESS_FILE"):
        try:
            with open(path, encoding="utf-8") as file:
                return file.read().strip()
        except OSError as error:
            if not any(environ.get(name) for name in ("QUIRE_UDS", "QUIRE_HOST", "QUIRE_PORT")):
                raise Unhealthy(f"no server has written its address to {path}: {error.strerror}") from None
    scheme = _HTTPS if environ.get("QUIRE_SSL_CERTFILE") else ""
    if path := environ.get("QUIRE_UDS"):
        return f"{scheme}{_UNIX}{path}"
    host = environ.get("QUIRE_HOST") or "127.0.0.1"
    return f"{scheme}{_LOCAL.get(host, host)}:{environ.get('QUIRE_PORT') or 8000}"


def address_of(url: str) -> str:
    """Return HOST:PORT for `http://HOST:PORT/v1`, scheme and path being optional, and https://HOST:PORT with TLS;
    `unix:PATH` stays as it is.
    """
    if url.removeprefix(_HTTPS).startswith(_UNIX):
        return url
    scheme, _, rest = url.rpartition("://")
    address = rest.partition("/")[0]
    if scheme not in ("", "http", "https"):
        raise Unhealthy(f"{url}: expected http://HOST:PORT or https://HOST:PORT")
    if scheme and ":" not in address.rpartition("]")[2]:
        address = f"{address}:{443 if scheme == 'https' else 80}"
    return _HTTPS + address if scheme == "https" else address


def ask(address: str, timeout: float = TIMEOUT, certificate: tuple[str, str | None] | None = None) -> str:
    """Return the body of /health if the server is ready. Raises Unhealthy otherwise.

    `certificate`: files of a client's certificate and its key, for a server that asks for one. The server's certificate
    is not checked, because it rarely names the loopback address, and no secret is sent.
    """
    try:
        answer = _answer(address, timeout, certificate)
        if not answer.startswith(b"HTTP/") and not address.startswith(_HTTPS):
            answer, address = _answer(_HTTPS + address, timeout, certificate), _HTTPS + address
            print(f"{address.removeprefix(_HTTPS)} has TLS: asked {address}", file=sys.stderr)
    except OSError as error:
        raise Unhealthy(f"{address}: {error}") from None
    head, _, body = answer.partition(b"\r\n\r\n")
    status = head.split(b" ")[1:2]
    if status != [b"200"]:
        raise Unhealthy(
            f"{address}: HTTP {b''.join(status).decode(errors='replace')} {body.decode(errors='replace')[:500]}"
        )
    return body.decode(errors="replace")


def _answer(address: str, timeout: float, certificate: tuple[str, str | None] | None) -> bytes:
    """Return the bytes of the answer. A server with TLS that is asked without it sends none, or bytes other than HTTP.
    Raises OSError.
    """
    answer = b""
    with _connect(address.removeprefix(_HTTPS), timeout) as plain:
        secure = address.startswith(_HTTPS)
        connection = _secured(plain, certificate) if secure else plain
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        try:
            while part := connection.recv(65536):
                answer += part
        except ConnectionResetError:
            if secure or answer.startswith(b"HTTP/"):
                raise
    return answer


def _secured(plain: socket.socket, certificate: tuple[str, str | None] | None) -> socket.socket:
    """Return the connection wrapped in TLS. Raises OSError."""
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if certificate is not None:
        context.load_cert_chain(*certificate)
    return context.wrap_socket(plain)


def _connect(address: str, timeout: float) -> socket.socket:
    """Return a connection to HOST:PORT or unix:PATH. Raises OSError."""
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


def report(url: str | None = None, certificate: tuple[str, str | None] | None = None) -> int:
    """Print the answer of /health; returns 0 if the server is ready, else 1."""
    try:
        print(ask(address_of(url) if url else find_address(os.environ), certificate=certificate))
    except Unhealthy as error:
        print(f"not healthy: {error}", file=sys.stderr)
        return 1
    return 0


def main(argv: Sequence[str]) -> int:
    """Run `quire health ARGV...`."""
    from quire.cli.main import Parser

    parser = Parser(
        prog="quire health",
        description="Report whether a running server is ready: print its /health, and set the exit status.",
    )
    parser.add_argument(
        "address",
        nargs="?",
        metavar="ADDRESS",
        help="HOST:PORT, https://HOST:PORT or unix:PATH "
        "(default: from QUIRE_ADDRESS_FILE, QUIRE_UDS, QUIRE_HOST and QUIRE_PORT, as for the server)",
    )
    parser.add_argument("--url", "--base-url", metavar="URL", help="the same as a URL, as other commands take it")
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="accept every certificate: this command always does, because it sends no secret",
    )
    parser.add_argument("--cert", metavar="FILE", help="a client's certificate, for a server that asks for one")
    parser.add_argument("--key", metavar="FILE", help="key of --cert (default: in the same file)")
    arguments = parser.parse_args(argv)
    if arguments.key and not arguments.cert:
        parser.error("--key needs --cert")
    if arguments.address and arguments.url:
        parser.error("the server is named twice, by ADDRESS and by --url")
    certificate = (arguments.cert, arguments.key) if arguments.cert else None
    return report(arguments.address or arguments.url, certificate)


if __name__ == "__main__":
    sys.exit(report())
