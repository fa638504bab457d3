"""`quire serve`: the composition root. Opens the port, starts the engine, loads the tokenizer, serves, and ends in order.

The port and the engine come first, before the imports that take time: clients see `/live` while everything else is still on its way.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import importlib
import logging
import os
import signal
import socket
import stat
import sys
import time
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from configs.config import Config, ServerConfig
from configs.sources import embedded_model
from engine.messages import EngineStats
from server import hub
from server.door import Door
from server.engine_process import EngineProcess
from server.middleware import Edge
from server.state import ServerState
from server.supervisor import EngineFailed, Supervisor, in_thread

logger = logging.getLogger("quire")

TERMINATE_TIMEOUT = 5.0  # seconds for the engine to end
END_TIMEOUT = 2.0  # seconds for the last error events to reach their clients
BACKLOG = 2048


def serve(config: Config, sources: Mapping[str, str] | None = None) -> int:
    """Serve until a signal ends it; returns the exit code. `sources` says where each setting that is no default came from."""
    started = time.monotonic() - _seconds_since_exec()
    _configure_logging(config.server.log_level)
    try:
        listener = bind(config.server)
    except OSError as error:
        logger.error("cannot listen on %s: %s", config.server.uds or f"{config.server.host}:{config.server.port}", error.strerror or error)
        return 1
    if sources:
        logger.info("settings: %s", ", ".join(f"{name} ({source})" for name, source in sources.items()))
    try:
        return asyncio.run(_run(config, listener, started))
    except ValueError as error:
        logger.error("%s", error)
        return 1
    finally:
        listener.close()
        if config.server.uds:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(config.server.uds)


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
        family, kind, protocol, _, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
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
    """One life of the server process."""

    def __init__(self, config: Config, listener: socket.socket, started: float):
        """Raises ValueError when `config` names no model."""
        self.config, self.listener, self.started = config, listener, started
        self.engines: list[EngineProcess] = []
        self.supervisors: list[Supervisor] = []
        self.folder = hub.local_folder(config.model.model)
        if self.folder is not None:
            self._start_engines()
        version = _version()
        self.state = ServerState(config, list(config.server.served_model_name) or [config.model.model], version, _fingerprint(config, version))
        self.door = Door(self.state)
        self.stop = asyncio.Event()

    def _start_engines(self) -> None:
        config = dataclasses.replace(self.config, model=dataclasses.replace(self.config.model, model=self.folder))
        self.engines = [EngineProcess(config, index) for index in range(config.parallel.data_parallel_size)]
        for engine in self.engines:
            engine.start()

    async def run(self) -> int:
        """Serve until stopped; the exit code."""
        http = _http_server(Edge(self.door, self.state))
        serving = asyncio.create_task(http.serve(sockets=[self.listener]))
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
        await asyncio.gather(*(in_thread(functools.partial(engine.terminate, TERMINATE_TIMEOUT)) for engine in self._current_engines()))
        http.should_exit = True
        await asyncio.gather(serving, return_exceptions=True)
        return code

    # ---- start

    async def _live(self) -> None:
        """From the first phase on to the watch over the ready engine. Ends only by raising: ValueError, EngineFailed."""
        from server.engine_client import EngineClient
        from server.engine_pool import EnginePool
        from server.progress import StartProgress

        self.shown = StartProgress()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._load_routes())
                if self.folder is None:
                    self._progress("resolving model", 0.0)
                    self.folder = await self._resolve(self.config.model.model)
                    self._start_engines()
                self.engine_stats = [EngineStats() for _ in self.engines]
                clients = [EngineClient(functools.partial(self._on_stats, engine.index), functools.partial(self._on_progress, engine.index), engine.index)
                           for engine in self.engines]
                self.state.client = EnginePool(clients) if len(clients) > 1 else clients[0]
                self.supervisors = [Supervisor(engine.config, engine, client, self._open, functools.partial(self._on_death, engine.index))
                                    for engine, client in zip(self.engines, clients)]
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

        return await in_thread(lambda: hub.resolve(model, revision=None if tokenizer_only else options.revision, download_dir=options.download_dir,
                                                   tokenizer_only=tokenizer_only, progress=progress))

    async def _load_routes(self) -> None:
        create_app = await in_thread(lambda: importlib.import_module("server.app").create_app)
        self.door.app = create_app(self.state)
        self._open()

    async def _load_tokenizer(self) -> None:
        from server.sampling import read_sampling_defaults

        options = self.config.model
        folder = self.folder if options.tokenizer is None else await self._resolve(options.tokenizer, tokenizer_only=True)
        self.sampling_defaults = read_sampling_defaults(self.config, self.folder)
        self.state.tokenizer = await in_thread(lambda: _tokenizer(folder, self.config))
        self._open()

    def _on_progress(self, engine: int, progress: Any) -> None:
        if engine == 0:  # one bar is enough: the others do the same
            self._progress(progress.phase, progress.fraction)

    def _progress(self, phase: str, fraction: float) -> None:
        self.state.progress(phase, fraction)
        self.shown.update(phase, fraction)

    def _open(self) -> None:
        """Called when the routes and the tokenizer are there, and whenever an engine is: the last of them opens the door."""
        if self.state.client is None or self.state.client.ready is None:
            return
        if self.state.tokenizer is None or self.door.app is None:
            self._progress("loading tokenizer", 0.0)
            return
        from server.plan_table import plan_table
        from server.state import ModelInfo

        state, ready = self.state, self.state.client.ready
        worker, restarted = ready.worker, state.model is not None
        self.shown.close()
        state.model = ModelInfo(worker.max_model_len, worker.vocab_size, state.tokenizer.eos_token_ids, self.sampling_defaults,
                                self.config.server.max_logprobs, self.config.scheduler.scheduling_policy == "priority")
        if state.metrics is None:
            self._start_recording(worker)
        state.ready = ready
        if restarted:
            logger.info("the engine is ready again")
        else:
            logger.info("%s", plan_table(worker))
            self._announce()

    def _start_recording(self, worker: Any) -> None:
        """Metrics and log lines, for each engine."""
        from server.metrics import Metrics
        from server.metrics_pool import MetricsPool
        from server.stats_log import StatsLog

        options, numbers = self.config.server, range(len(self.engines))
        every = [Metrics(self.state.names[0], worker.max_model_len, options.vllm_metrics, number) for number in numbers]
        for metrics in every:
            metrics.set_cache_config(**{**dataclasses.asdict(self.config.cache), "block_size": worker.block_size, "num_gpu_blocks": worker.num_blocks})
        self.state.metrics = MetricsPool(every) if len(every) > 1 else every[0]
        self.stats_logs = [StatsLog(options.log_stats_interval, worker.plan.device, number) for number in numbers]
        self.logging = [asyncio.create_task(log.run()) for log in self.stats_logs]

    def _announce(self) -> None:
        where = self.config.server.uds or "http://{}:{}".format(*self.listener.getsockname()[:2])
        curl, base = ("curl --unix-socket " + where, "http://localhost") if self.config.server.uds else ("curl", where)
        logger.info("ready in %.1f s: %s serves %s (API at %s/v1, documentation at %s/docs)", time.monotonic() - self.started, where, ", ".join(self.state.names), base, base)
        key = " -H 'Authorization: Bearer KEY'" if self.config.server.api_key else ""
        logger.info("""try: %s %s/v1/chat/completions -H 'Content-Type: application/json'%s -d '{"messages": [{"role": "user", "content": "Hello!"}]}'""",
                    curl, base, key)
        if self.folder == embedded_model():
            logger.info("this is the small model that comes with quire, for trying things out; serve another with: quire serve Qwen/Qwen3-0.6B (a Hub id or a folder)")

    def _on_stats(self, engine: int, stats: EngineStats) -> None:
        self.engine_stats[engine] = stats
        every = self.engine_stats
        self.state.stats = EngineStats(sum(one.num_running for one in every), sum(one.num_waiting for one in every), sum(one.kv_cache_usage for one in every) / len(every))
        if self.state.metrics is not None:
            self.state.metrics.of(engine).observe_stats(stats)
            self.stats_logs[engine].observe(stats)

    def _on_death(self, engine: int) -> None:
        if len(self.engines) > 1:
            self.state.client.forget(engine)
        self.state.ready = self.state.client.ready  # another engine may be up
        if self.state.ready is None:
            self._progress("restarting the engine", 0.0)

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
            os._exit(128 + number)
        self.state.draining = True
        self.stop.set()
        logger.info("%s: no new requests; %d in flight get %g s to finish (once more ends at once)", name, self.state.num_in_flight,
                    self.config.server.shutdown_timeout)

    async def _drain(self) -> int:
        """Let what runs finish, end the rest with an error."""
        try:
            await asyncio.wait_for(self.state.idle.wait(), self.config.server.shutdown_timeout)
        except TimeoutError:
            logger.warning("%d requests did not finish in time and are ended", self.state.num_in_flight)
        await self._end_requests()
        logger.info("ended")
        return 0

    async def _fail(self, error: BaseException | None) -> int:
        """The engine cannot be kept alive, or the model not be had."""
        reason = str(error) or type(error).__name__
        logger.error("cannot %s: %s", "go on" if self.state.model else "start", reason, exc_info=None if isinstance(error, (ValueError, EngineFailed)) else error)
        self.state.failure = reason
        await self._end_requests()
        return 1

    async def _end_requests(self) -> None:
        if self.state.client is not None:
            await self.state.client.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.state.idle.wait(), END_TIMEOUT)


def _http_server(app: Any) -> Any:
    import uvicorn

    class Server(uvicorn.Server):
        def capture_signals(self) -> contextlib.AbstractContextManager[None]:
            return contextlib.nullcontext()  # the Launcher says when to end

    return Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", server_header=False, backlog=BACKLOG,
                                 timeout_keep_alive=30, timeout_graceful_shutdown=int(END_TIMEOUT)))


def _tokenizer(folder: str, config: Config) -> Any:
    from server.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(folder, chat_template=config.server.chat_template, trust_remote_code=config.model.trust_remote_code)
    _ = tokenizer.max_token_chars  # computed once; not during the first request
    return tokenizer


def _version() -> str:
    try:
        return metadata.version("quire")
    except metadata.PackageNotFoundError:
        return "0+source"


def _fingerprint(config: Config, version: str) -> str:
    """Equal among servers whose answers may be compared: the same version, model, precision and placement."""
    parts = repr((config.model, config.parallel, config.device, config.cache.enable_prefix_caching))
    return f"quire-{version}-{hashlib.sha256(parts.encode()).hexdigest()[:8]}"


def _configure_logging(level: str) -> None:
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s server: %(message)s", stream=sys.stderr)
    for noisy in ("uvicorn", "uvicorn.error", "httpx", "httpx2", "filelock"):
        logging.getLogger(noisy).setLevel("WARNING")


def _seconds_since_exec() -> float:
    """How long this process has existed: Python's own start counts, too. 0 where the system does not say."""
    try:
        with open("/proc/self/stat", encoding="ascii") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        return max(time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"), 0.0)
    except (OSError, ValueError, AttributeError):
        return 0.0
