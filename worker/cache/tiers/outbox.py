"""Blocks of finished prompts that other servers read: the sender's half of `remote.py`.

ROUTER   a reader asks with msgpack of `Ask`, and gets per key [msgpack of `Found`, content]. A reader on this machine
         gets no content but its place, a file in memory that it reads itself. A key whose copy has begun is answered
         when the copy is there; other keys are answered as missing.

Contents stay until they are the oldest beyond the limit. A thread owns the socket: the engine never waits for it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket as sockets
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import msgspec
import zmq

logger = logging.getLogger(__name__)

MAX_KEYS = 64  # of one request
MAX_ASK = 64 << 10  # bytes of one request
MAX_WAITING = 1024  # requests that wait for copies
POLL, IDLE_POLL = 2, 100  # milliseconds
UNKNOWN = -1


class Ask(msgspec.Struct, array_like=True):
    number: int
    fingerprint: bytes  # of the model and the format
    host: str  # where the reader runs, see `this_host`; "": send the contents
    keys: list[bytes]


class Found(msgspec.Struct, array_like=True):
    number: int
    key: bytes
    size: int = UNKNOWN
    crc: int = 0
    place: tuple[int, int, int] | None = None  # process, its file descriptor, offset


def this_host() -> str:
    """Return a name that two processes share if one can open the other's files: the boot and the namespace of
    processes.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"
    except OSError:
        return ""


@dataclass(slots=True)
class _Entry:
    file: int  # number of a `_Parcel`
    offset: int
    size: int
    crc: int


@dataclass(slots=True)
class _Parcel:
    """The blocks of one prompt, in a file in memory that ends with this process."""

    fd: int
    keys: list[bytes]
    size: int = 0


def _memory_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("quire-kv")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class Outbox:
    """It listens at `host` and `port` and keeps `limit` bytes; `fingerprint` is that of the model and the format, None
    while it is not known. Raises ValueError if the address cannot be used.
    """

    def __init__(self, host: str, port: int, limit: int, fingerprint: Callable[[], bytes | None]):
        self.limit, self.used, self._fingerprint, self._host = limit, 0, fingerprint, this_host()
        self.num_sent = self.num_evicted = 0  # blocks that were asked for, that left unread
        self._parcels: OrderedDict[int, _Parcel] = OrderedDict()
        self._entries: dict[bytes, _Entry] = {}
        self._coming: set[bytes] = set()  # keys whose copy has begun
        self._number, self._stopped = 0, False
        self._lock = threading.Lock()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.maxmsgsize = MAX_ASK
        try:
            self._socket.bind(f"tcp://{_address(host)}:{port}")
        except (zmq.ZMQError, OSError) as error:
            self._context.destroy(linger=0)
            raise ValueError(f"--kv-transfer-config: cannot listen on {host}:{port}: {error}") from None
        self._thread = threading.Thread(target=self._serve, name="kv-outbox", daemon=True)
        self._thread.start()

    # ---- the worker's thread

    def announce(self, keys: list[bytes]) -> int:
        """Blocks with these keys come. Returns the number of their parcel."""
        with self._lock:
            self._number += 1
            self._parcels[self._number] = _Parcel(_memory_file(), keys)
            self._coming.update(key for key in keys if key not in self._entries)
            return self._number

    def add(self, number: int, key: bytes, content: bytes) -> None:
        """Keep the content of a block of a parcel."""
        with self._lock:
            parcel = self._parcels.get(number)
            if parcel is not None and key not in self._entries:
                _write(parcel.fd, content, parcel.size)
                self._entries[key] = _Entry(number, parcel.size, len(content), crc32(content))
                parcel.size += len(content)
                self.used += len(content)
            self._coming.discard(key)
            while self.used > self.limit and self._parcels:
                self._drop(next(iter(self._parcels)))

    def _drop(self, number: int) -> None:
        parcel = self._parcels.pop(number)
        self.used -= parcel.size
        for key in parcel.keys:
            self._coming.discard(key)
            if (entry := self._entries.get(key)) is not None and entry.file == number:
                del self._entries[key]
                self.num_evicted += 1
        os.close(parcel.fd)

    def clear(self) -> None:
        with self._lock:
            for number in list(self._parcels):
                self._drop(number)

    def stop(self) -> None:
        self._stopped = True
        self._thread.join(timeout=1.0)
        self.clear()

    # ---- the outbox's thread

    def _serve(self) -> None:
        waiting: list[tuple[bytes, Ask, bool]] = []
        while not self._stopped:
            if self._socket.poll(POLL if waiting else IDLE_POLL):
                client, *frames = self._socket.recv_multipart()
                with contextlib.suppress(msgspec.DecodeError, msgspec.ValidationError, ValueError):
                    ask = msgspec.msgpack.decode(frames[-1] if frames else b"", type=Ask)
                    known = ask.fingerprint == self._fingerprint() and len(ask.keys) <= MAX_KEYS
                    waiting.append((client, ask, known))
            waiting = [one for one in waiting if not self._answer(*one, len(waiting) <= MAX_WAITING)]
        self._socket.close()

    def _answer(self, client: bytes, ask: Ask, known: bool, may_wait: bool) -> bool:
        """Answer the keys that are here or missing. Returns whether none is left."""
        left = []
        for key in ask.keys[:MAX_KEYS]:
            found, content = Found(ask.number, key), b""
            with self._lock:
                entry = self._entries.get(key) if known else None
                if entry is None and known and may_wait and key in self._coming:
                    left.append(key)
                    continue
                if entry is not None:
                    fd = self._parcels[entry.file].fd
                    found.size, found.crc = entry.size, entry.crc
                    if ask.host and ask.host == self._host:
                        found.place = os.getpid(), fd, entry.offset
                    else:
                        content = os.pread(fd, entry.size, entry.offset)
                    self.num_sent += 1
            with contextlib.suppress(zmq.Again):
                self._socket.send_multipart([client, msgspec.msgpack.encode(found), content], zmq.DONTWAIT)
        ask.keys = left
        return not left


def _write(fd: int, content: bytes, offset: int) -> None:
    view = memoryview(content)
    while view:
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count


def _address(host: str) -> str:
    """Return the address of a name, as ZeroMQ binds to it."""
    if host in ("*", "0.0.0.0", "::"):
        return "*"
    found = sockets.getaddrinfo(host, None, type=sockets.SOCK_STREAM)[0][4][0]
    return f"[{found}]" if ":" in found else found
