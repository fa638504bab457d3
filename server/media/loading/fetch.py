"""Loads images by http(s) URL, from allowed hosts and public addresses only.

Every connection, redirects included, resolves its host once, checks all addresses and connects to a checked one. So
neither a name that resolves to a private address nor DNS rebinding passes.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import cached_property
from urllib.parse import quote, urljoin, urlsplit

import httpcore

from quire.server.media.loading.addresses import is_public
from quire.server.media.loading.sources import IMAGE_FLAG

MAX_REDIRECTS = 3
MAX_URL = 8192  # characters
MAX_FETCHES = 16  # at once
_REDIRECTS = (301, 302, 303, 307, 308)
_HEADERS = {"User-Agent": "quire", "Accept": "image/*, video/*", "Accept-Encoding": "identity"}
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


class Refused(ValueError):
    """The image cannot be loaded; the text is for the client."""


async def resolve(host: str, port: int) -> list[str]:
    """Return the addresses of `host`. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=1)  # SOCK_STREAM
    return list(dict.fromkeys(address[4][0] for address in found))


class Fetcher:
    """Loads images on one event loop. `flag` names the limit of `max_bytes`; `resolve` and `permits` (of an
    address) are parameters for tests."""

    def __init__(
        self,
        domains: Iterable[str],
        max_bytes: int,
        timeout: float,
        resolve: Resolve = resolve,
        permits: Callable[[str], bool] = is_public,
        flag: str = IMAGE_FLAG,
    ):
        self._domains = frozenset(domain.lower().rstrip(".") for domain in domains)
        self._max_bytes, self._timeout, self._flag = max_bytes, timeout, flag
        self._backend = _Guard(resolve, permits)
        self._slots = asyncio.Semaphore(MAX_FETCHES)

    async def fetch(self, url: str) -> bytes:
        """Return the body of the answer to GET `url`. Raises Refused."""
        try:
            async with asyncio.timeout(self._timeout):
                async with self._slots:
                    return await self._follow(url)
        except TimeoutError:
            raise Refused(f"its URL did not answer within {self._timeout:g} seconds (--media-timeout)") from None
        except (httpcore.ConnectError, httpcore.ProtocolError, httpcore.NetworkError, OSError, ssl.SSLError):
            raise Refused("its URL cannot be loaded: the connection failed") from None

    async def _follow(self, url: str) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            self._check(url)
            connections = httpcore.AsyncConnectionPool(ssl_context=self._tls, network_backend=self._backend)
            async with connections, connections.stream("GET", _ascii(url), headers=_HEADERS) as answer:
                if answer.status not in _REDIRECTS:
                    return await self._read(answer)
                headers = {name.lower(): value for name, value in answer.headers}
            url = _joined(url, headers.get(b"location", b"").decode("latin-1"))
        raise Refused(f"its URL redirects more than {MAX_REDIRECTS} times")

    def _check(self, url: str) -> None:
        if len(url) > MAX_URL:
            raise Refused(f"its URL has more than {MAX_URL} characters")
        try:
            parts = urlsplit(url)
            host, _ = parts.hostname, parts.port
        except ValueError:
            raise Refused("its URL is not valid") from None
        if parts.scheme not in ("http", "https") or not host:
            raise Refused("its URL leads to one that is neither http nor https")
        if parts.username is not None or parts.password is not None:
            raise Refused("its URL holds a name or a password")
        if not self._is_allowed(host.lower().rstrip(".")):
            raise Refused(f"the host '{host[:255]}' is not one that --allowed-media-domains names")

    def _is_allowed(self, host: str) -> bool:
        if "*" in self._domains or host in self._domains:
            return True
        labels = host.split(".")
        return any("*." + ".".join(labels[i:]) in self._domains for i in range(1, len(labels)))

    async def _read(self, answer: httpcore.Response) -> bytes:
        if answer.status != 200:
            raise Refused(f"its URL answered with status {answer.status}")
        chunks, size = [], 0
        async for chunk in answer.aiter_stream():
            size += len(chunk)
            if size > self._max_bytes:
                raise Refused(f"it has more than {self._max_bytes} bytes ({self._flag})")
            chunks.append(chunk)
        return b"".join(chunks)

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return ssl.create_default_context()


def _joined(url: str, location: str) -> str:
    """Return the URL to which `location` leads from `url`."""
    try:
        return urljoin(url, location)
    except ValueError:
        raise Refused("its URL redirects to one that is not valid") from None


def _ascii(url: str) -> str:
    """Return the URL as it is sent: names in IDNA, other characters quoted."""
    parts = urlsplit(url)
    try:
        host = parts.hostname.encode("idna").decode() if not parts.hostname.isascii() else parts.hostname
    except UnicodeError:
        raise Refused("its URL is not valid") from None
    host = f"[{host}]" if ":" in host else host
    where = host if parts.port is None else f"{host}:{parts.port}"
    safe = "/%:@!$&'()*+,;=~?"
    path, query = quote(parts.path, safe), quote(parts.query, safe)
    return parts._replace(netloc=where, path=path, query=query, fragment="").geturl()


class _Guard(httpcore.AsyncNetworkBackend):
    """Connects to checked addresses."""

    def __init__(self, resolve: Resolve, permits: Callable[[str], bool]):
        self._resolve, self._permits = resolve, permits
        self._sockets = httpcore.AnyIOBackend()

    async def connect_tcp(self, host, port, timeout=None, local_address=None, socket_options=None):
        try:
            addresses = await self._resolve(host, port)
        except (OSError, UnicodeError):
            raise Refused(f"the host '{host[:255]}' is not known") from None
        if not addresses or not all(self._permits(address) for address in addresses):
            raise Refused(f"the host '{host[:255]}' has an address that is not public")
        for address in addresses[:-1]:
            try:
                return await self._sockets.connect_tcp(address, port, timeout, local_address, socket_options)
            except httpcore.ConnectError:
                continue
        return await self._sockets.connect_tcp(addresses[-1], port, timeout, local_address, socket_options)

    async def connect_unix_socket(self, path, timeout=None, socket_options=None):
        raise Refused("its URL is not valid")

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
