"""The ranks of other machines: they connect to the first node over TCP, and then speak `multiproc`'s protocol as if
the connection were a pipe.

A rank first sends `Join` and gets `Joined`. Whoever reaches the port can join, as with torch's own rendezvous: only
the nodes should reach it. The settings of the server, with its keys, stay on the first node.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection

import msgspec

from quire.configs.config import Config, ParallelConfig
from quire.configs.serving import ServerConfig

logger = logging.getLogger(__name__)

SILENCE = 8  # seconds after which a machine that does not answer is gone
RETRY = 1.0  # seconds between attempts to reach the first node
ACCEPT_TIMEOUT = 0.5  # seconds between looks whether this node's own ranks live
HELLO_TIMEOUT = 10  # seconds for a connection to say which rank it is
REMIND = 30.0  # seconds between lines that name the missing nodes
_SIOCGIFADDR = 0x8915
_MAX_HELLO = 1 << 20  # bytes
_ENDS = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR  # events of a connection that has ended


class Join(msgspec.Struct, array_like=True):
    """The first message of a rank."""

    rank: int
    sizes: tuple[int, int, int]  # nodes, tensor-parallel and pipeline-parallel ranks


class Joined(msgspec.Struct, array_like=True):
    """The answer: where the ranks meet, and the settings of the first node; or why the rank can never join."""

    refusal: str = ""
    init_method: str = ""
    config: bytes = b""


def sizes_of(parallel: ParallelConfig) -> tuple[int, int, int]:
    return parallel.nnodes, parallel.tensor_parallel_size, parallel.pipeline_parallel_size


def interface_to(address: str) -> str | None:
    """Return the network interface by which this machine reaches `address`, or that has it. None if it is unknown."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # sends nothing
            own = probe.getsockname()[0]
        except OSError:
            return None
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                packed = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(packed[20:24]) == own:
                    return name
    return None


def use_interface(address: str) -> None:
    """Have gloo and NCCL use the interface that reaches the first node, unless the environment names one."""
    if (name := interface_to(address)) is not None:
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, name)


def _watchful(connected: socket.socket) -> Connection:
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


def _has_ended(pipe: Connection) -> bool:
    poller = select.poll()
    poller.register(pipe.fileno(), _ENDS)
    return bool(poller.poll(0))


# ---- the first node


class RemoteRanks:
    """The connections of the ranks of other nodes, by rank. `check_local` raises if a rank of this node has ended."""

    def __init__(self, config: Config, check_local: Callable[[], None]):
        self._config, self._parallel, self._check_local = config, config.parallel, check_local
        self.pipes: dict[int, Connection] = {}
        self._gone, self._gone_writer = os.pipe()

    def meet(self, init_method: str) -> None:
        """Wait for every rank of the other nodes, however long they take. Raises ValueError for a port in use."""
        parallel = self._parallel
        missing = set(range(parallel.ranks_per_node, parallel.world_size))
        with self._listen() as listener:
            reminded = -REMIND
            while missing:
                if time.monotonic() - reminded >= REMIND:
                    reminded = time.monotonic()
                    nodes = sorted({rank // parallel.ranks_per_node for rank in missing})
                    where = f"{parallel.master_addr}:{parallel.master_port}"
                    logger.info("waiting for node %s at %s", ", ".join(map(str, nodes)), where)
                self._check_local()
                with contextlib.suppress(TimeoutError):
                    joined, _ = listener.accept()
                    self._admit(joined, missing, init_method)
        threading.Thread(target=self._watch, name="remote-ranks", daemon=True).start()

    def _listen(self) -> socket.socket:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        address = (self._parallel.master_addr, self._parallel.master_port)
        try:
            listener.bind(address)
        except OSError as error:
            listener.close()
            raise ValueError(
                f"--master-addr {address[0]}, --master-port {address[1]}: cannot listen: {error.strerror}"
            ) from None
        listener.listen()
        listener.settimeout(ACCEPT_TIMEOUT)
        return listener

    def _admit(self, joined: socket.socket, missing: set[int], init_method: str) -> None:
        """Take a rank that is missing. Any other connection ends, with the reason if it is a rank."""
        joined.settimeout(None)
        joined.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", HELLO_TIMEOUT, 0))
        peer = joined.getpeername()[0]
        pipe = Connection(joined.detach())
        try:
            hello = msgspec.msgpack.decode(pipe.recv_bytes(_MAX_HELLO), type=Join)
            refusal = self._refusal(hello)
            if not refusal and hello.rank in self.pipes and not _has_ended(self.pipes[hello.rank]):
                raise ConnectionError(f"rank {hello.rank} has joined already")  # the rank tries again
            config = b"" if refusal else msgspec.msgpack.encode(replace(self._config, server=ServerConfig()))
            pipe.send_bytes(msgspec.msgpack.encode(Joined(refusal, init_method, config)))
        except (OSError, EOFError, msgspec.DecodeError) as error:
            logger.warning("a connection from %s does not join: %s", peer, error)
            pipe.close()
            return
        if refusal:
            logger.warning("rank %d of %s was refused: %s", hello.rank, peer, refusal)
            pipe.close()
            return
        with socket.socket(fileno=os.dup(pipe.fileno())) as again:
            again.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
            self.pipes[hello.rank] = _watchful(again)
        pipe.close()
        missing.discard(hello.rank)

    def _refusal(self, hello: Join) -> str:
        if tuple(hello.sizes) != sizes_of(self._parallel):
            names = ("--nnodes", "--tensor-parallel-size", "--pipeline-parallel-size")
            theirs, ours = (
                ", ".join(f"{name} {value}" for name, value in zip(names, found, strict=True))
                for found in (hello.sizes, sizes_of(self._parallel))
            )
            return f"this node has {theirs}; the first has {ours}"
        others = range(self._parallel.ranks_per_node, self._parallel.world_size)
        return "" if hello.rank in others else f"rank {hello.rank} is none of another node"

    def _watch(self) -> None:
        """Make the end of a connection wake an idle engine."""
        poller = select.poll()
        for pipe in self.pipes.values():
            poller.register(pipe.fileno(), _ENDS)
        poller.poll()
        os.write(self._gone_writer, b"x")

    @property
    def sentinel(self) -> int:
        """A descriptor that is readable once a rank is gone."""
        return self._gone

    def describe(self, rank: int) -> str:
        return f"worker {rank} of node {rank // self._parallel.ranks_per_node} is gone: its connection ended"


# ---- other nodes


def join(config: Config, rank: int) -> tuple[Config, str, Connection]:
    """Connect to the first node, however long that takes. Returns the settings of the first node with this one's model
    folder, device and log, where the ranks meet, and the connection.

    Raises ValueError if the first node refuses this rank.
    """
    parallel = config.parallel
    while True:
        try:
            connected = socket.create_connection((parallel.master_addr, parallel.master_port), SILENCE)
            pipe = _watchful(connected)
            pipe.send_bytes(msgspec.msgpack.encode(Join(rank, sizes_of(parallel))))
            joined = msgspec.msgpack.decode(pipe.recv_bytes(), type=Joined)
        except (OSError, EOFError):
            time.sleep(RETRY)
            continue
        if joined.refusal:
            raise ValueError(joined.refusal)
        found = msgspec.msgpack.decode(joined.config, type=Config)
        model = replace(found.model, model=config.model.model)
        return replace(found, model=model, device=config.device, server=config.server), joined.init_method, pipe
