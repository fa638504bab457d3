"""Engines on other machines (`--data-parallel-size-local`): each joins over TCP, gets the settings, and reports the
port on which it listens. The connection then stays open: its end is the end of the engine, for both sides.

Anyone who reaches the port can join, and the engine's port takes requests: only these machines should reach them. The
server's own settings, with its keys, are not sent.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from dataclasses import replace
from importlib import metadata
from multiprocessing.connection import Connection

import msgspec

from quire.checkpoints.weight_summary import model_identity
from quire.configs.config import Config, ParallelConfig
from quire.configs.serving import ServerConfig
from quire.configs.sockets import HELLO_TIMEOUT, Arrivals, bind, different_sizes, limit_wait, watchful

logger = logging.getLogger(__name__)

END = b"end"  # asks the other machine to end the engine in order
LEAVING = b"leaving"  # from the other machine: the engine drains and takes no more requests
ACCEPT_TIMEOUT = 0.5  # seconds between checks whether the server is ending
REMIND = 30.0  # seconds between lines that name the missing engines
_MAX_MESSAGE = 1 << 20  # bytes


class Join(msgspec.Struct, array_like=True):
    """The first message of an engine."""

    engine: int
    sizes: tuple[int, int, int]  # engines, tensor-parallel and pipeline-parallel ranks
    version: str
    model: str = ""  # `model_identity` of its files


class Joined(msgspec.Struct, array_like=True):
    """The answer: the settings; or why the engine can never join."""

    refusal: str = ""
    config: bytes = b""


class Located(msgspec.Struct, array_like=True):
    """The engine listens, or will soon, at this port of its machine."""

    port: int


def sizes_of(parallel: ParallelConfig) -> tuple[int, int, int]:
    return parallel.data_parallel_size, parallel.tensor_parallel_size, parallel.pipeline_parallel_size


def identity_of(config: Config) -> str:
    """Return the identity of the model in the folder that `config` names."""
    return model_identity(config.model.model, has_weights=config.model.load_format != "dummy")


def own_version() -> str:
    try:
        return metadata.version("quire")
    except metadata.PackageNotFoundError:
        return "0+source"


def encode_config(config: Config) -> bytes:
    """Encode the settings for another machine, without those of the server."""
    return msgspec.msgpack.encode(replace(config, server=ServerConfig()))


def wake_and_close(pipe: Connection) -> None:
    """End the connection. A thread that reads from it sees its end and closes it."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(pipe.fileno())) as again:
        again.shutdown(socket.SHUT_RDWR)


class RemoteEngine:
    """One run of an engine on another machine, with the methods of `EngineProcess`."""

    is_remote = True

    def __init__(self, config: Config, index: int, rendezvous: Rendezvous):
        self.config, self.index, self._rendezvous = config, index, rendezvous
        self.address: str | None = None
        self._pipe: Connection | None = None
        self._located, self._ended, self._leaving = threading.Event(), threading.Event(), threading.Event()

    def start(self) -> None:
        """Begin to wait for the engine to join."""
        self._rendezvous.expect(self)

    def successor(self) -> RemoteEngine:
        return RemoteEngine(self.config, self.index, self._rendezvous)

    def on_joined(self, pipe: Connection, address: str) -> None:
        """Take the connection. Called once, by its thread, which then calls `follow`."""
        self._pipe, self.address = pipe, address
        self._located.set()

    def follow(self) -> None:
        """Read from the connection until it ends."""
        with contextlib.suppress(OSError, EOFError):
            while True:
                if self._pipe.recv_bytes(_MAX_MESSAGE) == LEAVING:
                    self._leaving.set()
        self._set_ended()
        self._pipe.close()

    def _set_ended(self) -> None:
        self._ended.set()
        self._leaving.set()

    def wait_for_drain(self) -> bool:
        """Block until the other machine drains the engine; False if the engine has ended. Call it in a thread."""
        self._leaving.wait()
        return not self._ended.is_set()

    def ask_to_end(self) -> None:
        """Ask the other machine to end the engine, which has no requests. Idempotent."""
        with contextlib.suppress(OSError, ValueError):
            self._pipe.send_bytes(END)

    def locate(self) -> str | None:
        """Block until the engine has joined; returns its address, None after `kill`. Call it in a thread."""
        self._located.wait()
        return self.address

    def wait(self) -> int:
        """Block until the connection ends. Call it in a thread."""
        self._ended.wait()
        return 0

    def describe_end(self, code: int) -> str:
        return "its machine is gone, or ended it"

    def terminate(self, timeout: float) -> int:
        """Ask the other machine to end the engine, and end the connection after `timeout` seconds. Idempotent."""
        if self._pipe is not None:
            self.ask_to_end()
            self._ended.wait(timeout)
        self.kill()
        return 0

    def dump_stacks(self) -> None:
        """Do nothing: stacks of the other machine are not available."""

    def stacks(self) -> dict[str, str]:
        return {}

    def kill(self) -> None:
        """End the connection; the other machine then kills the engine. Idempotent."""
        self._rendezvous.forget(self)
        if self._pipe is not None and not self._ended.is_set():
            wake_and_close(self._pipe)
        self._located.set()
        if self._pipe is None:
            self._set_ended()


