"""ZeroMQ sockets whose owner may be collected."""

from __future__ import annotations

import weakref

import zmq


def close_when_collected(owner: object, context: zmq.Context, *sockets: zmq.Socket) -> weakref.finalize:
    """Close sockets and their context when the garbage collector finds their owner.

    pyzmq refers to the sockets of a context weakly: without this, a collector that finds both in one cycle waits
    forever for the sockets, which the context no longer finds.
    """
    finalizer = weakref.finalize(owner, _close, context, sockets)
    finalizer.atexit = False  # a thread may still use them
    return finalizer


def _close(context: zmq.Context, sockets: tuple[zmq.Socket, ...]) -> None:
    for socket in sockets:
        socket.close()
    context.term()
