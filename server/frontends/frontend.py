"""The frontend of one model: HTTP, the tokenizer and a client per engine.

It runs in the server process itself, or in each of several child processes (`parent.py`, `member.py`).
"""

from __future__ import annotations

import hashlib
import importlib
import socket
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import TYPE_CHECKING

from quire.configs.config import Config
from quire.engine.messages import EngineStats, Progress, Ready
from quire.server.frontends.http_side import HttpSide
from quire.server.frontends.served_model import ServedModel
from quire.server.startup.model_names import accepted_names, served_names, without_paths
from quire.server.state import ServerState

if TYPE_CHECKING:  # imported late, because these imports are slow
    from starlette.types import ASGIApp

    from quire.server.engines.client import EngineClient
    from quire.server.http.route import Route
    from quire.server.http.transport.connections import Connections


class Frontend:
    """The frontend of one model. Its gate opens once routes, tokenizer and engine are loaded; `on_open` runs once."""

    def __init__(self, config: Config, listener: socket.socket, on_open: Callable[[Ready], None]):
        self.config = config
        self.state = make_state(config)
        self.model = ServedModel(config, self.state, on_open)
        self.http = HttpSide(config, listener, self.state, self._make_routes, self._on_routes)

    @property
    def num_in_flight(self) -> int:
        """Return the number of HTTP requests being answered, except probes."""
        return self.state.num_in_flight

    @property
    def chats(self) -> bool:
        """Return whether the model has a chat template."""
        return self.model.chats

    @property
    def connections(self) -> Connections | None:
        """Return the open connections; None until they can be accepted."""
        return self.http.connections

    # ---- start

    async def serve(self) -> None:
        """Accept connections until `end`."""
        try:
            await self.http.serve(self.model.watch())
        finally:
            self.state.images.close()
            self.state.speech.close()
            self.state.adapters.close()

    def _make_routes(self) -> tuple[ASGIApp, Sequence[Route]]:
        app = importlib.import_module("quire.server.app")
        return app.create_routes(self.state), app.ROUTES

    def _on_routes(self) -> None:
        self.model.has_routes = True
        self.model.open()

    async def load_tokenizer(self, model_folder: str, tokenizer_folder: str) -> None:
        """Load the tokenizer. Raises ValueError for missing or malformed files."""
        await self.model.load_tokenizer(model_folder, tokenizer_folder)

    def connect(
        self, on_stats: Callable[[int, EngineStats], None], on_progress: Callable[[int, Progress], None]
    ) -> list[EngineClient]:
        """Return a client per engine, not yet connected. The callbacks get the engine's index first."""
        return self.model.connect(on_stats, on_progress)

    def progress(self, phase: str, fraction: float) -> None:
        self.state.progress(phase, fraction)

    def open(self) -> None:
        """Open the gate if everything is loaded. Called after each part has been loaded."""
        self.model.open()

    # ---- running

    def observe_stats(self, engine: int, stats: EngineStats) -> None:
        """Publish an engine's statistics. With several frontends only the parent does: each receives the same."""
        self.model.observe_stats(engine, stats)

    def on_death(self, engine: int) -> None:
        """Handle the death of an engine, after its client was notified."""
        self.model.on_death(engine)

    # ---- shutdown

    def refuse(self) -> None:
        """Refuse new requests from now on."""
        self.state.draining = True

    async def drain(self) -> None:
        """Wait for running requests up to the shutdown timeout, then fail the rest."""
        await self.http.drain()
        await self._end_requests()

    async def fail(self, reason: str) -> None:
        """Fail every request, because no engine will run again."""
        self.state.failure = without_paths(reason, self.config)
        await self._end_requests()

    async def _end_requests(self) -> None:
        await self.model.close()
        await self.http.end_requests()

    async def end(self) -> None:
        """Make `serve` return."""
        self.http.end()

    def kill(self) -> None:
        """Do nothing: a `Frontend` has no child process."""


def make_state(config: Config) -> ServerState:
    """Return the state of a model that is not loaded."""
    return ServerState(config, served_names(config), version(), fingerprint(config), accepted_names(config))


def version() -> str:
    try:
        return metadata.version("quire")
    except metadata.PackageNotFoundError:
        return "0+source"


def fingerprint(config: Config) -> str:
    """Return an id that servers of the same version, model, precision and device placement share."""
    parts = repr((config.model, config.parallel, config.device, config.cache.enable_prefix_caching))
    return f"quire-{version()}-{hashlib.sha256(parts.encode()).hexdigest()[:8]}"
