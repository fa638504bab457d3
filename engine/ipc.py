"""The engine's socket: one ROUTER to which every server connects."""

from __future__ import annotations

import contextlib
import logging
import os

import msgspec
import zmq

from quire.configs.sockets import close_when_collected
from quire.engine.messages import FromEngine, ToEngine

logger = logging.getLogger(__name__)


class ServerSocket:
    """A ROUTER socket bound at `address`. A server is identified by its ROUTER identity, so several may connect.

    Every message is one msgpack frame. Not thread-safe, like any ZeroMQ socket.
    """

    def __init__(self, address: str):
        self._path = address.removeprefix("ipc://")
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.LINGER, 1000)  # ms, even if never closed: messages to a gone server do not block the exit
        close_when_collected(self, self._context, self._socket)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)  # a send to a disconnected server fails instead of being dropped
        # the engine never waits for a slow server; its queue is bounded by its open requests
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.bind(address)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)

    def watch(self, fd: int) -> None:
        """Let `wait` also return when `fd` becomes readable."""
        self._poller.register(fd, zmq.POLLIN)

    def wait(self, timeout: float | None = None) -> list[int]:
        """Sleep until a message arrives or a watched descriptor is readable, at most `timeout` seconds. Returns the
        readable descriptors.
        """
        events = self._poller.poll(None if timeout is None else timeout * 1000)
        return [source for source, _ in events if source is not self._socket]

    def receive(self) -> list[tuple[bytes, ToEngine]]:
        """Return all received messages, without waiting. Messages that do not decode are logged and dropped."""
        messages = []
        while True:
            try:
                client, *_, payload = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            try:
                messages.append((client, self._decoder.decode(payload)))
            except msgspec.DecodeError as error:
                logger.error(
                    "server %s: dropped a malformed message of %d bytes: %s", client.hex(), len(payload), error
                )

    def send(self, client: bytes, message: FromEngine) -> bool:
        """Queue a message. Returns False if the server disconnected."""
        try:
            self._socket.send_multipart((client, self._encoder.encode(message)))
            return True
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False

    def unlink(self) -> None:
        """Remove the socket's file and the folder created for it, without closing the socket.

        Thread-safe.
        """
        with contextlib.suppress(OSError):
            os.unlink(self._path)
            os.rmdir(os.path.dirname(self._path))

    def close(self, linger: float = 1.0) -> None:
        """Close the socket, allowing queued messages up to `linger` seconds to be sent."""
        self._socket.close(linger=int(linger * 1000))
        self._context.term()
