"""One model of a multi-model server: loading, use and unloading."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from quire.configs.config import Config
from quire.engine.messages import EngineStats, Ready
from quire.server.engines.supervisor import EngineFailed
from quire.server.frontends.frontend import make_state
from quire.server.frontends.served_model import ServedModel
from quire.server.models.entry import ModelEntry
from quire.server.models.need import Need
from quire.server.startup.engine_group import EngineGroup
from quire.server.startup.entry_settings import with_entry
from quire.server.startup.model_names import without_paths
from quire.server.state import ServerState

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from quire.server.engines.process import EngineProcess
    from quire.server.metrics.metrics import Metrics
    from quire.server.metrics.pool import MetricsPool
    from quire.server.startup.model_details import LazyDetails

logger = logging.getLogger("quire")

UNLOADED, LOADING, LOADED, UNLOADING, FAILED = "unloaded", "loading", "loaded", "unloading", "failed"
_UNUSED = "the model was unloaded"


class LoadFailed(Exception):
    """A model cannot be loaded."""


class Model:
    """A model: its `status`, the state that its routes read, and its engines while loaded.

    `shared` copies what all models have in common into a new state. `on_change` is called after each change of the
    status, progress included, and `on_stats` after each report of an engine. `take_spare` gives an engine process that
    was started before.
    """

    def __init__(
        self,
        entry: ModelEntry,
        shared: Callable[[ServerState], None],
        on_change: Callable[[Model], None],
        on_stats: Callable[[], None],
        take_spare: Callable[[Config], EngineProcess | None],
    ):
        self.entry, self._shared, self._on_change, self._on_stats = entry, shared, on_change, on_stats
        self._take_spare = take_spare
        self.status, self.error = UNLOADED, ""
        self.state = self._new_state(entry.config)
        self.app: ASGIApp | None = None  # its routes, while it is loaded
        self.need: Need | None = None  # of memory, while it takes some
        self.num_leases = 0  # requests that use it
        self.waiters: list[asyncio.Future[None]] = []  # requests that wait for it to load; each gets a lease
        self.last_used = 0.0  # time.monotonic(), seconds
        self.keep_alive = entry.keep_alive
        self.leaves_at: float | None = None  # time.time() when it will be unloaded; None unless idle
        self.details: LazyDetails | None = None  # of its files, once they are on this machine
        self.metrics: Metrics | MetricsPool | None = None  # since the server's start, unloaded or not
        self._served: ServedModel | None = None
        self._engines: EngineGroup | None = None
        self._running: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None  # after a failure
        self._open = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    def leave_in(self, seconds: float, leave: Callable[[], object]) -> None:
        """Call `leave` after `seconds`, unless the model is used again."""
        self.stay()
        self.leaves_at = time.time() + seconds
        self._timer = asyncio.get_running_loop().call_later(seconds, leave)

    def stay(self) -> None:
        """Cancel `leave_in`: the model is used."""
        self.leaves_at = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def is_busy(self) -> bool:
        """Return whether a request uses the model, including background responses."""
        return self.num_leases > 0 or not self.state.idle.is_set()

    @property
    def has_engines(self) -> bool:
        """Return whether there are processes to end."""
        return self._engines is not None

    @property
    def size(self) -> int:
        """Return the bytes of memory that the model takes now."""
        return self.need.total if self.need is not None and self.status not in (UNLOADED, FAILED) else 0

    def _new_state(self, config: Config) -> ServerState:
        state = make_state(config)
        # the name from the command line or the file, as with a single model
        state.aliases = frozenset({*self.entry.aliases, self.entry.source}) - {self.entry.name}
        self._shared(state)
        return state

    def _set(self, status: str, error: str = "") -> None:
        self.status, self.error = status, error
        self._on_change(self)

    # ---- loading

    async def load(self, need: Need | None, niceness: int | None = None) -> None:
        """Start the engines with `niceness` while they load, and wait until requests are served. Raises LoadFailed."""
        self.need = need
        self.state = self._new_state(self.entry.config)
        self._open.clear()
        self._set(LOADING)
        started = time.monotonic()
        config = self._config(need, niceness)
        try:
            config = with_entry(config)  # what the name adds now: `quire create` may have changed it
            self.state = self._new_state(config)
            self._served = ServedModel(config, self.state, self._on_open)
            self._served.has_routes = True
            self._engines = EngineGroup(config, self._take_spare)
            self._engines.start_if_local()
            self._running = asyncio.create_task(self._run(self._engines, self._served))
            opened = asyncio.create_task(self._open.wait())
            await asyncio.wait({opened, self._running}, return_when=asyncio.FIRST_COMPLETED)
            opened.cancel()
            if self._running.done():
                self._running.result()
        except (ValueError, EngineFailed, OSError) as error:
            reason = without_paths(str(error) or type(error).__name__, config)
            logger.error("the model %s cannot be loaded: %s", self.name, error)
            await self._end(FAILED, reason)
            raise LoadFailed(reason) from None
        except BaseException:
            if self._engines is not None and self._running is not None:
                self._running.cancel()  # or its supervisor would start another
                self._engines.kill()  # a process that imports or loads notices no request to end, and has no clients
            await self._end(UNLOADED)
            raise
        logger.info("the model %s is loaded in %.1f s", self.name, time.monotonic() - started)
        self._set(LOADED)
        self._running.add_done_callback(self._on_end)

    def _config(self, need: Need | None, niceness: int | None) -> Config:
        models = dataclasses.replace(self.entry.config.models, load_niceness=niceness)
        config = dataclasses.replace(self.entry.config, models=models)
        if need is None or not need.limits_cache:
            return config
        return dataclasses.replace(config, cache=dataclasses.replace(config.cache, kv_cache_memory_bytes=need.kv_cache))

    async def _run(self, engines: EngineGroup, served: ServedModel) -> None:
        watch = asyncio.create_task(served.watch())
        try:
            await engines.run(served, lambda again: served.open(), self._observe_stats, self._progress)
        finally:
            watch.cancel()

    def _observe_stats(self, engine: int, stats: EngineStats) -> None:
        self._served.observe_stats(engine, stats)
        self._on_stats()

    def _progress(self, phase: str, fraction: float) -> None:
        self.state.progress(phase, fraction)
        self._on_change(self)

    def _on_open(self, ready: Ready) -> None:
        self.app = importlib.import_module("quire.server.app").create_routes(self.state)
        if self.metrics is not None:  # counters never fall
            for engine in range(self.entry.config.parallel.data_parallel_size):
                self.state.metrics.for_engine(engine).add(self.metrics.for_engine(engine).counts())
        self.metrics = self.state.metrics
        for warning in ready.worker.warnings:
            logger.warning("%s: %s", self.name, warning)
        self._open.set()

    def _on_end(self, running: asyncio.Task[None]) -> None:
        """Unload a model whose engines failed for good."""
        if self.status != LOADED or running.cancelled():
            return
        reason = without_paths(str(running.exception()), self.entry.config)
        logger.error("the model %s failed: %s", self.name, running.exception())
        self.state.failure = reason
        self._set(UNLOADING)
        self._ending = asyncio.create_task(self._end(FAILED, reason))

    # ---- unloading

    async def unload(self) -> None:
        """End the engines; requests that still run fail."""
        self._set(UNLOADING)
        await self._end(UNLOADED)
        logger.info("the model %s is unloaded", self.name)

    async def _end(self, status: str, error: str = "") -> None:
        if self._served is not None:
            await self._served.close(error or _UNUSED)
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        if self._engines is not None:
            await self._engines.terminate()
        self.state.images.close()
        self.state.speech.close()
        self.state.adapters.close()
        self._served = self._engines = self._running = self.app = None
        self.need = None
        self.stay()
        if not self.is_busy:
            self.state = self._new_state(self.entry.config)
        self._set(status, error)

    def kill(self) -> None:
        """End the engines at once."""
        if self._engines is not None:
            self._engines.kill()
