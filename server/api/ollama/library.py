"""Ollama's routes that change the library of models: /api/pull, /api/create, /api/copy, /api/delete."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Protocol

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from quire.checkpoints.gguf.folder import hub_patterns
from quire.checkpoints.library import aliases, creation, modelfile, names, removal
from quire.checkpoints.library.entries import Entry
from quire.server.api import needs
from quire.server.api.ollama.models import served_name
from quire.server.api.ollama.protocol import Name
from quire.server.engines.supervisor import in_thread
from quire.server.errors import ApiError, BadRequest, Conflict, EngineError, Forbidden, NotFound
from quire.server.http import sse
from quire.server.http.read_body import use_body
from quire.server.http.route import EMPTY, NDJSON, Route
from quire.server.library.pulls import Pulls
from quire.server.request.limits import Text
from quire.server.request.ollama_options import Json
from quire.server.request.preset import check_parameters

HEADERS = [(b"content-type", NDJSON.encode()), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
_SUCCESS = {"status": "success"}
Lines = AsyncGenerator[dict[str, Any], None]


class _Changing(needs.Body, needs.Settings, needs.Names, Protocol):
    """The state needed to change the library."""

    pulls: Pulls

    @property
    def sources(self) -> Mapping[str, str]: ...


class _Named(msgspec.Struct, kw_only=True):
    model: Name | None = None
    name: Name | None = None  # the older name of `model`

    harmless: ClassVar = frozenset()
    unsupported: ClassVar[dict[str, tuple]] = {}

    @property
    def requested_model(self) -> str:
        """Return the requested model. Raises BadRequest without one."""
        if not (found := (self.model or self.name or "").strip()):
            raise BadRequest("Missing required parameter: model.", param="model")
        return found


class PullRequest(_Named, kw_only=True):
    """POST /api/pull"""

    stream: bool | None = None  # default: true

    harmless: ClassVar = frozenset({"insecure", "username", "password"})  # for Ollama's registry


class DeleteRequest(_Named, kw_only=True):
    """DELETE /api/delete"""


class CopyRequest(msgspec.Struct, kw_only=True):
    """POST /api/copy"""

    source: Name
    destination: Name

    harmless: ClassVar = frozenset()
    unsupported: ClassVar[dict[str, tuple]] = {}


class FirstMessage(msgspec.Struct, kw_only=True):
    role: Literal["system", "user", "assistant"]
    content: Text

    harmless: ClassVar = frozenset()
    unsupported: ClassVar[dict[str, tuple]] = {}


class CreateRequest(_Named, kw_only=True):
    """POST /api/create. The other fields go before those of a `modelfile`."""

    base: Name | None = msgspec.field(default=None, name="from")
    modelfile: Annotated[str, Meta(max_length=modelfile.MAX_CHARS)] | None = None
    system: Text | None = None
    template: Text | None = None
    license: Text | list[Text] | None = None
    parameters: Json | None = None
    messages: Annotated[list[FirstMessage], Meta(max_length=1000)] | None = None
    stream: bool | None = None  # default: true

    harmless: ClassVar = frozenset({"renderer", "parser", "requires"})
    # files are named, not sent
    unsupported: ClassVar[dict[str, tuple]] = {
        "files": ({},), "adapters": ({},), "path": ("",), "quantize": ("",), "quantization": ("",),
    }  # fmt: skip


class Line(msgspec.Struct, kw_only=True):
    """The progress of a download: `digest`, `total` and `completed` bytes; the last is `success`."""

    status: str
    digest: str | msgspec.UnsetType = msgspec.UNSET
    total: int | msgspec.UnsetType = msgspec.UNSET
    completed: int | msgspec.UnsetType = msgspec.UNSET


async def pull(request: Request, state: _Changing) -> Response:
    """Download a model, if the server was started with --allow-downloads."""
    body = await use_body(request, PullRequest, state, lambda body: body)
    model = _no_path(body.requested_model)
    _require_downloads(state)
    _located(model)
    state.pulls.require_room()
    return await _respond(request, body.stream, state.pulls.pull(model, state.config.model.download_dir))


async def create(request: Request, state: _Changing) -> Response:
    """Name a model with a system prompt, parameters and first messages, which `quire serve NAME` applies."""
    body = await use_body(request, CreateRequest, state, lambda body: body)
    name = body.requested_model
    try:
        aliases.check_name(name)
        entry = _entry(body, state)
        check_parameters(entry.parameters)
    except ValueError as error:
        raise BadRequest(f"{error}.") from None
    missing = [path for path in entry.adapters if names.is_hub_adapter(path)]
    is_here = await in_thread(lambda: creation.is_here(entry.base))
    if not is_here or missing:
        _require_downloads(state, f"{(missing or [entry.base])[0]} is not on this machine, and ")
        state.pulls.require_room()
    return await _respond(request, body.stream, _created(name, entry, not is_here, missing, state))


def _entry(body: CreateRequest, state: _Changing) -> Entry:
    """Return the entry of a body. Raises ValueError."""
    given = modelfile.parse(body.modelfile) if body.modelfile else Entry("")
    licenses = [body.license] if isinstance(body.license, str) else body.license or []
    base = body.base or given.base
    if not base:
        raise BadRequest("Missing required parameter: from, the model that the new one is made from.", param="from")
    entry = Entry(
        base,
        body.system or "",
        body.template or "",
        body.parameters or {},
        (),
        tuple({"role": one.role, "content": one.content} for one in body.messages or ()),
        tuple(licenses),
    )
    return _placed(replace(entry.over(given), base=base), state)


def _placed(entry: Entry, state: _Changing) -> Entry:
    """Return the entry with its base resolved, which may be the served model by name. Raises ValueError."""
    return creation.placed(entry, None, state.sources.get(served_name(entry.base, state)))


async def _created(name: str, entry: Entry, lacks_base: bool, adapters: list[str], state: _Changing) -> Lines:
    """Download missing files, and store the entry."""
    download_dir = state.config.model.download_dir
    for model in [entry.base] * lacks_base + adapters:
        async with contextlib.aclosing(state.pulls.pull(model, download_dir, adapter=model in adapters)) as lines:
            async for line in lines:
                yield line
    yield {"status": "using the files of the model named by from"}
    if entry.template and not entry.is_jinja:
        yield {"status": creation.TEMPLATE_NOTE}
    yield {"status": "writing manifest"}
    try:
        await in_thread(lambda: aliases.add(name, entry))
    except OSError as error:
        raise EngineError(f"The name cannot be kept: {error.strerror}.") from None
    except ValueError as error:
        raise BadRequest(f"{error}.") from None


async def copy(request: Request, state: _Changing) -> Response:
    """Give a model of this machine another name, which commands take."""
    body = await use_body(request, CopyRequest, state, lambda body: body)

    def work() -> None:
        own = aliases.find(body.source)
        entry = _placed(Entry(body.source), state) if own is None else own
        if not creation.is_here(entry.base):
            raise NotFound(f"The model '{body.source}' is not on this machine.", param="source")
        aliases.add(body.destination, entry)

    await _changed(work)
    return Response()


async def delete(request: Request, state: _Changing) -> Response:
    """Remove a downloaded model, or a name; never the model that is served, nor files of other programs."""
    body = await use_body(request, DeleteRequest, state, lambda body: body)
    model = body.requested_model
    if aliases.find(model) is None:
        _no_path(model)
    if served_name(model, state) in state.names or any(_is_served(model, one) for one in set(state.sources.values())):
        raise Conflict(f"The model '{model}' is served now: end the server before it is removed.", param="model")
    await _changed(lambda: removal.remove(model))
    return Response()


async def _changed(work: Callable[[], object]) -> None:
    """Run a change in a thread. Raises ApiError."""
    try:
        await in_thread(work)
    except removal.NotHere as error:
        raise NotFound(f"{str(error).partition(':')[0]}.", param="model") from None
    except ValueError as error:
        raise BadRequest(f"{error}.", param="model") from None
    except OSError as error:
        raise EngineError(f"The library cannot be changed: {error.strerror}.") from None


def _is_served(model: str, served: str) -> bool:
    """Return whether `model` is the `served` one by name, or has the files of the served model."""
    if aliases.canonical(model) == aliases.canonical(served):
        return True
    if aliases.find(model) is not None:
        return False  # only a name is removed
    ours, theirs = _located(model), _located(served)
    named, used = hub_patterns(ours), hub_patterns(theirs)
    repositories = {(named[0] if named else ours), (used[0] if used else theirs)}
    return len(repositories) == 1 and (named is None or used is None or named[1] == used[1])


def _located(model: str) -> str:
    try:
        return names.located(model)
    except ValueError as error:
        raise BadRequest(f"{error}.", param="model") from None


def _no_path(model: str) -> str:
    """Return `model`. Raises BadRequest for a path: clients name models."""
    if model.startswith((".", "/", "~")) or os.path.exists(model):
        raise BadRequest("model: this is a path; clients name models.", param="model")
    return model


def _require_downloads(state: needs.Settings, why: str = "") -> None:
    if not state.config.server.allow_downloads:
        message = f"{why}this server downloads no models: start it with --allow-downloads, or use `quire pull`."
        raise Forbidden(f"{message[:1].upper()}{message[1:]}")


async def _respond(request: Request, streams: bool | None, lines: Lines) -> Response:
    """Stream the lines, or return `success` after the last one."""
    if streams is not False:
        response = sse.EventStream(sse.to_the_end(_encoded(lines), request.scope["path"], _error_line, b""), 0)
        response.raw_headers = list(HEADERS)
        return response

    async def to_the_end() -> None:
        async with contextlib.aclosing(lines):
            async for _ in lines:
                pass

    await sse.unless_disconnected(request, to_the_end())
    return sse.JsonResponse(_SUCCESS)


async def _encoded(lines: Lines) -> AsyncGenerator[bytes, None]:
    async with contextlib.aclosing(lines):
        async for line in lines:
            yield sse.one_line(msgspec.json.encode(line)) + b"\n"
    yield msgspec.json.encode(_SUCCESS) + b"\n"


def _error_line(error: ApiError) -> bytes:
    return msgspec.json.encode({"error": error.message}) + b"\n"


ROUTES = [
    Route("POST", "/api/pull", pull, PullRequest, Line, stream=NDJSON, admin=True),
    Route("POST", "/api/create", create, CreateRequest, Line, stream=NDJSON, admin=True),
    Route("POST", "/api/copy", copy, CopyRequest, EMPTY, admin=True),
    Route("DELETE", "/api/delete", delete, DeleteRequest, EMPTY, admin=True),
]
