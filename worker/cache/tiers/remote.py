"""The tier of other servers' blocks, which vLLM calls disaggregated prefill.

A server that computed a prompt keeps copies of its blocks (`outbox.py`); the one that continues the request is told
where they are and loads them like those of a disk. Equal keys and fingerprints mean equal contents, and each
block has a checksum. Blocks of a lost or slow server are misses and are computed.
"""

from __future__ import annotations

import logging
import math
import os
import stat
import threading
import time
from collections import OrderedDict, deque
from typing import TYPE_CHECKING
from zlib import crc32

import msgspec
import zmq

from quire.configs.config import Config
from quire.worker.cache.tiers.base import Content, Rank, Tier
from quire.worker.cache.tiers.nixl import Nixl, open_nixl
from quire.worker.cache.tiers.outbox import COMING, UNKNOWN, Ask, Found, Outbox, this_host
from quire.worker.messages import REMOTE

if TYPE_CHECKING:
    from quire.worker.platforms.base import Platform

logger = logging.getLogger(__name__)

COPY_BYTES = 32 << 20  # bytes that one poll copies on a server that also decodes
AHEAD = 16  # blocks that one request asks for
PATIENCE = 1.0  # seconds without a message after which a server is given up
LONGEST = 30.0  # seconds that a block may be on its way
PAUSE = 10.0  # seconds for which such a server is not asked
MAX_EXPECTED = 1 << 18  # keys whose server is known
MAX_SERVERS = 16  # maximum number of open connections

Address = tuple[str, int]


