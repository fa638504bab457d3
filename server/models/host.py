"""The state of a multi-model server: what its models share, and their totals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.registry import Collector

from quire.configs.config import Config
from quire.engine.messages import EngineCalls, EngineStats
from quire.server.engines.client import EngineUnavailable
from quire.server.errors import NotFound, Unavailable
from quire.server.metrics.metrics import Metrics
from quire.server.metrics.pool import merged
from quire.server.metrics.view import render
from quire.server.request.sink import ALL, View
from quire.server.state import ServerState

if TYPE_CHECKING:
    from quire.server.models.loaded import Model

T = TypeVar("T")
Args = TypeVarTuple("Args")

_SHARED = (
    "threads", "incidents", "unknown_fields", "num_waiting_of", "keys", "audit", "request_log", "traces", "batches",
    "responses", "pulls", "history", "streams",
)  # fmt: skip
_ROWS = 8  # batch rows reported while no model is loaded
_OF_SERVER = ("http_requests",)  # metrics that belong to no model


class HostState(ServerState):
    """The state of routes that belong to no single model. `models` has all models by name."""

    __slots__ = ("is_open", "models")

    def __init__(self, config: Config, names: list[str], version: str, fingerprint: str):
        self.models: dict[str, Model] = {}
        self.is_open = False  # whether the routes are loaded
        super().__init__(config, names, version, fingerprint)
        self.client = LoadedEngines(self)
        self.metrics = ModelsMetrics(self)

    def share(self, state: ServerState) -> None:
        """Give a model's state what all models have in common."""
        for name in _SHARED:
            setattr(state, name, getattr(self, name))
        state.draining, state.created = self.draining, self.created

    def loaded(self) -> list[Model]:
        """Return the loaded models."""
        return [model for model in self.models.values() if model.app is not None]

    def find(self, name: str) -> Model | None:
        """Return the model of this name or alias, or with this adapter."""
        if (model := self.models.get(name)) is not None:
            return model
        for model in self.models.values():
            if name in model.state.aliases or name in model.state.adapters.loaded:
                return model
        return None

    def observe_stats(self) -> None:
        """Sum the latest gauges of all loaded models."""
        every = [model.state.stats for model in self.loaded()]
        self.stats = EngineStats(
            sum(one.num_running for one in every),
            sum(one.num_waiting for one in every),
            sum(one.kv_cache_usage for one in every) / max(len(every), 1),
        )

    @property
    def status(self) -> str:
        """Return "loading" (of routes), "draining" or "ready"; models load when requests name them."""
        return "draining" if self.draining else "ready" if self.is_open else "loading"

    def require_ready(self) -> None:
        """Raise Unavailable while the server starts or drains."""
        if self.draining:
            raise Unavailable("The server is shutting down.", code="shutting_down", retry_after=5)
        if not self.is_open:
            raise Unavailable("The server is starting.", code="model_loading", retry_after=1)

    @property
    def num_rows(self) -> int:
        return max(sum(model.state.num_rows for model in self.loaded()), _ROWS)

    @property
    def sources(self) -> dict[str, str]:
        return {name: model.entry.source for name, model in self.models.items()}

    @property
    def all_names(self) -> list[str]:
        adapters = [name for model in self.models.values() for name in model.state.adapters.loaded]
        return [*self.names, *adapters]

    def display_name(self, name: str | None) -> str:
        model = self.find(name or "")
        return name if name in self.all_names else model.name if model is not None else self.names[0]

    answering = display_name

    def require_model(self, name: str | None, known: Sequence[str]) -> None:
        """Raise NotFound naming the `known` models unless `name` is absent, empty or a name of a model."""
        if name and self.find(name) is None:
            names = ", ".join(f"'{one}'" for one in known[:20]) or "no model for this key"
            raise NotFound(
                f"The model '{name[:200]}' does not exist. This server has {names}.",
                param="model",
                code="model_not_found",
            )


class LoadedEngines:
    """The engines of all loaded models, with the methods of an `EngineHandle` that administrators' routes call."""

    def __init__(self, host: HostState):
        self._host = host

    def _clients(self) -> Iterator[Any]:
        return (model.state.client for model in self._host.loaded())

    @property
    def load(self) -> int:
        return sum(client.load for client in self._clients())

    async def call(self, method: Callable[[EngineCalls, *Args], T], *args: *Args, timeout: float = 10.0) -> T | list[T]:
        found = await self.call_each(method, *args, timeout=timeout)
        if not found:
            raise EngineUnavailable("no model is loaded")
        return found[0] if all(one == found[0] for one in found) else found

    async def call_each(
        self, method: Callable[[EngineCalls, *Args], T], *args: *Args, timeout: float = 10.0
    ) -> list[T]:
        found = []
        for client in self._clients():
            if client.ready is not None:
                found += await client.call_each(method, *args, timeout=timeout)
        return found


class ModelsMetrics(Collector):
    """The metrics of all models loaded so far on one page, each family once, and the server's own."""

    def __init__(self, host: HostState):
        self._host, self._own = host, Metrics("", 1)
        self.observe_http = self._own.observe_http
        self.observe_evicted = self._own.observe_evicted
        self.observe_key, self.observe_key_refusal = self._own.observe_key, self._own.observe_key_refusal
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def render(self, view: View = ALL) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return render(self.registry, view)

    def collect(self) -> Iterator[Any]:
        return merged(self._families())

    def _families(self) -> Iterable[Any]:
        for family in self._own.collect():
            if family.name in _OF_SERVER or family.name.startswith("quire:key"):
                yield family
        for model in list(self._host.models.values()):
            if model.metrics is not None:
                yield from model.metrics.collect()
