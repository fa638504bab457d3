"""Closes ZeroMQ sockets of collected owners, and handles connections to other machines."""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection

import zmq

from quire.configs import platforms

logger = logging.getLogger(__name__)

SILENCE = 8  # seconds after which a machine that does not answer is gone
HELLO_TIMEOUT = 10  # seconds within which a connection must identify itself
MAX_ARRIVALS = 256  # maximum number of connections that have not identified themselves
NAME_TIMEOUT = 30.0  # seconds until the name of this machine resolves: a pod's does not at once
_NAME_RETRY = 1.0


def close_when_collected(owner: object, context: zmq.Context, *sockets: zmq.Socket) -> weakref.finalize:
    """Close sockets and their context when the garbage collector finds their owner.

    pyzmq refers to the sockets of a context weakly: without this, a collector that finds both in one cycle waits
    forever for the sockets, which the context no longer finds.
    """
    finalizer = weakref.finalize(owner, _close, context, sockets)
    finalizer.atexit = False  # a thread may still use them
    return finalizer


def _close(context: zmq.Context, sockets: tuple[zmq.Socket, ...]) -> None:
    for one in sockets:
        one.close()
    context.term()


def watchful(connected: socket.socket) -> Connection:
    """Return the connection after making it end when the other machine does not answer for SILENCE seconds."""
    connected.settimeout(None)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    platforms.end_after_silence(connected, SILENCE)
    return Connection(connected.detach())


def limit_wait(connection: socket.socket | Connection, seconds: int) -> None:
    """Let each read of a connection fail with OSError after `seconds`; 0: never."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))


class Arrivals:
    """Holds connections of a listener that have not identified themselves: at most MAX_ARRIVALS, each in a thread."""

    def __init__(self, name: str):
        self._name, self._free = name, threading.BoundedSemaphore(MAX_ARRIVALS)

    def start(self, handle: Callable[[socket.socket, str], None], arrived: socket.socket, peer: str) -> None:
        """Call `handle(arrived, peer)` in a thread; it calls `identified` once. Close the connection if too many others
        are silent.
        """
        if not self._free.acquire(blocking=False):
            logger.warning("%d connections have not identified themselves: one from %s is closed", MAX_ARRIVALS, peer)
            arrived.close()
            return
        threading.Thread(target=handle, args=(arrived, peer), name=self._name, daemon=True).start()

    def identified(self) -> None:
        self._free.release()


def different_sizes(
    flags: tuple[str, ...], theirs: Iterable[int], ours: Iterable[int], other: str, here: str
) -> str | None:
    """Return why machine `other` with values `theirs` of `flags` cannot work with `here`, or None if all are equal."""
    found = [", ".join(f"{flag} {value}" for flag, value in zip(flags, values)) for values in (theirs, ours)]
    return f"{other} has {found[0]}; {here} has {found[1]}" if found[0] != found[1] else None


def bind(address: str, port: int, flag: str) -> socket.socket:
    """Return a socket at an address of this machine, which may be a name that resolves a little later.

    Raises ValueError, naming `flag`, for an unknown name, an address of another machine or a port in use.
    """
    bound, end = socket.socket(), time.monotonic() + NAME_TIMEOUT
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    while True:
        try:
            bound.bind((address, port))
            return bound
        except OSError as error:
            if isinstance(error, socket.gaierror) and time.monotonic() < end:
                logger.info("waiting until the name %s is known: %s", address, error.strerror)
                time.sleep(_NAME_RETRY)
                continue
            bound.close()
            raise ValueError(f"{flag}: cannot listen: {error.strerror}") from None
