"""The HTTP side of a server: connections, the start-up gate, and the routes with their middleware."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import logging
import socket
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING

from quire.configs.config import Config
from quire.configs.serving import ServerConfig
from quire.server.engines.supervisor import in_thread
from quire.server.frontends.descriptors import (
    ACCEPTS_PER_TURN,
    BACKLOG,
    complain_once_about_descriptors,
    max_connections,
)
from quire.server.http.middleware import RequestBoundary
from quire.server.http.startup_gate import StartupGate
from quire.server.request.sink import ALL
from quire.server.state import ServerState

if TYPE_CHECKING:  # imported late, because these imports are slow
    import uvicorn
    from starlette.types import ASGIApp

    from quire.server.api.openai.responses.service import Responses
    from quire.server.batches.runner import Batches
    from quire.server.http.route import Route
    from quire.server.http.transport.connections import Connections
    from quire.server.http.transport.tls import Tls

logger = logging.getLogger("quire")

END_TIMEOUT = 1.0  # seconds for clients to read the last error events before their connections are closed


class HttpSide:
    """Serves HTTP after `serve` is called: at first only probes, with 503 for other requests.

    `make_routes` makes the application, and says which routes it has, once its imports are done; `on_routes` is called
    when it is served.
    """

    def __init__(
        self,
        config: Config,
        listener: socket.socket,
        state: ServerState,
        make_routes: Callable[[], tuple[ASGIApp, Sequence[Route]]],
        on_routes: Callable[[], None],
    ):
        self.config, self.listener, self.state = config, listener, state
        self.make_routes, self.on_routes = make_routes, on_routes
        self.gate = StartupGate(state)
        self.connections: Connections | None = None  # None until connections can be accepted
        self._http: uvicorn.Server | None = None
        self._tls = _tls(config.server)

    async def serve(self, *watches: Coroutine[None, None, None]) -> None:
        """Accept connections until `end`, and run `watches` meanwhile."""
        from quire.server.http.transport.connections import Connections, Limits

        self.connections = Connections(Limits(max_connections()))
        app = RequestBoundary(self.gate, self.state)
        self._http = _http_server(app, self.connections, self.config.server, self._tls)
        loading = asyncio.create_task(self._load_routes())
        serving = asyncio.create_task(self._http.serve(sockets=[self.listener]))
        others = [loading, *map(asyncio.create_task, watches)]
        others.append(asyncio.create_task(self.state.history.run(self._metrics)))
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

    async def _metrics(self) -> bytes | None:
        """Return all metrics, of all frontends if there are several; None before there are any."""
        state = self.state
        if state.metrics is None:
            return None
        return await state.scrape(ALL) if state.scrape is not None else await in_thread(state.metrics.render)

    async def _load_routes(self) -> ASGIApp:
        app = await in_thread(lambda: importlib.import_module("quire.server.app"))
        self._open_keys()
        routes, table = self.make_routes()
        self.state.batches = self._open_batches()
        self.state.responses = self._open_responses()
        self.gate.app = app.protected(routes, self.state, table)
        self.on_routes()
        return routes

    def _open_keys(self) -> None:
        """Open the API keys, the audit log and the traces. Raises ValueError for a file that cannot be used."""
        from quire.server.keys.audit import AuditLog
        from quire.server.keys.ring import KeyRing

        server = self.config.server
        if server.api_key or server.api_key_file or server.admin_api_key:
            self.state.keys = KeyRing(server)
        if server.audit_log:
            self.state.audit = AuditLog(server.audit_log)
        if server.enable_log_requests:
            from quire.server.keys.request_log import RequestLog

            self.state.request_log = RequestLog(server.max_log_len)
        if server.otlp_traces_endpoint:
            from quire.server.traces import Traces

            self.state.traces = Traces(server.otlp_traces_endpoint, self.state.names[0], self.state.version)

    def _open_batches(self) -> Batches | None:
        """Return the batches of --batch-dir. Raises ValueError for a folder that cannot be used."""
        server = self.config.server
        if server.batch_dir is None:
            return None
        from quire.server.batches.runner import Batches

        return Batches(server.batch_dir, server.batch_disk, self.state)

    def _open_responses(self) -> Responses:
        """Return the store of responses. Raises ValueError for a file that cannot be used."""
        from quire.server.api.openai.responses.service import Responses

        def observe_evicted(num: int) -> None:
            if self.state.metrics is not None:
                self.state.metrics.observe_evicted(num)

        return Responses(self.config.server, observe_evicted)

    # ---- shutdown

    async def drain(self) -> None:
        """Wait for running requests up to the shutdown timeout."""
        try:
            await asyncio.wait_for(self.state.idle.wait(), self.config.server.shutdown_timeout)
        except TimeoutError:
            logger.warning("drain: %d requests did not finish in time; aborting them", self.state.num_in_flight)

    async def end_requests(self) -> None:
        """Wait until clients have read the ends of their answers, at most END_TIMEOUT seconds."""
        try:
            await asyncio.wait_for(self.state.idle.wait(), END_TIMEOUT)
        except TimeoutError:  # clients that do not read their answers
            if self.connections is not None:
                self.connections.abort_all()

    def end(self) -> None:
        """Make `serve` return."""
        if self._http is not None:
            self._http.should_exit = True


def _tls(config: ServerConfig) -> Tls | None:
    """Return the TLS settings. Raises ValueError for files that cannot be used."""
    if config.ssl_certfile is None and config.ssl_keyfile is None:
        return None
    from quire.server.http.transport.tls import Tls

    return Tls(config)


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
