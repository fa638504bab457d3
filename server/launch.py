"""`quire serve`: the composition root. Opens the port, starts the engine, loads the tokenizer, serves, and ends in
order.

The port and the engine come first, before the imports that take time: clients see `/live` while everything else is
still on its way.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import os
import signal
import socket
import stat
import time
from collections.abc import Mapping
from typing import Any

from quire.configs.config import Config, ServerConfig
from quire.configs.files import check_model_folder
from quire.configs.sources import embedded_model
from quire.engine.messages import EngineStats, Ready
from quire.server.engines.process import EngineProcess
from quire.server.engines.supervisor import EngineFailed, Supervisor, in_thread
from quire.server.frontends.frontend import Frontend, configure_logging
from quire.server.startup import address_file, hub
from quire.server.startup.descriptors import BACKLOG, raise_descriptor_limit

logger = logging.getLogger("quire")

TERMINATE_TIMEOUT = 5.0  # seconds for the engine to end


def serve(config: Config, sources: Mapping[str, str] | None = None) -> int:
    """Serve until a signal ends it; returns the exit code.

    `sources` says where each setting that is no default came from.
    """
    started = time.monotonic() - _seconds_since_exec()
    configure_logging(config.server.log_level)
    raise_descriptor_limit()
    try:
        listener = bind(config.server)
    except OSError as error:
        logger.error(
            "cannot listen on %s: %s",
            config.server.uds or f"{config.server.host}:{config.server.port}",
            error.strerror or error,
        )
        return 1
    if config.server.address_file:
        _announce_address(config.server.address_file, listener)
    if sources:
        logger.info("settings: %s", ", ".join(f"{name} ({source})" for name, source in sources.items()))
    try:
        return asyncio.run(_run(config, listener, started))
    except ValueError as error:
        logger.error("%s", error)
        return 1
    finally:
        listener.close()
        if config.server.address_file:
            address_file.remove_address(config.server.address_file)
        if config.server.uds:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(config.server.uds)


def _announce_address(path: str, listener: socket.socket) -> None:
    """The server is of use without the file, so that it cannot be written is no reason to end."""
    try:
        address_file.write_address(path, listener)
    except OSError as error:
        logger.warning(
            "--address-file: cannot write %s: %s; `quire health` will not find this server",
            path,
            error.strerror or error,
        )


async def _run(config: Config, listener: socket.socket, started: float) -> int:
    launcher = Launcher(config, listener, started)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, launcher.on_signal, number)
    code = await launcher.run()
    if launcher.folder is None:  # a download goes on in threads that cannot be stopped, and that Python would wait for
        logging.shutdown()
        os._exit(code)
    return code


def bind(config: ServerConfig) -> socket.socket:
    """A listening socket; from here on connections wait instead of being refused. Raises OSError."""
    if config.uds:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        _remove_stale_socket(config.uds)
        listener.bind(config.uds)
    else:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener


def _remove_stale_socket(path: str) -> None:
    """What a server that was killed left behind. A living one keeps its socket, and bind fails."""
    if not os.path.exists(path) or not stat.S_ISSOCK(os.stat(path).st_mode):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        if probe.connect_ex(path) != 0:
            os.unlink(path)


class Launcher:
    """One life of the server process: starts the engines and watches over them.

    `front` is what clients talk to, in this process or in several others.
    """

    def __init__(self, config: Config, listener: socket.socket, started: float):
        """Raises ValueError when `config` names no model or a folder that holds none, OSError when the port cannot be
        shared.
        """
        self.config, self.listener, self.started = config, listener, started
        self.engines: list[EngineProcess] = []
        self.supervisors: list[Supervisor] = []
        self.stats_logs: list[Any] = []  # one per engine, once clients are served
        self.announced = False
        self.stop = asyncio.Event()
        self.folder = hub.local_folder(config.model.model)
        if self.folder is not None:
            self._start_engines()
        self.front = self._make_front()

    def _start_engines(self) -> None:
        """Raises ValueError for a folder that holds no model, and when the system has no room for a process."""
        check_model_folder(self.folder)
        config = dataclasses.replace(self.config, model=dataclasses.replace(self.config.model, model=self.folder))
        for index in range(config.parallel.data_parallel_size):
            engine = EngineProcess(config, index)
            try:
                engine.start()
            except OSError as error:
                engine.kill()
                raise ValueError(f"the engine cannot be started: {error.strerror}") from error
            self.engines.append(engine)

    def _make_front(self) -> Any:
        if self.config.server.api_server_count == 1:
            return Frontend(self.config, self.listener, self._on_open)
        from quire.server.frontends.parent import Fleet

        return Fleet(self.config, self.listener, self._on_open)

    async def run(self) -> int:
        """Serve until stopped; the exit code."""
        serving = asyncio.create_task(self.front.serve())
        living = asyncio.create_task(self._live())
        stopping = asyncio.create_task(self.stop.wait())
        await asyncio.wait({serving, living, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if stopping.done():
            code = await self._drain()
        else:
            code = await self._fail((living if living.done() else serving).exception())
        living.cancel()
        stopping.cancel()
        await asyncio.gather(living, stopping, return_exceptions=True)
        await asyncio.gather(
            *(in_thread(functools.partial(engine.terminate, TERMINATE_TIMEOUT)) for engine in self._current_engines())
        )
        await self.front.end()
        await asyncio.gather(serving, return_exceptions=True)
        return code

    # ---- start

    async def _live(self) -> None:
        """From the first phase on to the watch over the ready engine.

        Ends only by raising: ValueError, EngineFailed.
        """
        from quire.server.startup.progress import StartProgress

        self.shown = StartProgress()
        try:
            async with asyncio.TaskGroup() as tasks:
                if self.folder is None:
                    self._progress("resolving model", 0.0)
                    self.folder = await self._resolve(self.config.model.model)
                    self._start_engines()
                clients = self.front.connect(self._on_stats, self._on_progress)
                self.supervisors = [
                    Supervisor(
                        engine.config,
                        engine,
                        client,
                        self._on_ready,
                        functools.partial(self.front.on_death, engine.index),
                    )
                    for engine, client in zip(self.engines, clients, strict=True)
                ]
                for supervisor in self.supervisors:
                    tasks.create_task(supervisor.run())
                tasks.create_task(self._load_tokenizer())
        except ExceptionGroup as errors:  # one error: the other tasks were cancelled for it
            raise errors.exceptions[0] from None
        finally:
            self.shown.close()

    async def _resolve(self, model: str, tokenizer_only: bool = False) -> str:
        loop, options = asyncio.get_running_loop(), self.config.model

        def progress(phase: str, fraction: float) -> None:
            loop.call_soon_threadsafe(self._progress, phase, fraction)

        return await in_thread(
            lambda: hub.resolve(
                model,
                revision=None if tokenizer_only else options.revision,
                download_dir=options.download_dir,
                tokenizer_only=tokenizer_only,
                progress=progress,
            )
        )

    async def _load_tokenizer(self) -> None:
        options = self.config.model
        folder = (
            self.folder if options.tokenizer is None else await self._resolve(options.tokenizer, tokenizer_only=True)
        )
        await self.front.load_tokenizer(self.folder, folder)

    def _on_progress(self, engine: int, progress: Any) -> None:
        if engine == 0:  # one bar is enough: the others do the same
            self._progress(progress.phase, progress.fraction)

    def _progress(self, phase: str, fraction: float) -> None:
        self.front.progress(phase, fraction)
        self.shown.update(phase, fraction)

    def _on_ready(self, again: bool) -> None:
        """An engine is up, for the first time or again."""
        self.front.open()
        if again:
            logger.info("the engine is ready again")

    def _on_open(self, ready: Ready) -> None:
        """Clients are served from now on."""
        from quire.server.startup.plan_table import plan_table

        self.shown.close()
        logger.info("%s", plan_table(ready.worker))
        self._start_logging(ready.worker.plan.device)
        self._announce()

    def _start_logging(self, device: str) -> None:
        """The throughput lines of each engine."""
        from quire.server.metrics.stats_log import StatsLog

        self.stats_logs = [
            StatsLog(self.config.server.log_stats_interval, device, engine.index) for engine in self.engines
        ]
        self.logging = [asyncio.create_task(log.run()) for log in self.stats_logs]

    def _announce(self) -> None:
        self.announced = True
        where = self.config.server.uds or "http://{}:{}".format(*self.listener.getsockname()[:2])
        curl, base = ("curl --unix-socket " + where, "http://localhost") if self.config.server.uds else ("curl", where)
        logger.info(
            "ready in %.1f s: %s serves %s (API at %s/v1, documentation at %s/docs)",
            time.monotonic() - self.started,
            where,
            ", ".join(self.config.server.served_model_name or [self.config.model.model]),
            base,
            base,
        )
        key = " -H 'Authorization: Bearer KEY'" if self.config.server.api_key else ""
        logger.info(
            """try: %s %s/v1/chat/completions -H 'Content-Type: application/json'%s -d '{"messages": [{"role": "user", "content": "Hello!"}]}'""",
            curl,
            base,
            key,
        )
        if self.folder == embedded_model():
            logger.info(

                    "this is the small model that comes with quire, for trying things out; serve another with: quire "
                    "serve Qwen/Qwen3-0.6B (a Hub id or a folder)"

            )

    # ---- life

    def _on_stats(self, engine: int, stats: EngineStats) -> None:
        self.front.observe_stats(engine, stats)
        if self.stats_logs:
            self.stats_logs[engine].observe(stats)

    # ---- end

    def _current_engines(self) -> list[EngineProcess]:
        return [supervisor.engine for supervisor in self.supervisors] or self.engines

    def on_signal(self, number: int) -> None:
        """The first ends the server in order, the second at once."""
        name = signal.Signals(number).name
        if self.stop.is_set():
            logger.warning("%s again: ending at once", name)
            for engine in self._current_engines():
                engine.kill()
            self.front.kill()
            logging.shutdown()
            os._exit(128 + number)
        self.front.refuse()
        self.stop.set()
        logger.info(
            "%s: no new requests; %d in flight get %g s to finish (once more ends at once)",
            name,
            self.front.num_in_flight,
            self.config.server.shutdown_timeout,
        )

    async def _drain(self) -> int:
        await self.front.drain()
        logger.info("ended")
        return 0

    async def _fail(self, error: BaseException | None) -> int:
        """The engine cannot be kept alive, or the model not be had."""
        reason = str(error) or type(error).__name__
        logger.error(
            "cannot %s: %s",
            "go on" if self.announced else "start",
            reason,
            exc_info=None if isinstance(error, (ValueError, EngineFailed)) else error,
        )
        await self.front.fail(reason)
        return 1


def _seconds_since_exec() -> float:
    """How long this process has existed: Python's own start counts, too. 0 where the system does not say."""
    try:
        with open("/proc/self/stat", encoding="ascii") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        return max(time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"), 0.0)
    except (OSError, ValueError, AttributeError):
        return 0.0
