"""The HTTP connections of one frontend: uvicorn's h11 protocol, with limits on their number, on the time a request may
take to arrive, and on the bytes of bodies in memory. Malformed HTTP is answered here, as JSON like every other error.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from quire.server import heap
from quire.server.errors import error_body
from quire.server.http.middleware import PROBES
from quire.server.http.transport.target import use_origin_form

logger = logging.getLogger("quire")

SPARE_CONNECTIONS = 32  # above the limit, if no connection is idle: for probes, and to return 503
BODY_BUDGET = 128 << 20  # bytes of all bodies that are being received or parsed
MIN_PROGRESS = 1024  # bytes of a body within `body_timeout`
LINGER_BYTES = 128 << 20  # bytes of an unread body that are read and dropped after an early answer
CANCEL_DELAY = 0.05  # seconds
# for clients that are gone without a word: seconds of silence before probes, between them, and their number. Not
# TCP_USER_TIMEOUT, which also ends connections of clients that do not read for a while
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
LARGE_BODY = 256 << 10  # bytes, after which memory is given back to the system
TRIM_DELAY = 1.0  # seconds after a large body


@dataclass(frozen=True, slots=True)
class Limits:
    """Timeouts are in seconds."""

    max_connections: int
    header_timeout: float = 20.0  # for request line and headers, from the connection or their first byte on
    body_timeout: float = 30.0  # without progress while receiving a body
    linger_timeout: float = 5.0  # for a client to read an early answer, sent before its body was read
    body_budget: int = BODY_BUDGET


class Member(Protocol):
    """A connection, or its TLS handshake."""

    transport: asyncio.Transport

    def give_way(self) -> None: ...


class Connections:
    """The shared state of the connections of one frontend."""

    def __init__(self, limits: Limits):
        self.limits = limits
        self.open: set[Member] = set()
        self.idle: dict[Member, None] = {}  # connections without a complete request, longest idle first
        self.body_bytes = 0
        self._trim: asyncio.TimerHandle | None = None

    def enter(self, member: Member) -> int:
        """Count a new connection; the longest idle one makes room. Return the number above the limit."""
        self.open.add(member)
        excess = len(self.open) - self.limits.max_connections
        return excess if excess > 0 and not self.close_longest_idle() else 0

    def leave(self, member: Member) -> None:
        self.open.discard(member)
        self.idle.pop(member, None)

    def close_longest_idle(self) -> bool:
        """Close an idle connection to make room for a new one. False if none is idle."""
        victim = next(iter(self.idle), None)
        if victim is None:
            return False
        victim.give_way()
        return True

    def abort_all(self) -> None:
        """Close all connections without sending pending data."""
        for member in list(self.open):
            member.transport.abort()

    def give_back_memory(self) -> None:
        """Schedule malloc_trim: the memory of a large body otherwise stays in the C library's heap."""
        if self._trim is None and sys.platform == "linux":
            self._trim = asyncio.get_running_loop().call_later(TRIM_DELAY, self._start_trim)

    def _start_trim(self) -> None:
        self._trim = None
        asyncio.get_running_loop().run_in_executor(None, heap.trim)


