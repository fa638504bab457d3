"""The application: the routes of `server/api/`, the middleware around them, and the errors of all."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import cache

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from quire.server.added_middleware import add_middleware
from quire.server.error_shapes import body_of, dialect_body, internal_body
from quire.server.errors import ApiError, BadRequest, EngineError, Unavailable
from quire.server.http.api_keys import ApiKeys
from quire.server.http.caller import caller
from quire.server.http.middleware import Hosts, is_loopback
from quire.server.http.route import Handler, Route
from quire.server.http.sse import ClientGone, JsonResponse
from quire.server.keys.ledger import LIMIT_HEADERS
from quire.server.openapi import document
from quire.server.queue_wait import retry_after
from quire.server.routes import ROUTES
from quire.server.state import ServerState
from quire.server.web.pages import add_pages

CLIENT_CLOSED = 499  # nginx's code, for the log: the client has disconnected


def create_routes(state: ServerState, routes: Sequence[Route] = ROUTES) -> FastAPI:
    """Return the routes over `state`."""
    app = FastAPI(title="quire", version=state.version, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.server = state
    for route in routes:
        handler = _with_state(route.handler)  # add_api_route notes the route in the scope, add_route does not
        app.add_api_route(route.path, handler, methods=route.methods, response_class=Response, include_in_schema=False)
    add_pages(app, state.config.server.ui)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(ClientGone, _client_gone)
    app.add_exception_handler(Exception, _unexpected)
    settings = state.config.server
    app.openapi = cache(
        lambda: document(app.title, app.version, routes, state.keys is not None, settings.root_path.strip("/"))
    )
    return app


def _with_state(function: Handler) -> Callable[[Request], Awaitable[Response]]:
    """Return a handler of FastAPI's kind."""

    async def handler(request: Request) -> Response:
        return await function(request, request.app.state.server)

    return handler


def protected(app: ASGIApp, state: ServerState, routes: Sequence[Route] = ROUTES) -> ASGIApp:
    """Return the routes wrapped in the configured middleware. `RequestBoundary` is added around it."""
    layers = app
    server = state.config.server
    if state.keys is not None:
        layers = ApiKeys(layers, state.keys, routes, server.share_prefix_cache)
    if "*" not in server.allowed_hosts and (server.allowed_hosts or (server.uds is None and is_loopback(server.host))):
        layers = Hosts(layers, [server.host, *server.allowed_hosts])
    if state.config.server.allowed_origins:
        layers = CORSMiddleware(
            layers,
            allow_origins=state.config.server.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after", "warning", *LIMIT_HEADERS],
        )
    return add_middleware(layers, server.middleware)


# ---- errors


async def _api_error(request: Request, error: ApiError) -> Response:
    # clients should retry on another server
    if isinstance(error, EngineError) and request.app.state.server.status in ("draining", "failed"):
        error = Unavailable(error.message, code="shutting_down", retry_after=5)
    if isinstance(error, Unavailable) and error.retry_after is None:
        state: ServerState = request.app.state.server
        error.retry_after = retry_after(state.queue_wait.seconds(state.would_wait(1)))
    caller(request).refusal = error
    return JsonResponse(body_of(error, request.scope["path"]), status_code=error.status, headers=error.headers)


_ELSEWHERE = ("/v1/audio/speech", "/v1/images", "/v1/moderations", "/v1/videos", "/v1/realtime", "/v1/fine_tuning")


async def _http_exception(request: Request, error: HTTPException) -> Response:
    """Answer Starlette's own errors: no such route, wrong method."""
    message, path = error.detail, request.scope["path"]
    status, headers = error.status_code, error.headers
    if error.status_code == 404 and path.startswith(_ELSEWHERE):
        message = f"{path[:200]} is not available: this server serves text, by /v1/chat/completions and others (/docs)."
    elif error.status_code == 404:
        message = f"There is no {request.method} {path[:200]}{_hint(path)}."
    elif error.status_code == 405 and request.headers.get("upgrade", "").lower() == "websocket":
        # the status at which clients that prefer WebSockets, as Codex, turn to HTTP without trying again
        status, headers = 426, {**(headers or {}), "Upgrade": "HTTP/1.1", "Connection": "Upgrade"}
        message = f"{path[:200]} has no WebSocket: send a POST; with stream, events come as they are made."
    elif error.status_code == 405:
        message = f"{path[:200]} does not take {request.method}."
    answer = BadRequest(message) if status < 500 else EngineError(message)
    caller(request).refusal = answer
    body = dialect_body(path, status, message, answer.type)
    return JsonResponse(body, status_code=status, headers=headers)


def _hint(path: str) -> str:
    """Return the path that was probably meant: under /v1, or without duplicate slashes."""
    plain = "/" + "/".join(part for part in path.split("/") if part)
    known = {route.path for route in ROUTES}
    meant = next((candidate for candidate in (plain, f"/v1{plain}") if candidate in known and candidate != path), None)
    return f"; the path is {meant}" if meant else ""


async def _client_gone(request: Request, error: ClientGone) -> Response:
    return Response(status_code=CLIENT_CLOSED)


async def _unexpected(request: Request, error: Exception) -> Response:
    return JsonResponse(internal_body(request.scope["path"]), status_code=500)
