"""The routes about the models of a server of several: OpenAI's and Ollama's lists, llama.cpp's loading and unloading,
vLLM's sleep.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from datetime import UTC, datetime
from typing import Any, ClassVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.server.api.abilities import abilities
from quire.server.api.anthropic import models as anthropic_models
from quire.server.api.ollama import models as ollama_models
from quire.server.api.ollama.protocol import RunningAnswer, TagsAnswer
from quire.server.api.openai.objects import ModelCard
from quire.server.errors import BadRequest, NotFound
from quire.server.http.caller import caller
from quire.server.http.read_body import require_deliberate, use_body
from quire.server.http.route import EMPTY, EVENTS, Route
from quire.server.http.sse import EventStream, JsonResponse, event
from quire.server.keys.access import names_for, require_model
from quire.server.models.details import details_of
from quire.server.models.host import HostState
from quire.server.models.loaded import FAILED, LOADED, Model
from quire.server.models.manager import Models
from quire.server.startup.model_names import default_name


class Status(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`value`: unloaded, loading, loaded, unloading or failed. `phase` and `progress` (0 to 1) while it loads."""

    value: str
    failed: bool = False
    error: str | None = None
    phase: str | None = None
    progress: float | None = None


class ServedCard(ModelCard, kw_only=True):
    """A model of a server of several. `size` is in bytes: what it takes, or would take once it is loaded."""

    aliases: list[str] = []
    status: Status
    pinned: bool = False
    size: int | None = None


