"""The ASGI application of a server of several models: routes each request to the model it names."""

from __future__ import annotations

import asyncio
import logging
import re
from dataclasses import dataclass
from email.message import Message as Headers

import msgspec
from starlette.requests import Request
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.configs.several import read_duration
from quire.server.api.ollama.routes import empty_answer
from quire.server.error_shapes import body_of
from quire.server.errors import ApiError, BadRequest, Unavailable
from quire.server.http import sse
from quire.server.http.bodies.form import MAX_FORM_BYTES
from quire.server.http.caller import caller, caller_in
from quire.server.http.middleware import send_json
from quire.server.http.read_body import read_body
from quire.server.keys.access import names_for, require_model
from quire.server.models.details import details_of, show_answer
from quire.server.models.host import HostState
from quire.server.models.loaded import LOADED, LOADING, Model
from quire.server.models.manager import Models
from quire.server.models.routes import capabilities
from quire.server.routes import ROUTES

logger = logging.getLogger("quire")

# paths of routes that belong to no single model, and beginnings of such paths
_WIDE = frozenset({
    "/", "/live", "/ready", "/health", "/version", "/metrics", "/server_info", "/requests", "/abort_requests", "/load",
    "/ping", "/openapi.json", "/docs", "/redoc", "/models", "/v1/models", "/v1/files", "/v1/batches",
    "/v1/messages/batches", "/api/tags", "/api/ps", "/api/version", "/api/pull", "/api/push", "/api/create",
    "/api/copy", "/api/delete", "/sleep", "/wake_up", "/is_sleeping", "/reset_prefix_cache", "/start_profile",
    "/stop_profile", "/metrics/history",
})  # fmt: skip
_WIDE_BELOW = (
    "/models/", "/v1/models/", "/v1/files/", "/v1/batches/", "/v1/messages/batches/", "/v1/responses/",
    "/v1/conversations", "/ui/", "/docs/", "/api/blobs/", "/v1/cache/", "/v1/streams/",
)  # fmt: skip
_SLOW = 2.0  # seconds of loading after which a stream begins with comments
_COMMENT_SECONDS = 1.0
_OLLAMA = ("/api/generate", "/api/chat")
_EVENTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")  # that stream events


class _Choice(msgspec.Struct):
    """The fields of a body that choose the model."""

    model: str | None = None
    name: str | None = None  # Ollama's old name of `model`
    keep_alive: str | float | None = None
    stream: bool | None = None
    prompt: msgspec.Raw = msgspec.Raw(b"null")
    messages: msgspec.Raw = msgspec.Raw(b"null")
    images: msgspec.Raw = msgspec.Raw(b"null")

    @property
    def is_empty(self) -> bool:
        """Return whether a request of Ollama's only loads or unloads the model."""
        return all(bytes(raw) in (b"null", b'""', b"[]") for raw in (self.prompt, self.messages, self.images))


# of a part of a form; other headers of the part may stand before and after it
_MODEL_FIELD = re.compile(rb'\r\ncontent-disposition:[^\r\n]*;\s*name=("model"|model)\s*(?:;|\r|$)', re.IGNORECASE)

_decode = msgspec.json.Decoder(_Choice).decode


@dataclass(frozen=True, slots=True)
class Chosen:
    """The model that a request names, and the seconds for which it then stays loaded."""

    model: Model
    keep_alive: float | None
    streams: bool
    unloads: bool = False  # an empty request of Ollama's with keep_alive 0


