"""Blocks of finished prompts that other servers read: the sender's half of `remote.py`.

ROUTER   a reader asks with msgpack of `Ask`, and gets per key [msgpack of `Found`, content]. A reader on this machine
         gets no content but its place in a memory file, which it reads itself. A key whose copy has begun is answered
         when the copy is there, and until then every HEARTBEAT with COMING; other keys are answered as missing. A
         reader of another model or format learns the differences. A reader with NIXL gets an address, and the agent's
         description if it has changed.

Beyond the limit, the oldest contents are evicted. A thread owns the socket: the engine never waits for it.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import socket as sockets
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec
import zmq

from quire.worker.cache.tiers.nixl import Nixl

logger = logging.getLogger(__name__)

MAX_KEYS = 64  # of one request
MAX_ASK = 64 << 10  # bytes of one request
MAX_WAITING = 1024  # requests that wait for copies
POLL, IDLE_POLL = 2, 100  # milliseconds
HEARTBEAT = 0.25  # seconds
SEGMENTS = 64  # number of files among which the limit is divided
UNKNOWN, COMING = -1, -2


class Ask(msgspec.Struct, array_like=True):
    number: int
    fingerprint: bytes  # of the model and the format
    host: str  # where the reader runs, see `this_host`; "": send the contents
    keys: list[bytes]
    nixl: int = -1  # the version of the description of NIXL's agent here that the reader has; -1: it has no NIXL


class Found(msgspec.Struct, array_like=True):
    number: int
    key: bytes
    size: int = UNKNOWN
    crc: int = 0
    place: tuple[int, int, int] | None = None  # process, its file descriptor, offset
    nixl: tuple[int, int] | None = None  # address, version of the agent's description
    about: list[str] = []  # facts about the blocks here, for a reader with another fingerprint


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
    segment: int  # number of a `_Segment`
    offset: int
    size: int
    crc: int
    written: int  # bytes written before it


@dataclass(slots=True)
class _Segment:
    """Blocks in a file in memory that ends with this process."""

    fd: int
    keys: list[bytes] = field(default_factory=list)
    size: int = 0
    memory: mmap.mmap | None = None  # with NIXL
    address: int = 0
    handle: Any = None


def _memory_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("quire-kv")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class Outbox:
    """Listens at `host` and `port` and keeps `limit` bytes; `fingerprint` is that of the model and the format, None
    while it is not known, and `about` describes the format. Raises ValueError if the address cannot be used.
    """

    def __init__(
        self,
        host: str,
        port: int,
        limit: int,
        fingerprint: Callable[[], bytes | None],
        about: Sequence[str] = (),
        nixl: Nixl | None = None,
    ):
        self.limit, self.used, self._fingerprint, self._host = limit, 0, fingerprint, this_host()
        self._about, self._nixl = list(about), nixl
        self.num_sent = self.num_evicted = 0  # blocks sent to readers, blocks evicted
        self._segments: OrderedDict[int, _Segment] = OrderedDict()  # the last one is written to
        self._entries: dict[bytes, _Entry] = {}
        self._coming: set[bytes] = set()  # keys whose copy has begun
        self._written = 0  # bytes
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

    def announce(self, keys: list[bytes]) -> set[bytes]:
        """Announce blocks with these keys. Returns the keys whose blocks must be copied: the others are here and stay
        for a while.
        """
        with self._lock:
            wanted = {key for key in keys if not self._is_fresh(key)}
            self._coming.update(key for key in wanted if key not in self._entries)
            return wanted

    def _is_fresh(self, key: bytes) -> bool:
        """Return whether a block is here and in the newer half of the contents."""
        entry = self._entries.get(key)
        return entry is not None and self._written - entry.written <= self.limit // 2

    def add(self, key: bytes, content: bytes) -> None:
        """Keep the content of a block."""
        with self._lock:
            self._coming.discard(key)
            if self._is_fresh(key):
                return
            number, segment = self._open_segment(len(content))
            _write(segment.fd, content, segment.size)
            self._entries[key] = _Entry(number, segment.size, len(content), crc32(content), self._written)
            segment.keys.append(key)
            segment.size += len(content)
            self.used += len(content)
            self._written += len(content)
            while self.used > self.limit:
                self._drop(next(iter(self._segments)))

    def _open_segment(self, size: int) -> tuple[int, _Segment]:
        """Return the segment to write `size` bytes to, and its number."""
        segment, most = self._segments.get(self._number), max(self.limit // SEGMENTS, size)
        if segment is None or segment.size + size > most:
            self._number += 1
            segment = self._segments[self._number] = _Segment(_memory_file())
            if self._nixl is not None:
                os.ftruncate(segment.fd, most)
                segment.memory = mmap.mmap(segment.fd, most)
                with self._tcp_on_errors():
                    segment.address, segment.handle = self._nixl.offer(segment.memory)
        return self._number, segment

    @contextlib.contextmanager
    def _tcp_on_errors(self) -> Iterator[None]:
        """Stop using NIXL after one of its errors, which must end neither the engine nor the outbox."""
        try:
            yield
        except Exception as error:  # its own kinds, one per status
            logger.warning("kv transfer: NIXL: %s: %s; blocks are sent over TCP", type(error).__name__, error)
            self._nixl = None

    def _drop(self, number: int) -> None:
        segment = self._segments.pop(number)
        self.used -= segment.size
        for key in segment.keys:
            if (entry := self._entries.get(key)) is not None and entry.segment == number:
                del self._entries[key]
                self.num_evicted += 1
        if self._nixl is not None:
            with self._tcp_on_errors():
                self._nixl.withdraw(segment.handle)
        os.close(segment.fd)

    def clear(self) -> None:
        """Forget all blocks, including announced ones."""
        with self._lock:
            self._coming.clear()
            for number in list(self._segments):
                self._drop(number)

    def stop(self) -> None:
        self._stopped = True
        self._thread.join(timeout=1.0)
        self.clear()

    # ---- the outbox's thread

    def _serve(self) -> None:
        waiting: list[tuple[bytes, Ask, bool]] = []
        beat = 0.0
        while not self._stopped:
            if self._socket.poll(POLL if waiting else IDLE_POLL):
                client, *frames = self._socket.recv_multipart()
                with contextlib.suppress(msgspec.DecodeError, msgspec.ValidationError, ValueError):
                    ask = msgspec.msgpack.decode(frames[-1] if frames else b"", type=Ask)
                    known = ask.fingerprint == self._fingerprint() and len(ask.keys) <= MAX_KEYS
                    waiting.append((client, ask, known))
            waiting = [one for one in waiting if not self._answer(*one, len(waiting) <= MAX_WAITING)]
            if waiting and (now := time.monotonic()) - beat > HEARTBEAT:
                beat = now
                for client, ask, _ in waiting:
                    self._send(client, Found(ask.number, ask.keys[0], COMING), b"")
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
                    content = self._point_to(entry, ask, found)
                    self.num_sent += 1
            if not known and self._fingerprint() is not None:
                found.about = self._about
            self._send(client, found, content)
        ask.keys = left
        return not left

    def _point_to(self, entry: _Entry, ask: Ask, found: Found) -> bytes:
        """Tell a reader where a block is. Returns the content if the reader cannot read that place."""
        segment = self._segments[entry.segment]
        found.size, found.crc = entry.size, entry.crc
        if ask.host and ask.host == self._host:
            found.place = os.getpid(), segment.fd, entry.offset
            return b""
        if self._nixl is not None and ask.nixl >= 0:
            with self._tcp_on_errors():
                version, description = self._nixl.description()
                found.nixl = segment.address + entry.offset, version
                return b"" if ask.nixl == version else description
        return os.pread(segment.fd, entry.size, entry.offset)

    def _send(self, client: bytes, found: Found, content: bytes) -> None:
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart([client, msgspec.msgpack.encode(found), content], zmq.DONTWAIT)


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
