"""Sends KV events over ZeroMQ as vLLM does, so that routers which know vLLM understand them.

PUB      [topic, sequence number (8 bytes, big-endian), msgpack of (time in seconds, events, index of the engine)]
ROUTER   replay: a client asks with [b"", first sequence number] and gets [b"", topic, number, msgpack] per batch that
         is still known, then [b"", b"", -1, b""]. With events as arrays there is no topic, as in vLLM until 0.23.

Sequence numbers count from 0 in each run of an engine. A thread owns the sockets: the engine never waits for it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from dataclasses import asdict
from socket import gethostbyname, gethostname

import msgspec
import zmq

from quire.configs.kv_events import KVEventsSettings
from quire.configs.sockets import close_when_collected
from quire.engine.kv.events import KVEvent

logger = logging.getLogger(__name__)

END = (-1).to_bytes(8, "big", signed=True)
_WAKE = b""
_LOOPBACK = ("127.0.0.1", "localhost")
LINGER = 1000  # milliseconds to send the rest at the end


class KVEventPublisher:
    """Publishes the events of engine `index`. Raises ValueError if an address cannot be used."""

    def __init__(self, settings: KVEventsSettings, index: int = 0):
        self._settings, self._index = settings.for_engine(index), index
        self._named = settings.event_format == "map"
        self._topic = settings.topic.encode()
        self._queue: queue.Queue[tuple[int, float, list[KVEvent]] | None] = queue.Queue(settings.max_queue_size)
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=settings.buffer_steps)
        self._num_batches = self.num_dropped = 0
        self._context = zmq.Context()
        self._pub, self._replay = self._open(zmq.PUB, self._settings.endpoint, "endpoint"), None
        if self._settings.replay_endpoint is not None:
            self._replay = self._open(zmq.ROUTER, self._settings.replay_endpoint, "replay_endpoint")
        self.source = self._source()
        self._wake_receiver, self._wake = (self._context.socket(zmq.PAIR) for _ in range(2))
        self._wake_receiver.set_hwm(0)  # the queue bounds it
        self._wake.set_hwm(0)
        self._wake_receiver.bind("inproc://wake")
        self._wake.connect("inproc://wake")
        sockets = (self._pub, self._replay, self._wake_receiver, self._wake)
        close_when_collected(self, self._context, *filter(None, sockets))
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def _open(self, kind: int, endpoint: str, name: str) -> zmq.Socket:
        socket = self._context.socket(kind)
        socket.set_hwm(self._settings.hwm)
        socket.linger = LINGER
        # as vLLM: a publisher connects to the address of another host, where a router listens
        host = endpoint.removeprefix("tcp://").rpartition(":")[0]
        connects = kind == zmq.PUB and endpoint.startswith("tcp://") and "*" not in host and "::" not in host
        try:
            if not connects or host in _LOOPBACK:
                try:
                    socket.bind(endpoint)
                except zmq.ZMQError as error:
                    if not connects or error.errno != zmq.EADDRINUSE:
                        raise
                    socket.connect(endpoint)  # a router on this machine listens there
            else:
                socket.connect(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ValueError(f"--kv-events-config: {name} {endpoint} cannot be used: {error}") from None
        return socket

    def _source(self) -> dict[str, object]:
        """Return the settings as vLLM's `/kv_event_sources` reports them, with the ports that the system chose."""
        settings = asdict(self._settings)
        settings.pop("event_format")
        for name, socket in (("endpoint", self._pub), ("replay_endpoint", self._replay)):
            if socket is not None and settings[name].endswith(":0"):
                port = socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
                host = settings[name].rpartition(":")[0].replace("*", gethostbyname(gethostname()))
                settings[name] = f"{host}:{port}"
        return {"enable_kv_cache_events": True, "publisher": "zmq"} | settings

    def publish(self, events: list[KVEvent]) -> None:
        """Send a batch. If the queue is full, the batch is dropped; subscribers see a gap in the numbers."""
        number, self._num_batches = self._num_batches, self._num_batches + 1
        try:
            self._queue.put_nowait((number, time.time(), events))
        except queue.Full:
            if not self.num_dropped:
                logger.warning("kv events: %d batches wait to be published; dropping new ones", self._queue.qsize())
            self.num_dropped += 1
            return
        self._wake.send(_WAKE)

    def stop(self) -> None:
        """Send queued batches, and close the sockets."""
        self._queue.put(None)
        self._wake.send(_WAKE)
        self._thread.join(timeout=2 * LINGER / 1000)

    # ---- the thread

    def _run(self) -> None:
        poller, encoder = zmq.Poller(), msgspec.msgpack.Encoder()
        for socket in (self._wake_receiver, self._replay):
            if socket is not None:
                poller.register(socket, zmq.POLLIN)
        running = True
        while running:
            ready = dict(poller.poll())
            while running and self._wake_receiver.poll(0):
                self._wake_receiver.recv()
                running = self._send(self._queue.get(), encoder)
            if self._replay in ready:  # after what was published before it
                self._answer(self._replay.recv_multipart())
        for socket in filter(None, (self._pub, self._replay, self._wake_receiver)):
            socket.close()

    def _send(self, batch: tuple[int, float, list[KVEvent]] | None, encoder: msgspec.msgpack.Encoder) -> bool:
        """Send a batch. Returns False for None, the end."""
        if batch is None:
            return False
        number, now, events = batch
        payload = encoder.encode((now, [_named(event) for event in events] if self._named else events, self._index))
        self._pub.send_multipart((self._topic, number.to_bytes(8, "big"), payload))
        self._sent.append((number, payload))
        return True

    def _answer(self, frames: list[bytes]) -> None:
        """Send the batches from the sequence number that a client asked for."""
        if len(frames) != 3 or len(frames[2]) != 8:
            logger.warning("kv events: a replay request of %d frames: it must be an 8-byte number", len(frames))
            return
        client, first = frames[0], int.from_bytes(frames[2], "big")
        topic = [self._topic] if self._named else []
        for number, payload in self._sent:
            if number >= first:
                self._replay.send_multipart((client, b"", *topic, number.to_bytes(8, "big"), payload))
        self._replay.send_multipart((client, b"", *([b""] if topic else []), END, b""))


def _named(event: KVEvent) -> dict[str, object]:
    """Return an event as a map, without fields that have vLLM's defaults."""
    name, required = type(event).__name__, ("parent_block_hash", "lora_id", "lora_name")
    fields = msgspec.structs.asdict(event).items()
    return {"type": name} | {key: value for key, value in fields if value is not None or key in required}