class Router:
    """Routes to `host` what belongs to no single model; each loaded model has its own routes."""

    def __init__(self, host: ASGIApp, state: HostState, models: Models):
        self.host, self.state, self.models = host, state, models
        self._of_models = [
            (frozenset(route.methods), compile_path(route.path)[0]) for route in ROUTES if not is_wide(route.path)
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._is_of_model(scope):
            await self.host(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            raw = None
            if scope["method"] in ("POST", "PUT", "PATCH"):
                raw = await read_body(request, self.state, self._most_bytes(scope["path"]))
            chosen = await self._choose(request, raw)
            await self._answer(request, chosen, raw, send)
        except sse.ClientGone:
            return
        except ApiError as error:
            await self._refuse(request, error, send)

    async def _refuse(self, request: Request, error: ApiError, send: Send) -> None:
        caller(request).refusal = error
        await send_json(send, error.status, body_of(error, request.scope["path"]), error.headers)

    def _most_bytes(self, path: str) -> int:
        """Return the largest body, in bytes, that any model accepts; the model then checks its own limit."""
        if path.startswith("/v1/audio/"):
            return self.state.speech.max_bytes + MAX_FORM_BYTES
        return self.models.most_body_bytes()

    def _is_of_model(self, scope: Scope) -> bool:
        """Return whether a model answers; the host refuses requests without a route."""
        method, path = scope["method"], scope["path"]
        return any(method in methods and pattern.match(path) for methods, pattern in self._of_models)

    async def _choose(self, request: Request, raw: bytes | None) -> Chosen:
        """Return the chosen model. Raises NotFound, Forbidden, and BadRequest if the body is no JSON object."""
        found = _Choice(model=request.query_params.get("model"))
        if raw and _is_json(request):
            # a body of many megabytes is not read on the event loop
            read = self.state.threads.run(len(raw), lambda: _read(raw), caller(request).turn)
            body = await read
            found = msgspec.structs.replace(body, model=body.model or body.name or found.model)
        elif raw:
            found = _Choice(model=_model_in_form(raw, request.headers["content-type"]) or found.model)
        name = _named(found.model, self.state)
        require_model(caller(request), name, self.state)
        if not name:
            name = next(iter(names_for(caller(request), self.state)), self.state.names[0])
        is_ollama = request.url.path.startswith("/api/")
        keep_alive = _seconds(found.keep_alive) if is_ollama else None
        streams = bool(found.stream) and request.url.path in _EVENTS
        unloads = keep_alive == 0 and request.url.path in _OLLAMA and found.is_empty
        return Chosen(self.state.find(name), keep_alive, streams, unloads)

    async def _answer(self, request: Request, chosen: Chosen, raw: bytes | None, send: Send) -> None:
        model, sender = chosen.model, _Sender(send, request.scope)
        if chosen.unloads:
            self.models.begin_unload(model)
            answer = empty_answer(model.name, request.url.path == "/api/chat", "unload")
            await sse.JsonResponse(answer)(request.scope, request.receive, send)
            return
        if request.url.path == "/api/show" and model.status != LOADED and await self._show(request, model, send):
            return
        try:
            await self._enter(request, chosen, sender)
        except ApiError as error:
            if not sender.has_started:
                raise
            await sender.fail(error)
            return
        try:
            receive = request.receive if raw is None else _replay(raw, request.receive)
            if (app := model.app) is None:  # its engine failed for good in this moment
                message = f"The model '{model.name}' failed: {model.error}"
                error = Unavailable(message, code="model_failed", retry_after=2)
                await sender.fail(error) if sender.has_started else await self._refuse(request, error, send)
                return
            await app(request.scope, receive, sender)
        finally:
            self.models.leave(model)

    async def _enter(self, request: Request, chosen: Chosen, sender: _Sender) -> None:
        """Load the model, reporting progress to the client. Raises as `Models.enter`, and ClientGone."""
        waits = chosen.model.status != LOADED and chosen.streams
        status_task = asyncio.create_task(self._send_status(chosen.model, sender)) if waits else None
        try:
            await sse.unless_disconnected(request, self.models.enter(chosen.model, chosen.keep_alive))
        finally:
            if status_task is not None:
                status_task.cancel()
                await asyncio.gather(status_task, return_exceptions=True)

    async def _show(self, request: Request, model: Model, send: Send) -> bool:
        """Answer /api/show from the files of a model that is not loaded. Returns False if they are not here."""
        if (found := await details_of(model)) is None:
            return False
        answer = show_answer(found, model, self.models.planner.finished(model.name), capabilities(model, self.models))
        await sse.JsonResponse(answer)(request.scope, request.receive, send)
        return True

    async def _send_status(self, model: Model, sender: _Sender) -> None:
        """Send the model's progress to a client that waits for events."""
        await asyncio.sleep(_SLOW)
        while True:
            how_far = f"{model.state.phase} {model.state.fraction:.0%}" if model.status == LOADING else model.status
            await sender.comment(f"the model {model.name} is loading: {how_far}")
            await asyncio.sleep(_COMMENT_SECONDS)


class _Sender:
    """Sends an answer that may have begun with comments; an error is then sent as an event."""

    def __init__(self, send: Send, scope: Scope):
        self._send, self._scope = send, scope
        self.has_started = self._is_error = False
        self._error = bytearray()

    async def comment(self, text: str) -> None:
        if not self.has_started:
            self.has_started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": list(sse.HEADERS)})
        printable = text.encode("ascii", "replace")
        await self._send({"type": "http.response.body", "body": b": %b\n\n" % printable, "more_body": True})

    async def __call__(self, message: Message) -> None:
        if not self.has_started:
            await self._send(message)
        elif message["type"] == "http.response.start":
            self._is_error = message["status"] >= 400
        elif self._is_error:
            self._error += message.get("body", b"")
            if not message.get("more_body", False):
                await self._end(bytes(self._error))
        else:
            await self._send(message)

    async def fail(self, error: ApiError) -> None:
        caller_in(self._scope).refusal = error
        await self._end(body_of(error, self._scope["path"]))

    async def _end(self, body: bytes) -> None:
        kind = "error" if self._scope["path"] == "/v1/messages" else None
        await self._send({"type": "http.response.body", "body": sse.event(body, kind) + sse.DONE, "more_body": False})


def is_wide(path: str) -> bool:
    """Return whether a path belongs to no single model."""
    return path in _WIDE or path.startswith(_WIDE_BELOW)


def _named(name: str | None, state: HostState) -> str | None:
    """Return the name without the tag that Ollama's clients add."""
    if name and state.find(name) is None and state.find(name.removesuffix(":latest")) is not None:
        return name.removesuffix(":latest")
    return name


def _seconds(keep_alive: str | float | None) -> float | None:
    """Return the seconds of `keep_alive`. Raises BadRequest if it is no duration."""
    if keep_alive in (None, ""):
        return None
    try:
        return read_duration(keep_alive)
    except ValueError as error:
        raise BadRequest(f"keep_alive: {error}.", param="keep_alive") from None


def _is_json(request: Request) -> bool:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind != "multipart/form-data"


def _read(raw: bytes) -> _Choice:
    """Return the fields of a JSON body. Raises BadRequest."""
    try:
        return _decode(raw)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$.")
        if not path:
            raise BadRequest("The body must be a JSON object.") from None
        param = path.rstrip("`")
        raise BadRequest(f"{param}: {what[:1].lower()}{what[1:]}.".replace("`", ""), param=param) from None
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"The body is not valid JSON: {error}") from None


def _model_in_form(raw: bytes, content_type: str) -> str | None:
    """Return the field `model` of a form, which is text: the boundary of the form ends it."""
    header = Headers()
    header["content-type"] = content_type
    boundary = b"--" + (header.get_boundary() or "").encode("latin-1", "replace")
    head = raw[: 1 << 16] + b"\n" + raw[-(1 << 16) :]  # clients write fields before or after the file
    for part in head.split(boundary)[1:]:
        headers, _, value = part.partition(b"\r\n\r\n")
        if _MODEL_FIELD.search(headers):
            return value.partition(b"\r\n")[0].decode("utf-8", "replace")[:512] or None
    return None


def _replay(raw: bytes, receive: Receive) -> Receive:
    """Return a receive function that replays the read body, then continues with `receive`."""
    unread = [raw]

    async def receive_again() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        return await receive()

    return receive_again
