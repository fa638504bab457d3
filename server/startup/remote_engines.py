"""`--headless` with `--data-parallel-size`: this machine's engines, for a server on another machine."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection, wait

import msgspec

from quire.configs import platforms
from quire.configs.config import Config
from quire.configs.sockets import watchful
from quire.server.engines.process import EngineProcess
from quire.server.engines.remote import END, LEAVING, REMIND, Join, Joined, Located, identity_of, own_version, sizes_of
from quire.server.startup.engine_group import SAVE_TIMEOUT, TERMINATE_TIMEOUT

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT = 2.0  # seconds for an attempt to reach the machine that serves
PAUSE = 1.0  # seconds between attempts, and before an engine that ended is started again
END_TIMEOUT = TERMINATE_TIMEOUT + SAVE_TIMEOUT + CONNECT_TIMEOUT
_OF_THIS_MACHINE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)


class RemoteEngines:
    """The engines of this machine, one thread each: the kernel kills an engine whose thread ends."""

    def __init__(self, config: Config):
        """Prepare the engines; `config` has the local folder of the model."""
        self._config, self._parallel = config, config.parallel
        self._stopped = threading.Event()
        self._stop, self._stop_writer = os.pipe()
        self._at_once, self._at_once_writer = os.pipe()
        self._was_refused = False
        self._model = identity_of(config)

    def run(self) -> int:
        """Run the engines until a signal, or a refusal of the machine that serves; returns the exit code."""
        signal.signal(signal.SIGTERM, lambda *_: self.end())
        signal.signal(signal.SIGINT, lambda *_: self.end(at_once=True))
        numbers, (address, port) = self._parallel.local_engines, self._parallel.rendezvous
        logger.info("engines %s: joining %s:%d", ", ".join(map(str, numbers)), address, port)
        threads = [threading.Thread(target=self._keep, args=(index,), daemon=True) for index in numbers]
        for thread in threads:
            thread.start()
        self._stopped.wait()
        for thread in threads:
            thread.join(self._config.server.shutdown_timeout + END_TIMEOUT)
        return int(self._was_refused)

    def end(self, at_once: bool = False) -> None:
        """End all engines, immediately at the second call or if `at_once`; signal handlers may call it. Otherwise the
        server, which may also be ending, has --shutdown-timeout for running requests.
        """
        if at_once or self._stopped.is_set():
            os.write(self._at_once_writer, b"x")
        if not self._stopped.is_set():
            self._stopped.set()
            os.write(self._stop_writer, b"x")

    def _keep(self, index: int) -> None:
        """Run engine `index` for the server, restarting it after each end."""
        seldom = Seldom()
        while not self._stopped.is_set():
            try:
                self._serve(index)
                seldom = Seldom()
            except ServerGone as error:
                seldom.log(logging.INFO, f"engine {index}: {self._server} is not there ({error}); trying again")
            except msgspec.DecodeError as error:
                self._give_up(f"{self._server} does not answer engine {index} as a quire server: {error}")
            except ValueError as error:
                self._give_up(f"the machine that serves refuses engine {index}: {error}")
            except OSError as error:
                seldom.log(logging.ERROR, f"engine {index} cannot run on this machine: {error}; trying again")
            self._stopped.wait(PAUSE)

    def _give_up(self, why: str) -> None:
        logger.error("%s", why)
        self._was_refused = True
        self.end()

    @property
    def _server(self) -> str:
        address, port = self._parallel.rendezvous
        return f"{address}:{port}"

    def _serve(self, index: int) -> None:
        """Join and run the engine until it or the connection ends. Raises ValueError for a refusal, DecodeError for an
        answer of another program, ServerGone for a lost connection, OSError if this machine cannot run the engine.
        """
        pipe, own, found = self._join(index)
        with pipe:
            config = self._own_settings(found)
            port = free_port(own)
            slot = index - self._parallel.local_engines.start
            engine = EngineProcess(config, index, address=f"tcp://{own}:{port}", slot=slot)
            try:
                engine.start()
                with _server_gone():
                    pipe.send_bytes(msgspec.msgpack.encode(Located(port)))
                self._watch(engine, pipe)
            finally:
                engine.kill()

    def _join(self, index: int) -> tuple[Connection, str, Config]:
        """Return the connection, this machine's address, and the settings of the server. Raises as `_serve`."""
        with _server_gone(), socket.create_connection(self._parallel.rendezvous, CONNECT_TIMEOUT) as connected:
            own = connected.getsockname()[0]
            pipe = watchful(connected)
        hello = Join(index, sizes_of(self._parallel), own_version(), self._model)
        try:
            with _server_gone():
                pipe.send_bytes(msgspec.msgpack.encode(hello))
                answer = pipe.recv_bytes()
            joined = msgspec.msgpack.decode(answer, type=Joined)
            if joined.refusal:
                raise ValueError(joined.refusal)
            return pipe, own, msgspec.msgpack.decode(joined.config, type=Config)
        except BaseException:
            pipe.close()
            raise

    def _watch(self, engine: EngineProcess, pipe: Connection) -> None:
        """Return when the engine has ended, by itself or because the server or a signal says so."""
        ended = platforms.open_process(engine.pid)
        try:
            found = wait([ended, pipe, self._stop])
            if self._stop in found:
                with contextlib.suppress(OSError):  # the server is gone
                    pipe.send_bytes(LEAVING)
                wait([ended, pipe, self._at_once], self._config.server.shutdown_timeout)
        finally:
            os.close(ended)
        finish = functools.partial(engine.terminate, TERMINATE_TIMEOUT + SAVE_TIMEOUT)
        if self._stop in found:
            finish()
        elif ended in found:
            logger.error("engine %d ended (%s); starting it again", engine.index, engine.describe_end(engine.wait()))
        else:
            with _server_gone():
                message = pipe.recv_bytes()
            if message == END:
                finish()

    def _own_settings(self, found: Config) -> Config:
        """Return the settings of the server, with the folders, addresses, device and log of this machine."""
        own, drafts = self._config, self._config.scheduler.speculative_config
        scheduler = found.scheduler if drafts is None else replace(found.scheduler, speculative_config=drafts)
        cache = found.cache.with_places_of(own.cache)
        if found.cache.kv_disk and not cache.kv_disk:
            logger.warning("--kv-disk: the server has a folder; this machine has none, and keeps no blocks on disk")
        return replace(
            found,
            model=replace(found.model, model=own.model.model),
            cache=cache,
            scheduler=scheduler,
            parallel=own.parallel.on_this_machine(),
            device=own.device,
            server=own.server,
        )


class ServerGone(Exception):
    """The server is not there yet, or has ended."""


@contextlib.contextmanager
def _server_gone() -> Iterator[None]:
    """Raise ServerGone for the errors of a connection."""
    try:
        yield
    except (OSError, EOFError) as error:
        if getattr(error, "errno", None) in _OF_THIS_MACHINE:
            raise
        raise ServerGone(str(error) or "the connection ended") from error


class Seldom:
    """Logs the first of a series of equal failures, then one every REMIND seconds."""

    def __init__(self) -> None:
        self._logged: dict[str, float] = {}

    def log(self, level: int, text: str) -> None:
        now = time.monotonic()
        if now - self._logged.get(text, -REMIND) >= REMIND:
            self._logged[text] = now
            logger.log(level, "%s", text)


def free_port(address: str) -> int:
    """Return a port of `address` that is unused."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]
