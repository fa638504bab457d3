"""The ranks of other machines: they connect to the first node over TCP, and then speak `multiproc`'s protocol as if the
connection were a pipe.

A rank first sends `Join` and gets `Joined`. Every process that reaches the port can join, as with torch's own
rendezvous: only the nodes should reach it. The settings of the server, with its keys, stay on the first node.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import logging
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from multiprocessing.connection import Connection, wait

import msgspec

from quire.configs.config import Config, ParallelConfig
from quire.configs.serving import ServerConfig
from quire.configs.sockets import HELLO_TIMEOUT, SILENCE, Arrivals, bind, different_sizes, limit_wait, watchful

logger = logging.getLogger(__name__)

RETRY = 1.0  # seconds between attempts to reach the first node
ACCEPT_TIMEOUT = 0.5  # seconds between checks that this node's own ranks live
REMIND = 30.0  # seconds between lines that name the missing nodes
LAST_CALLS = 1.0  # seconds that a rank has for what it received before its connection ended
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
    """Return the network interface by which this machine reaches `address`, or that has it; None if unknown."""
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


def _wait_for_end(pipes: Iterable[Connection], milliseconds: int | None = None) -> bool:
    """Wait until one of the connections has ended; return whether one has. Reads nothing."""
    poller = select.poll()
    for pipe in pipes:
        poller.register(pipe.fileno(), _ENDS)
    return bool(poller.poll(milliseconds))


# ---- the first node


class RemoteRanks:
    """The connections of the ranks of other nodes, by rank. `check_local` raises if a rank of this node has ended."""

    def __init__(self, config: Config, check_local: Callable[[], None]):
        self._config, self._parallel, self._check_local = config, config.parallel, check_local
        self.pipes: dict[int, Connection] = {}
        self._gone, self._gone_writer = os.pipe()
        self._missing = set(range(self._parallel.ranks_per_node, self._parallel.world_size))
        self._arrivals = Arrivals("remote-rank")
        self._mutex = threading.Lock()  # guards `pipes` and `_missing` until all have met
        self._met, self._met_writer = os.pipe()

    def meet(self, init_method: str) -> None:
        """Wait for every rank of the other nodes, however long they take. Raises ValueError for a port in use."""
        with self._listen() as listener:
            reminded = -REMIND
            while self._missing:
                if time.monotonic() - reminded >= REMIND:
                    reminded = time.monotonic()
                    self._remind()
                self._check_local()
                if listener in wait([listener, self._met], ACCEPT_TIMEOUT):
                    self._accept(listener, init_method)
        threading.Thread(target=self._watch, name="remote-ranks", daemon=True).start()

    def _listen(self) -> socket.socket:
        address, port = self._parallel.master_addr, self._parallel.master_port
        listener = bind(address, port, f"--master-addr {address}, --master-port {port}")
        listener.listen()
        listener.settimeout(ACCEPT_TIMEOUT)
        return listener

    def _remind(self) -> None:
        parallel = self._parallel
        nodes = sorted({rank // parallel.ranks_per_node for rank in list(self._missing)})
        where = f"{parallel.master_addr}:{parallel.master_port}"
        logger.info("waiting for node %s at %s", ", ".join(map(str, nodes)), where)

    def _accept(self, listener: socket.socket, init_method: str) -> None:
        """Admit a connection in a thread of its own, because it may stay silent."""
        try:
            joined, (peer, _) = listener.accept()
        except OSError as error:  # it has ended already, or there are no descriptors
            logger.warning("no rank can join: %s", error)
            time.sleep(ACCEPT_TIMEOUT)
            return
        self._arrivals.start(functools.partial(self._admit, init_method), joined, peer)

    def _admit(self, init_method: str, joined: socket.socket, peer: str) -> None:
        """Take a rank that is missing. Any other connection ends, with the reason if it is a rank."""
        with joined:
            try:
                joined.settimeout(None)
                limit_wait(joined, HELLO_TIMEOUT)
                with Connection(os.dup(joined.fileno())) as pipe:
                    hello = msgspec.msgpack.decode(pipe.recv_bytes(_MAX_HELLO), type=Join)
                    if refusal := self._refusal(hello):
                        pipe.send_bytes(msgspec.msgpack.encode(Joined(refusal)))
                        raise ConnectionError(f"rank {hello.rank}: {refusal}")
                    self._take(hello.rank, joined, pipe, init_method)
            except (OSError, EOFError, msgspec.DecodeError) as error:
                logger.warning("a connection from %s does not join: %s", peer, error)
            finally:
                self._arrivals.identified()

    def _take(self, rank: int, joined: socket.socket, pipe: Connection, init_method: str) -> None:
        """Answer a rank, and keep its connection. Raises ConnectionError if the rank has to try again."""
        config = msgspec.msgpack.encode(replace(self._config, server=ServerConfig()))
        with self._mutex:
            if not self._missing or (rank in self.pipes and not _wait_for_end([self.pipes[rank]], 0)):
                raise ConnectionError(f"rank {rank} has joined already")
            pipe.send_bytes(msgspec.msgpack.encode(Joined("", init_method, config)))
            limit_wait(joined, 0)
            self.pipes[rank] = watchful(joined)
            self._missing.discard(rank)
            if not self._missing:
                os.write(self._met_writer, b"x")

    def _refusal(self, hello: Join) -> str:
        flags = ("--nnodes", "--tensor-parallel-size", "--pipeline-parallel-size")
        if why := different_sizes(flags, hello.sizes, sizes_of(self._parallel), "this node", "the first"):
            return why
        others = range(self._parallel.ranks_per_node, self._parallel.world_size)
        return "" if hello.rank in others else f"rank {hello.rank} is none of another node"

    def _watch(self) -> None:
        """Make the end of a connection wake an idle engine."""
        _wait_for_end(self.pipes.values())
        os.write(self._gone_writer, b"x")

    @property
    def sentinel(self) -> int:
        """Return a descriptor that is readable once a rank is gone."""
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
            pipe = watchful(connected)
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


def exit_with(pipe: Connection) -> None:
    """Let this process exit once its connection to the first node has ended, also within a collective: after a cut
    cable it may wait for ever for a rank that was killed meanwhile.
    """

    def watch() -> None:
        _wait_for_end([pipe])
        time.sleep(LAST_CALLS)
        os._exit(0)

    threading.Thread(target=watch, name="first-node", daemon=True).start()