class Rendezvous:
    """Listens for the engines that run on other machines."""

    def __init__(self, config: Config):
        """Listen for engines. Raises ValueError for a port in use."""
        self._config, self._parallel, self._model = config, config.parallel, identity_of(config)
        self._waiting: dict[int, RemoteEngine] = {}
        self._mutex, self._closed, self._arrivals = threading.Lock(), False, Arrivals("remote-engine")
        self._listener = self._listen()
        threading.Thread(target=self._accept, name="remote-engines", daemon=True).start()

    def expect(self, engine: RemoteEngine) -> None:
        with self._mutex:
            self._waiting[engine.index] = engine

    def forget(self, engine: RemoteEngine) -> None:
        with self._mutex:
            if self._waiting.get(engine.index) is engine:
                del self._waiting[engine.index]

    def close(self) -> None:
        """Take no engine from now on. Idempotent."""
        self._closed = True

    def _listen(self) -> socket.socket:
        address, port = self._parallel.rendezvous
        listener = bind(address, port, f"--data-parallel-address {address}, --data-parallel-rpc-port {port}")
        listener.listen()
        listener.settimeout(ACCEPT_TIMEOUT)
        return listener

    def _accept(self) -> None:
        reminded = time.monotonic() - REMIND + 2  # engines that start together with the server are not missing
        with self._listener:
            while not self._closed:
                if time.monotonic() - reminded >= REMIND and self._waiting:
                    reminded = time.monotonic()
                    numbers = ", ".join(map(str, sorted(self._waiting)))
                    logger.info("waiting for engine %s at %s:%d", numbers, *self._parallel.rendezvous)
                try:
                    joined, (peer, _) = self._listener.accept()
                except TimeoutError:
                    continue
                except OSError as error:  # no descriptors, for example
                    logger.warning("no engine can join: %s", error)
                    time.sleep(ACCEPT_TIMEOUT)
                    continue
                self._arrivals.start(self._admit, joined, peer)

    def _admit(self, joined: socket.socket, peer: str) -> None:
        """Serve a connection from `peer`: accept a missing engine, and follow it. Close any other connection, with the
        reason if an engine sent it.
        """
        pipe = engine = None
        try:
            with joined:
                pipe = watchful(joined)
            limit_wait(pipe, HELLO_TIMEOUT)
            hello = msgspec.msgpack.decode(pipe.recv_bytes(_MAX_MESSAGE), type=Join)
            refusal = self._refusal(hello)
            if not refusal:
                engine = self._take(hello.engine)
            config = b"" if refusal else encode_config(self._config)
            pipe.send_bytes(msgspec.msgpack.encode(Joined(refusal, config)))
            if refusal:
                raise ConnectionError(f"engine {hello.engine}: {refusal}")
            located = msgspec.msgpack.decode(pipe.recv_bytes(_MAX_MESSAGE), type=Located)
            limit_wait(pipe, 0)
        except (OSError, EOFError, msgspec.DecodeError) as error:
            logger.warning("a connection from %s does not join: %s", peer, error)
            if pipe is not None:
                pipe.close()
            if engine is not None:
                self.expect(engine)
            return
        finally:
            self._arrivals.identified()
        logger.info("engine %d has joined from %s", engine.index, peer)
        engine.on_joined(pipe, f"tcp://{peer}:{located.port}")
        engine.follow()

    def _take(self, index: int) -> RemoteEngine:
        with self._mutex:
            if (engine := self._waiting.pop(index, None)) is None:
                raise ConnectionError(f"engine {index} has joined already")  # the other machine tries again
            return engine

    def _refusal(self, hello: Join) -> str:
        if hello.version != own_version():
            return f"this machine has quire {hello.version}; the one that serves has {own_version()}"
        if hello.model != self._model:
            return "config.json or the weights of the model on this machine are not those of the one that serves"
        flags = ("--data-parallel-size", "--tensor-parallel-size", "--pipeline-parallel-size")
        sizes = hello.sizes, sizes_of(self._parallel)
        if why := different_sizes(flags, *sizes, "this machine", "the one that serves"):
            return why
        if hello.engine in self._parallel.local_engines:
            return f"engine {hello.engine} runs on the machine that serves (--data-parallel-start-rank)"
        return "" if hello.engine < self._parallel.data_parallel_size else "there is no such engine"
