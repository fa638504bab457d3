"""The engine's side of its sockets: one ROUTER to which every server connects."""

from __future__ import annotations

import contextlib
import logging
import os

import msgspec
import zmq

from quire.engine.messages import FromEngine, ToEngine

logger = logging.getLogger(__name__)


class ServerSocket:
    """Bound at `address`. A server is known by its ROUTER identity, which is also the return address, so there may be
    several.

    Every message is one msgpack frame. Single-threaded, like any ZeroMQ socket.
    """

    def __init__(self, address: str):
        self._path = address.removeprefix("ipc://")
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)  # a send to a server that is gone fails instead of being dropped
        # the engine never waits for a slow server; what is queued is bounded by its open requests
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.bind(address)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)

    def watch(self, fd: int) -> None:
        """Let `wait` return when `fd` becomes readable, too."""
        self._poller.register(fd, zmq.POLLIN)

    def wait(self, timeout: float | None = None) -> list[int]:
        """Sleep until a message, or one of the watched descriptors, is there. Returns the readable descriptors."""
        events = self._poller.poll(None if timeout is None else timeout * 1000)
        return [source for source, _ in events if source is not self._socket]

    def receive(self) -> list[tuple[bytes, ToEngine]]:
        """All messages that have arrived, without waiting. What does not decode is logged and dropped."""
        messages = []
        while True:
            try:
                client, *_, payload = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            try:
                messages.append((client, self._decoder.decode(payload)))
            except msgspec.DecodeError as error:
                logger.error("dropped a message of %d bytes that is none of ours: %s", len(payload), error)

    def send(self, client: bytes, message: FromEngine) -> bool:
        """Queue a message. False if that server is gone."""
        try:
            self._socket.send_multipart((client, self._encoder.encode(message)))
            return True
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False

    def unlink(self) -> None:
        """Remove the socket's file, and the folder that was made for it, without closing the socket.

        Callable from any thread.
        """
        with contextlib.suppress(OSError):
            os.unlink(self._path)
            os.rmdir(os.path.dirname(self._path))

    def close(self, linger: float = 1.0) -> None:
        """Close, giving queued messages up to `linger` seconds to leave."""
        self._socket.close(linger=int(linger * 1000))
        self._context.term()
