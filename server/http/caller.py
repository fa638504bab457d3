"""The two values of the server's own in an ASGI scope: the `Caller` of a request, and its connection."""

from __future__ import annotations

from typing import Protocol

from starlette.requests import HTTPConnection
from starlette.types import Scope

from quire.server.keys.caller import Caller

_CALLER = "caller"


class Connection(Protocol):
    """`quire.server.http.transport.connections.Connection`, as far as a route may use it."""

    @property
    def body_unread(self) -> bool: ...
    def count_body(self, num_bytes: int) -> bool: ...
    def forget_body(self) -> None: ...


def caller(request: HTTPConnection) -> Caller:
    return request.scope[_CALLER]


def caller_in(scope: Scope) -> Caller:
    return scope[_CALLER]


def set_caller(scope: Scope, of: Caller) -> None:
    scope[_CALLER] = of


def connection_of(scope: Scope) -> Connection | None:
    """Return the connection that the request came by; None for a line of a batch."""
    return scope.get("state", {}).get("connection")


def arrival(scope: Scope) -> float | None:
    """Return when the request arrived, by the event loop's time."""
    return scope.get("state", {}).get("arrived")


def route_path(scope: Scope, default: str | None = None) -> str:
    """Return the path of the route that takes the request; `default`, or its own path, if there is none."""
    return getattr(scope.get("route"), "path", scope["path"][:200] if default is None else default)
