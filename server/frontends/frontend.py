"""The HTTP side of the server: the start-up gate, the routes, the tokenizer and a client per engine.

It runs in the server process itself, or in each of several child processes (`parent.py`, `member.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import importlib
import logging
import socket
from collections.abc import Callable
from importlib import metadata
from typing import TYPE_CHECKING

from quire.configs.config import Config
from quire.configs.serving import ServerConfig
from quire.engine.messages import EngineStats, Progress, Ready
from quire.server.engines.silence import Silence
from quire.server.engines.supervisor import in_thread
from quire.server.frontends.descriptors import (
    ACCEPTS_PER_TURN,
    BACKLOG,
    complain_once_about_descriptors,
    max_connections,
)
from quire.server.http.middleware import RequestBoundary
from quire.server.http.startup_gate import StartupGate
from quire.server.model_info import context_length
from quire.server.startup.engine_group import load_tokenizer, model_info
from quire.server.startup.model_names import accepted_names, served_names, without_paths
from quire.server.state import ServerState

if TYPE_CHECKING:  # imported late, because these imports are slow
    import uvicorn
    from starlette.types import ASGIApp

    from quire.server.api.openai.responses.service import Responses
    from quire.server.batches.runner import Batches
    from quire.server.engines.client import EngineClient
    from quire.server.engines.pool import EnginePool
    from quire.server.http.transport.connections import Connections
    from quire.server.http.transport.tls import Tls
    from quire.server.request.sampling import SamplingDefaults

logger = logging.getLogger("quire")

END_TIMEOUT = 1.0  # seconds for clients to read the last error events before their connections are closed


class Frontend:
    """Serves HTTP after `serve` is called: at first only probes, and 503 to other requests.

    The gate opens once the routes, the tokenizer and an engine are loaded; `on_open` is called the first time.
    """

    def __init__(self, config: Config, listener: socket.socket, on_open: Callable[[Ready], None]):
        self.config, self.listener, self.on_open = config, listener, on_open
        version = _version()
        self.state = ServerState(
            config,
            served_names(config),
            version,
            _fingerprint(config, version),
            accepted_names(config),
        )
        self.gate = StartupGate(self.state)
        self.sampling_defaults: SamplingDefaults | None = None
        self.connections: Connections | None = None  # None until connections can be accepted
        self._http: uvicorn.Server | None = None
        self._tls = _tls(config.server)
        self._pool: EnginePool | None = None  # set if there are several engines
        self._silences: list[Silence] = []  # one per engine, after `connect`

    @property
    def num_in_flight(self) -> int:
        """HTTP requests being answered, except probes."""
        return self.state.num_in_flight

    @property
    def chats(self) -> bool:
        """Return whether the model has a chat template."""
        return bool(self.state.tokenizer and self.state.tokenizer.chat_templates)

    # ---- start

    async def serve(self) -> None:
        """Accept connections until `end`."""
        from quire.server.http.transport.connections import Connections, Limits

        self.connections = Connections(Limits(max_connections()))
        app = RequestBoundary(self.gate, self.state)
        self._http = _http_server(app, self.connections, self.config.server, self._tls)
        loading = asyncio.create_task(self._load_routes())
        serving = asyncio.create_task(self._http.serve(sockets=[self.listener]))
        others = [loading, asyncio.create_task(self._watch())]
        if self._tls is not None:
            others.append(asyncio.create_task(self._tls.watch()))
        try:
            routes = await loading
            ending = {serving}
            if self.state.batches is not None:
                others.append(asyncio.create_task(self.state.batches.serve(routes)))
                ending.add(others[-1])
            for task in (await asyncio.wait(ending, return_when=asyncio.FIRST_COMPLETED))[0]:
                task.result()
        finally:
            for task in others:
                task.cancel()
            self._http.should_exit = True
            await asyncio.gather(serving, *others, return_exceptions=True)
            if self.state.batches is not None:
                await self.state.batches.close()
            if self.state.responses is not None:
                await self.state.responses.close()
            for one in (self.state.keys, self.state.audit):
                if one is not None:
                    one.close()
            if self.state.traces is not None:
                await in_thread(self.state.traces.close)
            self.state.images.close()
            self.state.speech.close()
            self.state.adapters.close()

    async def _load_routes(self) -> ASGIApp:
        app = await in_thread(lambda: importlib.import_module("quire.server.app"))
        self._open_keys()
        routes = app.create_routes(self.state)
        self.state.batches = self._open_batches()
        self.state.responses = self._open_responses()
        self.gate.app = app.protected(routes, self.state)
        self.open()
        return routes

    def _open_keys(self) -> None:
        """The API keys, the audit log and the traces. Raises ValueError for a file that cannot be used."""
        from quire.server.keys.audit import AuditLog
        from quire.server.keys.ring import KeyRing

        server = self.config.server
        if server.api_key or server.api_key_file or server.admin_api_key:
            self.state.keys = KeyRing(server)
        if server.audit_log:
            self.state.audit = AuditLog(server.audit_log)
        if server.otlp_traces_endpoint:
            from quire.server.traces import Traces

            self.state.traces = Traces(server.otlp_traces_endpoint, self.state.names[0], self.state.version)

    def _open_batches(self) -> Batches | None:
        """The batches of --batch-dir. Raises ValueError for a folder that cannot be used."""
        server = self.config.server
        if server.batch_dir is None:
            return None
        from quire.server.batches.runner import Batches

        return Batches(server.batch_dir, server.batch_disk, self.state)

    def _open_responses(self) -> Responses:
        """The store of responses. Raises ValueError for a file that cannot be used."""
        from quire.server.api.openai.responses.service import Responses

        def observe_evicted(num: int) -> None:
            if self.state.metrics is not None:
                self.state.metrics.observe_evicted(num)

        return Responses(self.config.server, observe_evicted)

    async def load_tokenizer(self, model_folder: str, tokenizer_folder: str) -> None:
        """Raises ValueError for missing or malformed files."""
        from quire.server.request.sampling import read_sampling_defaults
        from quire.server.startup.model_details import LazyDetails

        self.state.details = LazyDetails(model_folder)
        self.sampling_defaults = read_sampling_defaults(self.config, model_folder)
        loaded = await load_tokenizer(self.config, tokenizer_folder, self.state.images, model_folder)
        self.state.speech.open(model_folder, loaded[0])
        await self.state.adapters.open(self.state.client)
        self.state.tokenizer, self.state.formats = loaded
        self.open()

    def connect(
        self, on_stats: Callable[[int, EngineStats], None], on_progress: Callable[[int, Progress], None]
    ) -> list[EngineClient]:
        """A client per engine, not yet connected. The callbacks get the engine's index first."""
        from quire.server.engines.client import EngineClient
        from quire.server.engines.pool import EnginePool

        def observe(engine: int, stats: EngineStats) -> None:
            self._observe_stats(engine, stats)
            on_stats(engine, stats)

        numbers = range(self.config.parallel.data_parallel_size)
        self._engine_stats = [EngineStats() for _ in numbers]
        clients = [
            EngineClient(functools.partial(observe, engine), functools.partial(on_progress, engine), engine)
            for engine in numbers
        ]
        self._pool = EnginePool(clients) if len(clients) > 1 else None
        self.state.client = self._pool or clients[0]
        self._silences = [Silence(client, functools.partial(_is_busy, client)) for client in clients]
        return clients

    def progress(self, phase: str, fraction: float) -> None:
        self.state.progress(phase, fraction)

    def open(self) -> None:
        """Open the gate if everything is loaded. Called after each part has been loaded."""
        state = self.state
        if state.client is None or state.client.ready is None:
            return
        if state.tokenizer is None or self.gate.app is None:
            self.progress("loading tokenizer", 0.0)
            return
        ready, first = state.client.ready, state.model is None
        if first:
            from quire.server.metrics.pool import make_metrics

            state.model = model_info(self.config, ready.worker, state.tokenizer, self.sampling_defaults)
            if state.model.writes:
                logger.info("default sampling parameters: %s", self.sampling_defaults.describe())
            if not self.chats and state.model.writes:
                logger.warning(
                    "the model has no chat template: /v1/chat/completions will return 400 and /v1/completions answers; "
                    "set one with --chat-template"
                )
            state.images.check_worker(ready.worker.media)
            state.speech.check_worker(ready.worker.media)
            state.metrics = make_metrics(self.config, state.names[0], ready.worker)
        else:  # a new engine may have chosen another context length
            state.model = dataclasses.replace(
                state.model, max_model_len=context_length(ready.worker), vocab_size=ready.worker.vocab_size
            )
        state.ready = ready
        if first:
            self.on_open(ready)
            if state.model.writes:
                state.structures.warm(state)

    # ---- running

    async def _watch(self) -> None:
        """Set `state.stalled` while an engine has requests and completes no step for `health_stall_timeout` seconds."""
        timeout = self.config.server.health_stall_timeout
        tick = min(timeout / 20, 1.0)
        while timeout:
            await asyncio.sleep(tick)
            for silence in self._silences:
                silence.tick(tick)
            longest = max((silence.seconds for silence in self._silences), default=0.0)
            self.state.stalled = (
                f"no step has ended for {longest:.0f} seconds, and requests wait" if longest >= timeout else None
            )

    def _observe_stats(self, engine: int, stats: EngineStats) -> None:
        self._engine_stats[engine] = stats
        self.state.queue_wait.observe(engine, stats)
        every = self._engine_stats
        self.state.stats = EngineStats(
            sum(one.num_running for one in every),
            sum(one.num_waiting for one in every),
            sum(one.kv_cache_usage for one in every) / len(every),
        )

    def observe_stats(self, engine: int, stats: EngineStats) -> None:
        """Publish an engine's statistics. With several frontends only the parent does: each receives the same."""
        if self.state.metrics is not None:
            self.state.metrics.of(engine).observe_stats(stats)

    def on_death(self, engine: int) -> None:
        """Called when an engine dies, after its client was notified."""
        self.state.incidents.note_death()
        if self._pool is not None:
            self._pool.forget(engine)
        self.state.ready = self.state.client.ready  # another engine may be up
        if self.state.ready is None:
            self.progress("restarting the engine", 0.0)

    # ---- shutdown

    def refuse(self) -> None:
        """Refuse new requests from now on."""
        self.state.draining = True

    async def drain(self) -> None:
        """Wait for running requests up to the shutdown timeout, then fail the rest."""
        try:
            await asyncio.wait_for(self.state.idle.wait(), self.config.server.shutdown_timeout)
        except TimeoutError:
            logger.warning("drain: %d requests did not finish in time; aborting them", self.state.num_in_flight)
        await self._end_requests()

    async def fail(self, reason: str) -> None:
        """Fail every request, because no engine will run again."""
        self.state.failure = without_paths(reason, self.config)
        await self._end_requests()

    async def _end_requests(self) -> None:
        if self.state.client is not None:
            await self.state.client.close()
        self.state.structures.close()
        try:
            await asyncio.wait_for(self.state.idle.wait(), END_TIMEOUT)
        except TimeoutError:  # clients that do not read their answers
            if self.connections is not None:
                self.connections.abort_all()

    async def end(self) -> None:
        """Make `serve` return."""
        if self._http is not None:
            self._http.should_exit = True

    def kill(self) -> None:
        """No action: a `Frontend` has no child process."""


