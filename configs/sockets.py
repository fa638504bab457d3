"""ZeroMQ sockets whose owner may be collected, and connections to other machines."""

from __future__ import annotations

import socket
import weakref
from multiprocessing.connection import Connection

import zmq

SILENCE = 8  # seconds after which a machine that does not answer is gone


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
    """Return the connection, which ends when the other machine does not answer for SILENCE seconds."""
    connected.settimeout(None)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, 2),
        (socket.TCP_KEEPINTVL, 2),
        (socket.TCP_KEEPCNT, (SILENCE - 2) // 2),
        (socket.TCP_USER_TIMEOUT, SILENCE * 1000),
    ):
        connected.setsockopt(socket.IPPROTO_TCP, option, value)
    return Connection(connected.detach())
