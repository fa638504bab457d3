"""Implements a small HTTP/1.1 client for load generation, with keep-alive connections and event streams over asyncio.

The client shares the cores with the measured server, so it does as little as possible per event: one read, one split.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from quire.cli.api_client import tls_context

_LINE_LIMIT = 4 * 2**20  # longest header or event line


class HttpError(Exception):
    """Raised for an error status, or an answer that is not HTTP."""


@dataclass(slots=True)
class Response:
    """Holds the head of a response. Read the body to its end before reusing the connection."""

    status: int
    headers: dict[str, str]
    body: AsyncIterator[bytes]

    async def read(self) -> bytes:
        return b"".join([part async for part in self.body])

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the `data:` payloads of an event stream, as they arrive, without the final `[DONE]`.

        Raises HttpError when that never comes.
        """
        buffer, done = b"", False
        async for part in self.body:
            *lines, buffer = (buffer + part).split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        done = True
                    else:
                        yield data
        if not done:
            raise HttpError("the stream ended without [DONE]")


class _Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader, self.writer = reader, writer
        self.reusable = False

    async def request(self, head: bytes, body: bytes) -> Response:
        self.reusable = False
        self.writer.write(head + body)
        status_line, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        parts = status_line.split(" ", 2)
        if not parts[0].startswith("HTTP/1.") or len(parts) < 2 or not parts[1].isdigit():
            raise HttpError(f"not an HTTP/1.1 server: {status_line[:80]!r}")
        headers = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)
        }
        return Response(int(parts[1]), headers, self._body(headers))

    async def _body(self, headers: dict[str, str]) -> AsyncIterator[bytes]:
        if headers.get("transfer-encoding", "").lower() == "chunked":
            while size := int((await self.reader.readuntil(b"\r\n")).partition(b";")[0], 16):
                yield (await self.reader.readexactly(size + 2))[:-2]
            while await self.reader.readuntil(b"\r\n") != b"\r\n":
                pass  # trailers
        elif "content-length" in headers:
            yield await self.reader.readexactly(int(headers["content-length"]))
        else:
            while part := await self.reader.read(65536):
                yield part
            return
        self.reusable = headers.get("connection", "").lower() != "close"


class Client:
    """Sends requests to one server over a pool of connections."""

    def __init__(self, base_url: str, api_key: str | None = None, insecure: bool = False):
        """Create a client; `insecure` accepts every certificate. Raises ValueError for an invalid URL."""
        url = urlsplit(base_url if "://" in base_url else f"http://{base_url}")
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"--base-url: expected http://HOST:PORT or http://HOST:PORT/v1, got {base_url!r}")
        self.host, self.port = url.hostname, url.port or (443 if url.scheme == "https" else 80)
        self.path = url.path.rstrip("/")
        self.url = f"{url.scheme}://{url.netloc}"
        self.tls = tls_context(insecure) if url.scheme == "https" else None
        self.authorization = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self.idle: list[_Connection] = []

    async def request(
        self, method: str, path: str, body: bytes = b"", content_type: str = "application/json"
    ) -> tuple[Response, _Connection]:
        """Send one request. Give the connection back with `release` after reading the body."""
        host = f"{self.host}:{self.port}"
        head = (
            f"{method} {self.path}{path} HTTP/1.1\r\nHost: {host}\r\n{self.authorization}Content-Type: "
            f"{content_type}\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        ).encode("latin-1")
        while self.idle:
            connection = self.idle.pop()
            try:
                return await connection.request(head, body), connection
            except (OSError, asyncio.IncompleteReadError):
                connection.writer.close()  # the server closed it while it was idle
        reader, writer = await asyncio.open_connection(self.host, self.port, ssl=self.tls, limit=_LINE_LIMIT)
        connection = _Connection(reader, writer)
        try:
            return await connection.request(head, body), connection
        except BaseException:
            writer.close()
            raise

    def release(self, connection: _Connection) -> None:
        if connection.reusable:
            self.idle.append(connection)
        else:
            connection.writer.close()

    async def fetch(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Return (status, body) of a request with a small response."""
        response, connection = await self.request(method, path, body)
        try:
            return response.status, await response.read()
        finally:
            self.release(connection)

    def close(self) -> None:
        while self.idle:
            self.idle.pop().writer.close()