def _tls(config: ServerConfig) -> Tls | None:
    """Raises ValueError for files that cannot be used."""
    if config.ssl_certfile is None and config.ssl_keyfile is None:
        return None
    from quire.server.http.transport.tls import Tls

    return Tls(config)


def _is_busy(client: EngineClient) -> bool:
    return client.ready is not None and client.load + client.num_background > 0


def _http_server(app: ASGIApp, connections: Connections, config: ServerConfig, tls: Tls | None) -> uvicorn.Server:
    import uvicorn

    from quire.server.http.transport.connections import Connection
    from quire.server.http.transport.handshakes import Handshake

    def protocol(**settings: object) -> Connection | Handshake:
        make = functools.partial(Connection, shared=connections, **settings)
        return make() if tls is None else Handshake(make, connections, tls.context)

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket]) -> None:
            complain_once_about_descriptors(asyncio.get_running_loop())
            await super().startup(sockets)
            for one in sockets:
                one.listen(BACKLOG)  # asyncio also accepts up to `backlog` connections per loop iteration

        def capture_signals(self) -> contextlib.AbstractContextManager[None]:
            return contextlib.nullcontext()  # the Launcher handles signals

    return Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            backlog=ACCEPTS_PER_TURN,
            http=protocol,
            ws="none",
            timeout_keep_alive=config.timeout_keep_alive,
            forwarded_allow_ips=config.forwarded_allow_ips,
            timeout_graceful_shutdown=1,
        )
    )


def _version() -> str:
    try:
        return metadata.version("quire")
    except metadata.PackageNotFoundError:
        return "0+source"


def _fingerprint(config: Config, version: str) -> str:
    """Equal for servers with comparable answers: same version, model, precision and device placement."""
    parts = repr((config.model, config.parallel, config.device, config.cache.enable_prefix_caching))
    return f"quire-{version}-{hashlib.sha256(parts.encode()).hexdigest()[:8]}"