def _detect_loss(connection: socket.socket) -> None:
    """Have the system notice a client whose machine or network is gone, so that its requests are aborted."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if (option := getattr(socket, name, None)) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


class Connection(H11Protocol):
    """One connection; each of its requests has it as `scope["state"]["connection"]`."""

    def __init__(self, *args: object, shared: Connections, **kwargs: object):
        super().__init__(*args, **kwargs)
        self.shared, self.limits = shared, shared.limits
        self.crowded = False  # over the limit: only probes are answered
        self._next_app, self.app = self.app, self._run
        self.app_state = self.app_state | {"connection": self}
        self._expects: str | None = None  # the awaited part: "head", "body" or None
        self._timer: asyncio.TimerHandle | None = None
        self._progress_at, self._progress_bytes = 0.0, 0
        self._body_bytes = self._largest_body = 0
        self._lingering = False
        self._dropped = 0  # bytes dropped while lingering

    @property
    def body_unread(self) -> bool:
        """Return whether the client has not sent all of the current request; an answer then ends the connection."""
        return self.conn.their_state is h11.SEND_BODY

    @property
    def _busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    # ---- receiving

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(_Transport(transport, self))
        _detect_loss(transport.get_extra_info("socket"))
        excess = self.shared.enter(self)
        self.crowded = excess > 0
        if excess > SPARE_CONNECTIONS:
            transport.abort()
            return
        self._follow()

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect(None)
        self.forget_body()
        self.shared.leave(self)
        if self._busy and self.flow.write_paused:  # cancel the answer first; its buffer may be large
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            self.loop.call_later(CANCEL_DELAY, super().connection_lost, exc)
        else:
            super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._lingering:
            self._dropped += len(data)
            if self._dropped > LINGER_BYTES:
                self.transport.abort()
            return
        super().data_received(data)
        if self._busy:
            self.count_body(len(data))
        self._follow(len(data))

    def _follow(self, num_bytes: int = 0) -> None:
        """Update the awaited part and its deadline after `num_bytes` have arrived."""
        if self.transport.is_closing():
            self._expect(None)
        elif self._busy:
            self.shared.idle.pop(self, None)
            self._expect("body" if self.body_unread else None, num_bytes)
        else:
            self.shared.idle.setdefault(self)
            has_request = self.cycle is None or self.conn.trailing_data[0]
            # between two requests, uvicorn waits for `timeout_keep_alive`
            self._expect("head" if has_request else None)

    def _expect(self, what: str | None, num_bytes: int = 0) -> None:
        if what == self._expects:
            self._progress_bytes += num_bytes
            if what == "body" and self._progress_bytes >= MIN_PROGRESS:
                self._progress_at, self._progress_bytes = self.loop.time(), 0
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._expects = what
        if what is not None:
            self._progress_at, self._progress_bytes = self.loop.time(), 0
            self._timer = self.loop.call_later(self._timeout, self._on_timer)

    @property
    def _timeout(self) -> float:
        return self.limits.body_timeout if self._expects == "body" else self.limits.header_timeout

    def _on_timer(self) -> None:
        if self.flow.read_paused:  # we stopped reading; the client did not stop sending
            self._progress_at = self.loop.time()
        left = self._progress_at + self._timeout - self.loop.time()
        if left > 0:
            self._timer = self.loop.call_later(left, self._on_timer)
        elif self._expects == "body":
            self._refuse(408, f"The body made no progress for {self._timeout:g} seconds.")
        elif self.conn.trailing_data[0]:
            self._refuse(408, f"The headers did not arrive within {self._timeout:g} seconds.")
        else:
            self.transport.close()

    # ---- body memory

    def count_body(self, num_bytes: int) -> bool:
        """Count bytes of the current request's body as in memory. False if there are too many and it was refused."""
        self._body_bytes += num_bytes
        self._largest_body = max(self._largest_body, self._body_bytes)
        self.shared.body_bytes += num_bytes
        alone = self.shared.body_bytes == self._body_bytes  # the limit of a single body is sufficient then
        if self.shared.body_bytes > self.limits.body_budget and not alone:
            self._refuse_for_now(f"The bodies of the requests being received exceed {self.limits.body_budget} bytes.")
            return False
        return True

    def forget_body(self) -> None:
        """Record that the current request's body is no longer in memory."""
        self.shared.body_bytes -= self._body_bytes
        self._body_bytes = 0
        if self._largest_body > LARGE_BODY:
            self.shared.give_back_memory()

    # ---- answers

    async def _run(self, scope: dict, receive: Callable, send: Callable) -> None:
        """Wrap the application: note the arrival time, and refuse ambiguous or excess requests."""
        scope["state"]["arrived"] = self.loop.time()
        refusal = use_origin_form(scope)
        names = {name for name, _ in scope["headers"]}
        if {b"content-length", b"transfer-encoding"} <= names:  # request smuggling: a proxy may use the other header
            self._refuse(400, "A request must not have both Content-Length and Transfer-Encoding.")
        elif refusal is not None:
            self._refuse(400, refusal)
        elif self.crowded and scope["path"] not in PROBES:
            self._refuse_for_now(f"All {self.limits.max_connections} connections of this server are in use.")
        else:
            await self._next_app(scope, receive, send)

    def send_400_response(self, msg: str) -> None:
        """Answer 400. uvicorn calls this while it handles an h11 error."""
        error = sys.exc_info()[1]
        self._refuse(getattr(error, "error_status_hint", 400), f"The request is not valid HTTP: {error}.")

    def _unsupported_upgrade_warning(self) -> None:
        """Ignore upgrades without a log line."""

    def _refuse_for_now(self, message: str) -> None:
        self._refuse(503, message, "overloaded", "Retry-After: 2\r\n")

    def _refuse(self, status: int, message: str, code: str | None = None, fields: str = "") -> None:
        """Answer instead of the application, and close the connection."""
        logger.info("%s: refused with %d: %s", "{}:{}".format(*self.client) if self.client else "-", status, message)
        self._expect(None)
        self.forget_body()
        if self._busy:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if self.cycle.response_started:
                self.transport.abort()
                return
        body = error_body(message, "server_error" if status >= 500 else "invalid_request_error", None, code)
        fields += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
        self.transport.write(f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n{fields}\r\n".encode("latin-1") + body)
        self.linger()

    def on_response_complete(self) -> None:
        self.forget_body()
        self._largest_body = 0
        if self.body_unread:
            self.transport.close()
        super().on_response_complete()
        self._follow()

    # ---- closing

    def linger(self) -> None:
        """Close after the client can read the answer: closing a socket with unread input would drop it."""
        if self._lingering:
            return
        self._lingering = True
        self._expect(None)
        self.shared.idle.pop(self, None)
        self.flow.resume_reading()
        if self.transport.can_write_eof():  # TLS has no half-closed connections
            self.transport.write_eof()
        self._timer = self.loop.call_later(self.limits.linger_timeout, self.transport.abort)

    def give_way(self) -> None:
        """Close to make room for a new connection, without waiting for TLS's close notification."""
        self.shared.leave(self)
        self._expect(None)
        if self.transport.can_write_eof():
            self.transport.close()
        else:
            self.transport.abort()

    def shutdown(self) -> None:
        """Close at the shutdown of the server."""
        if self._lingering:
            self.transport.abort()
        else:
            super().shutdown()


_SAME = ("write", "can_write_eof", "write_eof", "abort", "get_extra_info", "pause_reading", "resume_reading")


class _Transport:
    """The transport as uvicorn sees it: `close` lingers when not all of the request was read."""

    def __init__(self, transport: asyncio.Transport, connection: Connection):
        self._transport, self._connection = transport, connection
        for name in _SAME:
            setattr(self, name, getattr(transport, name))

    def is_closing(self) -> bool:
        return self._connection._lingering or self._transport.is_closing()

    def close(self) -> None:
        if self._connection.body_unread and not self._transport.is_closing():
            self._connection.linger()
        else:
            self._transport.close()