class RemoteTier(Tier):
    """Takes no blocks that leave the KV cache. `poll` and `send` run in the worker's thread, `read` in the read-ahead
    thread.
    """

    name, medium, where, saves, slow = REMOTE, "", "on other servers", False, True

    def __init__(self, rank: Rank, limit: int):
        settings = rank.config.cache.transfer
        self.limit, self.used = 0, 0
        self._gather, self._agree = rank.gather, rank.agree
        self._digest: bytes | None = None
        self._outbox: Outbox | None = None
        self._nixl = open_nixl(settings.backends)
        if settings.sends:
            port = settings.port + rank.number
            limit //= rank.num_ranks
            self._outbox = Outbox(settings.host, port, limit, lambda: self._digest, rank.about, self._nixl)
        self._about = list(rank.about)
        self._copy_bytes = COPY_BYTES if settings.receives else math.inf
        self._left: deque[tuple[int, bytes]] = deque()  # (block, key) to copy
        self._ends: deque[int] = deque()  # blocks that are left to copy when a call of `send` is done
        self._num_copied = self._num_given = self._num_done = 0
        self._offset = rank.number
        self._sources: OrderedDict[bytes, Address] = OrderedDict()  # where blocks are
        self._next: deque[bytes] = deque(maxlen=MAX_EXPECTED)  # keys of loads, in their order
        self._down: dict[Address, float] = {}  # servers that are not asked, until when
        self._servers: OrderedDict[Address, _Server] = OrderedDict()
        self._lock = threading.Lock()
        # reads all files of the model
        threading.Thread(target=self._identify, args=(rank,), name="kv-fingerprint", daemon=True).start()

    def _identify(self, rank: Rank) -> None:
        try:
            self._digest = rank.portable()
        except OSError as error:
            logger.warning("--kv-transfer-config: cannot read the model's files (%s): no block is sent or read", error)

    @classmethod
    def plan(cls, config: Config, platform: Platform) -> int | None:
        """Return the RAM of blocks that wait to be read."""
        settings = config.cache.transfer
        if not settings.role:
            return None
        return settings.buffer_bytes if settings.sends else 0

    @classmethod
    def open(cls, limit: int, rank: Rank) -> RemoteTier:
        return cls(rank, limit)

    # ---- blocks for other servers, see `TransferCalls`

    def send(self, blocks: list[tuple[int, bytes]]) -> None:
        wanted = self._outbox.announce([key for _, key in blocks])
        self._left.extend(one for one in blocks if one[1] in wanted)
        self._num_given += len(wanted)
        self._ends.append(self._num_given)
        self._copy()

    def _copy(self) -> None:
        """Copy some blocks. A reader waits for them, and the next call of `poll` may be a long step away."""
        copied = 0
        while self._left and copied < self._copy_bytes:
            block_id, key = self._left.popleft()
            content = self._gather(block_id)
            self._outbox.add(key, content)
            copied += len(content)
            self._num_copied += 1

    def poll(self) -> int:
        self._copy()
        while self._ends and self._ends[0] <= self._num_copied:
            self._ends.popleft()
            self._num_done += 1
        if self._outbox is not None:
            self.used = self._outbox.used
        return self._agree([self._num_done])[0]

    # ---- blocks of other servers

    def expect(self, host: str, port: int, keys: list[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._sources[key] = host, port + self._offset
                self._sources.move_to_end(key)
            while len(self._sources) > MAX_EXPECTED:
                self._sources.popitem(last=False)

    def contains(self, keys: list[bytes]) -> list[bool]:
        if self._digest is None:
            return [False] * len(keys)
        now = time.monotonic()
        with self._lock:
            places = [self._sources.get(key) for key in keys]
            return [place is not None and self._down.get(place, 0.0) <= now for place in places]

    def touch(self, keys: list[bytes]) -> None:
        with self._lock:
            self._next.extend(key for key in keys if key in self._sources)

    def read(self, key: bytes) -> bytes | None:
        with self._lock:
            address = self._sources.pop(key, None)
            if address is None or self._digest is None or self._down.get(address, 0.0) > time.monotonic():
                return None
            server = self._server(address)
            keys = [key]
            while not server.has(key) and self._next and len(keys) < AHEAD:
                if (one := self._next.popleft()) != key and self._sources.get(one) == address:
                    keys.append(one)
        try:
            return server.read(keys, self._digest)
        except (TimeoutError, zmq.ZMQError, _OtherBlocksError) as error:
            reason = str(error)
            if isinstance(error, _OtherBlocksError):
                reason = f"its blocks cannot be used here: {self._differences(error.about)}"
            logger.warning("kv transfer: %s:%d: %s; its blocks are computed for %.0f s", *address, reason, PAUSE)
            server.close()
            with self._lock:
                del self._servers[address]
                self._down = {one: until for one, until in self._down.items() if until > time.monotonic()}
                self._down[address] = time.monotonic() + PAUSE
            return None

    def _differences(self, about: list[str]) -> str:
        """Return the facts about another server's blocks that differ from those here."""
        pairs = zip(about, self._about) if len(about) == len(self._about) else []
        differing = [f"{_printable(there)}, here {here}" for there, here in pairs if there != here]
        return "; ".join(differing) or "another model, or another version of quire"

    def _server(self, address: Address) -> _Server:
        if address not in self._servers:
            self._servers[address] = _Server(address, self._nixl)
            if len(self._servers) > MAX_SERVERS:
                self._servers.popitem(last=False)[1].close()
        self._servers.move_to_end(address)
        return self._servers[address]

    # ---- as every tier

    def offer(self, key: bytes, content: Content, used: int = 0) -> None:
        return None

    def remove(self, keys: list[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._sources.pop(key, None)

    def clear(self) -> None:
        with self._lock:
            self._sources.clear()
        self._num_copied += len(self._left)  # their contents are outdated, too
        self._left.clear()
        if self._outbox is not None:
            self._outbox.clear()

    def stop(self) -> None:
        if self._outbox is not None:
            self._outbox.stop()

    def counts(self) -> dict[str, float]:
        outbox = self._outbox
        return {} if outbox is None else {"sent_blocks": outbox.num_sent, "evicted": outbox.num_evicted}


def _printable(text: str) -> str:
    return "".join(filter(str.isprintable, text[:200]))


class _OtherBlocksError(Exception):
    """A server has another model or format; `about` describes its format."""

    def __init__(self, about: list[str]):
        super().__init__(about)
        self.about = about


class _Server:
    """A connection to a server that has blocks, used by one thread."""

    def __init__(self, address: Address, nixl: Nixl | None = None):
        host, port = address
        self._nixl, self._agent, self._version = nixl, "", 0  # version of the known description of the agent
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.ipv6 = True
        self._socket.connect(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")
        self._host, self._number = this_host(), 0
        self._asked: set[bytes] = set()
        self._arrived: dict[bytes, bytes | None] = {}

    def has(self, key: bytes) -> bool:
        """Return whether the block is here or was asked for."""
        return key in self._arrived or key in self._asked

    def read(self, keys: list[bytes], fingerprint: bytes) -> bytes | None:
        """Return the content of the first key's block, None if the server has none; ask for the others, too. Raises
        TimeoutError if no useful answer arrives, `_OtherBlocksError` for a server with another fingerprint.
        """
        first, end = keys[0], time.monotonic() + LONGEST
        if not self.has(first):
            self._asked.clear()  # of loads that were cancelled
            self._arrived.clear()
            self._ask(keys, fingerprint)
        while first not in self._arrived:
            if not self._socket.poll(PATIENCE * 1000) or time.monotonic() > end:
                raise TimeoutError("no answer")
            self._take(fingerprint)
        return self._arrived.pop(first)

    def _ask(self, keys: list[bytes], fingerprint: bytes) -> None:
        self._number += 1
        self._asked.update(keys)
        version = -1 if self._nixl is None else self._version
        ask = Ask(self._number, fingerprint, self._host, keys, version)
        self._socket.send(msgspec.msgpack.encode(ask), zmq.DONTWAIT)

    def _take(self, fingerprint: bytes) -> None:
        try:
            head, content = self._socket.recv_multipart()
            found = msgspec.msgpack.decode(head, type=Found)
        except (ValueError, msgspec.MsgspecError) as error:
            raise TimeoutError(f"an answer that is none of quire's: {error}") from None
        if found.key not in self._asked or found.size == COMING:
            return
        if found.size == UNKNOWN and found.about:
            raise _OtherBlocksError(found.about)
        if found.size != UNKNOWN and (found.place or found.nixl):
            content = _read_place(*found.place, found.size) if found.place else self._read_nixl(found, content)
            if crc32(content) != found.crc:  # the content cannot be read, or was evicted meanwhile
                if found.place:
                    self._host = ""
                else:
                    self._nixl = None
                self._ask([found.key], fingerprint)
                return
        self._asked.discard(found.key)
        whole = len(content) == found.size and crc32(content) == found.crc
        self._arrived[found.key] = content if whole else None

    def _read_nixl(self, found: Found, description: bytes) -> bytes:
        """Return the content of a block that NIXL reads; b"" if it cannot."""
        if self._nixl is None:
            return b""
        try:
            if description:
                self._agent, self._version = self._nixl.learn(description), found.nixl[1]
            return self._nixl.read(self._agent, found.nixl[0], found.size, PATIENCE)
        except Exception as error:  # its own kinds, one per status
            logger.warning("kv transfer: NIXL: %s: %s; blocks come over TCP", type(error).__name__, error)
            return b""

    def close(self) -> None:
        self._context.destroy(linger=0)


def _read_place(process: int, fd: int, offset: int, size: int) -> bytes:
    """Return the content at a place in another process's file; b"" if it cannot be read."""
    try:
        descriptor = os.open(f"/proc/{int(process)}/fd/{int(fd)}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return b""
        parts = bytearray()
        while len(parts) < size and (part := os.pread(descriptor, size - len(parts), offset + len(parts))):
            parts += part
        return bytes(parts)
    except OSError:
        return b""
    finally:
        os.close(descriptor)
