"""Messages over a stream socket between two event loops, each prefixed with its length (4 bytes, big-endian)."""

from __future__ import annotations

import asyncio
import socket
from types import UnionType

import msgspec

_encode = msgspec.msgpack.Encoder().encode


class Channel:
    """One end of the socket. `receives` is the union of the message types that it receives."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, receives: UnionType):
        self._reader, self._writer = reader, writer
        self._decode = msgspec.msgpack.Decoder(receives).decode

    @classmethod
    async def open(cls, end: socket.socket, receives: UnionType) -> Channel:
        """Open a channel over the socket, and take ownership of the socket."""
        return cls(*await asyncio.open_connection(sock=end), receives)

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message. Dropped silently if the other end is closed; `receive` reports that."""
        if not self._writer.is_closing():
            data = _encode(message)
            self._writer.write(len(data).to_bytes(4, "big") + data)

    @property
    def num_queued(self) -> int:
        """Return the number of bytes that the other end has not read yet."""
        return self._writer.transport.get_write_buffer_size()

    async def receive(self) -> msgspec.Struct | None:
        """Return the next message, or None once the other end is closed."""
        try:
            size = int.from_bytes(await self._reader.readexactly(4), "big")
            return self._decode(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    async def flush(self) -> None:
        """Wait until the queued messages are in the socket."""
        try:
            await self._writer.drain()
        except ConnectionError:
            return

    def close(self) -> None:
        self._writer.close()
