"""`--headless` with `--data-parallel-size`: this machine's engines, for the server of another machine."""

from __future__ import annotations

import functools
import logging
import os
import signal
import socket
import threading
from dataclasses import replace
from multiprocessing.connection import Connection, wait

import msgspec

from quire.configs.config import Config
from quire.configs.sockets import watchful
from quire.server.engines.process import EngineProcess
from quire.server.engines.remote import END, Join, Joined, Located, own_version, sizes_of
from quire.server.startup.engine_group import SAVE_TIMEOUT, TERMINATE_TIMEOUT

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT = 2.0  # seconds for an attempt to reach the machine that serves
PAUSE = 1.0  # seconds between attempts, and before an engine that ended is started again
END_TIMEOUT = TERMINATE_TIMEOUT + SAVE_TIMEOUT + CONNECT_TIMEOUT


class RemoteEngines:
    """The engines of this machine, one thread each: the kernel kills an engine whose thread ends."""

    def __init__(self, config: Config):
        """`config` has the local folder of the model."""
        self._config, self._parallel = config, config.parallel
        self._stopped = threading.Event()
        self._stop, self._stop_writer = os.pipe()
        self._was_refused = False

    def run(self) -> int:
        """Run the engines until a signal, or a refusal of the machine that serves; returns the exit code."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: self.end())
        numbers, (address, port) = self._parallel.local_engines, self._parallel.rendezvous
        logger.info("engines %s: joining %s:%d", ", ".join(map(str, numbers)), address, port)
        threads = [threading.Thread(target=self._keep, args=(index,), daemon=True) for index in numbers]
        for thread in threads:
            thread.start()
        self._stopped.wait()
        for thread in threads:
            thread.join(END_TIMEOUT)
        return int(self._was_refused)

    def end(self) -> None:
        """End all engines. Idempotent; signal handlers may call it."""
        if not self._stopped.is_set():
            self._stopped.set()
            os.write(self._stop_writer, b"x")

    def _keep(self, index: int) -> None:
        """Run engine `index` for the server again and again."""
        while not self._stopped.is_set():
            try:
                self._serve(index)
            except ValueError as error:
                logger.error("the machine that serves refuses engine %d: %s", index, error)
                self._was_refused = True
                self.end()
            except (OSError, EOFError):
                pass  # the server is not there yet, or has ended
            self._stopped.wait(PAUSE)

    def _serve(self, index: int) -> None:
        """Join and run the engine until it or the connection ends. Raises ValueError for a refusal, OSError, EOFError
        for a lost connection.
        """
        with socket.create_connection(self._parallel.rendezvous, CONNECT_TIMEOUT) as connected:
            own = connected.getsockname()[0]
            pipe = watchful(connected)
        with pipe:
            pipe.send_bytes(msgspec.msgpack.encode(Join(index, sizes_of(self._parallel), own_version())))
            joined = msgspec.msgpack.decode(pipe.recv_bytes(), type=Joined)
            if joined.refusal:
                raise ValueError(joined.refusal)
            config = self._own_settings(msgspec.msgpack.decode(joined.config, type=Config))
            port = free_port(own)
            slot = index - self._parallel.local_engines.start
            engine = EngineProcess(config, index, address=f"tcp://{own}:{port}", slot=slot)
            try:
                engine.start()
                pipe.send_bytes(msgspec.msgpack.encode(Located(port)))
                self._watch(engine, pipe)
            finally:
                engine.kill()

    def _watch(self, engine: EngineProcess, pipe: Connection) -> None:
        """Return when the engine has ended, by itself or because the server or a signal says so."""
        ended = os.pidfd_open(engine.pid)
        try:
            found = wait([ended, pipe, self._stop])
        finally:
            os.close(ended)
        finish = functools.partial(engine.terminate, TERMINATE_TIMEOUT + SAVE_TIMEOUT)
        if self._stop in found:
            finish()
        elif ended in found:
            logger.error("engine %d ended (%s); starting it again", engine.index, engine.describe_end(engine.wait()))
        elif pipe.recv_bytes() == END:  # raises EOFError if the server is gone
            finish()

    def _own_settings(self, found: Config) -> Config:
        """Return the settings of the server, with the model's folders, device and log of this machine."""
        own, drafts = self._config, self._config.scheduler.speculative_config
        scheduler = found.scheduler if drafts is None else replace(found.scheduler, speculative_config=drafts)
        return replace(
            found,
            model=replace(found.model, model=own.model.model),
            scheduler=scheduler,
            parallel=own.parallel.on_this_machine(),
            device=own.device,
            server=own.server,
        )


def free_port(address: str) -> int:
    """Return a port of `address` that is unused."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]
