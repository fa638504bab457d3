"""`quire serve` with several models: they load when requests name them."""

from __future__ import annotations

import importlib
import logging
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from quire.configs.config import Config
from quire.server.frontends.frontend import fingerprint, version
from quire.server.frontends.http_side import HttpSide
from quire.server.launch import Launcher
from quire.server.models.catalog import read_catalog
from quire.server.models.entry import ModelEntry
from quire.server.models.host import HostState
from quire.server.models.manager import Models
from quire.server.startup import running_servers

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from quire.server.http.route import Route
    from quire.server.http.transport.connections import Connections

logger = logging.getLogger("quire")


class ModelsLauncher(Launcher):
    """Runs a server of several models, which is ready once it can answer requests."""

    def _begin(self) -> None:
        """Read the models. Raises ValueError for ambiguous models and for settings that they cannot have."""
        if self.config.server.api_server_count > 1:
            raise ValueError("--api-server-count: a server of several models has one frontend")
        self.entries = read_catalog(self.config)
        self.frontend = self.engines = ModelsFrontend(self.config, self.entries, self.listener, self._on_routes)

    async def _run_engines(self) -> None:
        await self.frontend.models.run()

    def _on_routes(self) -> None:
        self.frontend.state.is_open = True
        self.frontend.models.prepare_spare()  # not before: importing the routes needs the CPU
        names = [entry.name for entry in self.entries]
        running_servers.rename(names)
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        self._say_ready(f"{len(names)} models, which load when requests name them: {shown}")


class ModelsFrontend:
    """The frontend and the engines of several models."""

    def __init__(
        self,
        config: Config,
        entries: Sequence[ModelEntry],
        listener: socket.socket,
        on_routes: Callable[[], None],
    ):
        self.state = HostState(config, [entry.name for entry in entries], version(), fingerprint(config))
        self.models = Models(config, entries, self.state)
        self.http = HttpSide(config, listener, self.state, self._make_routes, on_routes)

    @property
    def num_in_flight(self) -> int:
        """Return the number of HTTP requests being answered, except probes."""
        return self.state.num_in_flight

    @property
    def connections(self) -> Connections | None:
        """Return the open connections; None until they can be accepted."""
        return self.http.connections

    async def serve(self) -> None:
        """Accept connections until `end`."""
        try:
            await self.http.serve()
        finally:
            self.state.images.close()
            self.state.speech.close()
            self.state.adapters.close()

    def _make_routes(self) -> tuple[ASGIApp, Sequence[Route]]:
        app = importlib.import_module("quire.server.app")
        own = importlib.import_module("quire.server.models.routes").routes(self.models)
        router = importlib.import_module("quire.server.models.router")
        replaced = {(route.method, route.path) for route in own}
        table = [*own, *(route for route in app.ROUTES if (route.method, route.path) not in replaced)]
        return router.Router(app.create_routes(self.state, table), self.state, self.models), table

    def refuse(self) -> None:
        """Refuse new requests from now on."""
        self.state.draining = True
        self.models.refuse()

    async def drain(self) -> None:
        """Wait for running requests up to the shutdown timeout, then fail the rest."""
        await self.http.drain()
        await self.models.end()
        await self.http.end_requests()

    async def fail(self, reason: str) -> None:
        """Fail every request."""
        self.state.failure = reason
        await self.models.end()
        await self.http.end_requests()

    async def end(self) -> None:
        """Make `serve` return."""
        self.http.end()

    async def terminate(self) -> None:
        """End the engines."""
        await self.models.end()

    def kill(self) -> None:
        self.models.kill()
