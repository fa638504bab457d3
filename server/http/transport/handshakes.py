"""TLS handshakes. asyncio reports a connection only after its handshake, so that clients that never begin one could
take all descriptors. Here a handshake counts as an idle connection from the start: its time is bounded, and it makes
room for new ones.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable

from quire.server.http.transport.connections import SPARE_CONNECTIONS, Connection, Connections


class Handshake(asyncio.Protocol):
    """A connection until its handshake ends; the protocol from `make` then takes over."""

    def __init__(self, make: Callable[[], Connection], shared: Connections, context: ssl.SSLContext):
        self._make, self._shared, self._context = make, shared, context
        self.transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        excess = self._shared.enter(self)
        self._shared.idle.setdefault(self)
        if excess > SPARE_CONNECTIONS:
            self.give_way()
        else:
            self._task = asyncio.get_running_loop().create_task(self._secure())

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle the end of the connection before the handshake begins."""
        self._shared.leave(self)

    async def _secure(self) -> None:
        early = _Early()
        try:
            transport = await asyncio.get_running_loop().start_tls(
                self.transport,
                early,
                self._context,
                server_side=True,
                ssl_handshake_timeout=self._shared.limits.header_timeout,
            )
        except OSError:  # no TLS, no common version, a rejected certificate, a timeout, a lost client
            return
        finally:
            self._shared.leave(self)
        if transport is None:  # it has given way
            return
        connection = self._make()
        transport.set_protocol(connection)
        connection.connection_made(transport)
        early.hand_over(connection)

    def give_way(self) -> None:
        """Close to make room for a new connection."""
        self._shared.leave(self)
        self.transport.abort()


class _Early(asyncio.Protocol):
    """Buffers data that arrives after the handshake and before the connection has its protocol."""

    def __init__(self) -> None:
        self._data: list[bytes] = []
        self._at_end = False
        self._lost: list[Exception | None] = []

    def data_received(self, data: bytes) -> None:
        self._data.append(data)

    def eof_received(self) -> None:
        self._at_end = True

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost.append(exc)

    def hand_over(self, connection: Connection) -> None:
        for data in self._data:
            connection.data_received(data)
        if self._at_end:
            connection.eof_received()
        for exc in self._lost:
            connection.connection_lost(exc)