class ServedList(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[ServedCard]


class ModelBody(msgspec.Struct, kw_only=True):
    """POST /models/load and /models/unload."""

    unsupported: ClassVar[dict[str, tuple]] = {}
    harmless: ClassVar[frozenset[str]] = frozenset()

    model: str


class Done(msgspec.Struct):
    success: bool


class Sleeping(msgspec.Struct):
    is_sleeping: bool


class _Routes:
    """Handlers over the models; `state` is the host's."""

    def __init__(self, models: Models):
        self.models = models

    # ---- lists

    def _visible(self, request: Request, state: HostState) -> list[tuple[str, Model]]:
        """Return (name, model) pairs visible to the caller's key, adapters included."""
        found = ((name, state.find(name)) for name in names_for(caller(request), state))
        return [(name, model) for name, model in found if model is not None]

    async def list_models(self, request: Request, state: HostState) -> Response:
        """List the models that there are, loaded or not; in Anthropic's form for its clients."""
        visible = self._visible(request, state)
        if "anthropic-version" in request.headers:
            return JsonResponse(anthropic_models.model_list(state, [name for name, _ in visible]))
        return JsonResponse(ServedList(data=[self._card(name, model) for name, model in visible]))

    async def one_model(self, request: Request, state: HostState) -> Response:
        """Return one of the models."""
        name = request.path_params["model_id"]
        if not name:
            raise NotFound("There is no GET /v1/models/; the path is /v1/models.")
        require_model(caller(request), name, state)
        if "anthropic-version" in request.headers:
            return JsonResponse(anthropic_models.model_info(state, state.display_name(name)))
        return JsonResponse(self._card(state.display_name(name), state.find(name)))

    def _card(self, name: str, model: Model) -> ServedCard:
        planned, adapter = self.models.planner.finished(model.name), model.state.adapters.loaded.get(name)
        length = planned.max_model_len if planned is not None and planned.error is None else None
        size = model.size or (self.models.planned_bytes(model) if planned is not None else None)
        return ServedCard(
            id=name,
            created=model.state.created if adapter is None else adapter.created,
            root=default_name(model.entry.source) if adapter is None else adapter.source.name,
            max_model_len=model.state.model.max_model_len if model.state.model is not None else length,
            parent=None if adapter is None else adapter.parent or model.name,
            aliases=list(model.entry.aliases) if adapter is None else [],
            status=status_of(model),
            pinned=model.entry.pinned,
            size=size,
            capabilities=capabilities(model, self.models),
        )

    async def tags(self, request: Request, state: HostState) -> Response:
        """List the models there are, in Ollama's form."""
        found = []
        for name, model in self._visible(request, state):
            if (details := await details_of(model)) is not None:
                found.append(ollama_models.listed(name, details, model.state))
        return JsonResponse({"models": found})

    async def running(self, request: Request, state: HostState) -> Response:
        """List the models that are loaded, in Ollama's form."""
        found = []
        for name, model in self._visible(request, state):
            if model.status != LOADED or (details := await details_of(model)) is None:
                continue
            one = ollama_models.listed(name, details, model.state) | ollama_models.loaded_facts(model.state, details)
            if model.leaves_at is not None:
                one["expires_at"] = datetime.fromtimestamp(model.leaves_at, UTC).isoformat().replace("+00:00", "Z")
            elif model.keep_alive >= 0 and not model.entry.pinned:
                leaves = datetime.now(UTC).timestamp() + model.keep_alive
                one["expires_at"] = datetime.fromtimestamp(leaves, UTC).isoformat().replace("+00:00", "Z")
            found.append(one)
        return JsonResponse({"models": found})

    # ---- loading

    async def _named(self, request: Request, state: HostState) -> Model:
        body = await use_body(request, ModelBody, state, lambda body: body)
        require_model(caller(request), body.model, state)
        if not body.model:
            raise BadRequest("model must not be empty.", param="model")
        return state.find(body.model)

    async def load(self, request: Request, state: HostState) -> Response:
        """Load a model; answers at once. `GET /models/sse` and `GET /v1/models` tell how far it is."""
        model = await self._named(request, state)
        self.models.begin(model)
        return JsonResponse(Done(True))

    async def unload(self, request: Request, state: HostState) -> Response:
        """Unload a model as soon as no request uses it; one that loads for none stops."""
        model = await self._named(request, state)
        if not self.models.is_present(model):
            raise BadRequest(f"The model '{model.name}' is not loaded.", param="model", code="model_not_loaded")
        self.models.begin_unload(model)
        return JsonResponse(Done(True))

    async def watch(self, request: Request, state: HostState) -> Response:
        """Stream the status of each model at once, and again when it changes."""
        return EventStream(self._changes(request, state), 15.0)

    async def _changes(self, request: Request, state: HostState) -> AsyncGenerator[bytes, None]:
        changed, last = asyncio.Event(), dict[str, Status]()
        self.models.changed.add(changed)
        try:
            while not state.draining:
                changed.clear()
                for name, model in self._visible(request, state):
                    status = status_of(model)
                    if last.get(name) != status:
                        last[name] = status
                        yield event(msgspec.json.encode({"model": name, "event": "model_status", "data": status}))
                await changed.wait()
        finally:
            self.models.changed.discard(changed)

    # ---- sleep

    def _asked(self, request: Request, state: HostState) -> Model:
        """Return the model of the query parameter `model`, else the first."""
        name = request.query_params.get("model")
        require_model(caller(request), name, state)
        return state.find(name or state.names[0])

    async def sleep(self, request: Request, state: HostState) -> Response:
        """Unload a model (vLLM's sleep, at any level) once its requests have ended. The next request wakes it."""
        require_deliberate(request)
        if (level := request.query_params.get("level", "1")) not in ("0", "1", "2"):
            raise BadRequest(f"level must be 0, 1 or 2, not {level[:20]}.", param="level")
        await self.models.unload_idle(self._asked(request, state))
        return Response(status_code=200)

    async def wake_up(self, request: Request, state: HostState) -> Response:
        """Load a model, and answer when it is loaded."""
        require_deliberate(request)
        await self.models.load(self._asked(request, state))
        return Response(status_code=200)

    async def is_sleeping(self, request: Request, state: HostState) -> Response:
        """Answer whether a model is unloaded."""
        return JsonResponse(Sleeping(self._asked(request, state).status != LOADED))


def status_of(model: Model) -> Status:
    if model.status == FAILED:
        return Status(value="unloaded", failed=True, error=model.error)
    if model.app is None and model.status == "loading":
        return Status(value="loading", phase=model.state.phase, progress=round(model.state.fraction, 2))
    return Status(value=model.status)


def capabilities(model: Model, models: Models) -> list[str]:
    """Return Ollama's names of the abilities of a loaded or planned model."""
    if model.status == LOADED:
        return abilities(model.state)
    planned = models.planner.finished(model.name)
    if planned is None or planned.error is not None:
        return []
    if planned.transcribes:
        return ["transcription"]
    found = ["embedding"] if planned.pooling else []
    return found + ["completion"] * planned.generates + ["vision"] * planned.images


_QUERY: dict[str, dict[str, Any]] = {"model": {"type": "string"}}


def routes(models: Models) -> list[Route]:
    """Return the routes of a server of several models, which replace those of one."""
    own = _Routes(models)
    return [
        *(Route("GET", path, own.list_models, answer=ServedList) for path in ("/v1/models", "/models")),
        Route("GET", "/v1/models/{model_id:path}", own.one_model, answer=ServedCard),
        Route("GET", "/api/tags", own.tags, answer=TagsAnswer),
        Route("GET", "/api/ps", own.running, answer=RunningAnswer),
        Route("POST", "/models/load", own.load, ModelBody, Done, admin=True),
        Route("POST", "/models/unload", own.unload, ModelBody, Done, admin=True),
        Route("GET", "/models/sse", own.watch, answer=EVENTS),
        Route("POST", "/sleep", own.sleep, answer=EMPTY, admin=True, query=_QUERY | {"level": {"type": "integer"}}),
        Route("POST", "/wake_up", own.wake_up, answer=EMPTY, admin=True, query=_QUERY),
        Route("GET", "/is_sleeping", own.is_sleeping, answer=Sleeping, query=_QUERY),
    ]
