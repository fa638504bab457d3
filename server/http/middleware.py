"""Plain ASGI layers around the routes, outermost first: `RequestBoundary` (request id, access log, last resort for
exceptions), CORS, `Hosts`, `ApiKeys` (`api_keys.py`).

Not Starlette's BaseHTTPMiddleware: that passes every chunk of a stream through a queue.
"""

from __future__ import annotations

import ipaddress
import logging
import re
import time
import uuid
from typing import Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.server.error_shapes import body_of, internal_body
from quire.server.errors import ApiError, EngineError, Forbidden
from quire.server.http import needs
from quire.server.http.caller import arrival, caller_in, connection_of, route_path, set_caller
from quire.server.incidents import Incidents
from quire.server.keys.caller import Caller
from quire.server.request.hints import Ignored

access_logger = logging.getLogger("quire.access")
logger = logging.getLogger(__name__)

PROBES = frozenset({"/live", "/ready", "/health"})
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"})  # RFC 9110, 5789


def header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for key, value in scope["headers"] if key == name), None)


async def send_json(send: Send, status: int, body: bytes, headers: dict[str, str]) -> None:
    raw = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    raw += [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


async def send_error(scope: Scope, send: Send, error: ApiError) -> None:
    caller_in(scope).refusal = error
    await send_json(send, error.status, body_of(error, scope["path"]), error.headers)


class _Server(needs.Drain, needs.Settings, needs.Accounts, Protocol):
    """The server state that the boundary uses."""

    incidents: Incidents


class RequestBoundary:
    """The outermost layer: gives every request an id and returns it as `X-Request-Id`, writes the access log, counts
    requests in flight, and turns unexpected exceptions into 500.
    """

    def __init__(self, app: ASGIApp, state: _Server):
        self.app, self.state = app, state
        self.root_path = "/" + root if (root := state.config.server.root_path.strip("/")) else ""
        self.keep_alive = b"timeout=%d" % max(state.config.server.timeout_keep_alive, 1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if self.root_path and f"{scope['path']}/".startswith(f"{self.root_path}/"):  # the proxy has not stripped it
            scope["path"] = scope["path"][len(self.root_path) :] or "/"
        client = scope.get("client")
        who = Caller(
            _usable(header(scope, b"x-request-id")) or uuid.uuid4().hex, client[0] if client else "", arrival(scope)
        )
        set_caller(scope, who)
        probe = scope["path"] in PROBES
        started, status, complete = time.perf_counter(), None, False

        async def send_with_headers(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *_extra_headers(scope, self.keep_alive)]
            elif not message.get("more_body", False):
                complete = True
            await send(message)

        if not probe:
            self.state.enter()
        try:
            await self._answer(scope, receive, send_with_headers)
        except Exception:
            logger.exception("%s %s failed (request %s)", scope["method"], _printable(scope["path"]), who.request_id)
            if status is None:
                await send_json(send_with_headers, 500, internal_body(scope["path"]), {})
            elif not complete:
                raise  # uvicorn closes the connection; the client sees the truncated answer as an error
        finally:
            who.close(status)
            if not probe:
                self.state.leave()
                self._log(scope, status, time.perf_counter() - started)
                if status is not None and status >= 400:
                    self._record_error(scope, status)
                if self.state.metrics is not None and status is not None:
                    self.state.metrics.observe_http(route_path(scope, "none"), scope["method"], status)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Have the application answer. A method that HTTP does not define becomes "other", which no route allows:
        methods are metric labels and parts of log lines, and a client could invent any number of them.
        """
        if scope["method"] not in METHODS:
            scope["method"] = "other"
        await self.app(scope, receive, send)

    def _record_error(self, scope: Scope, status: int) -> None:
        who = caller_in(scope)
        error = who.refusal
        self.state.incidents.record_error(
            method=scope["method"],
            route=route_path(scope, "none"),
            status=status,
            type=error.type if error is not None else EngineError.type,
            code=error.code if error is not None else None,
            param=error.param and error.param[:200] if error is not None else None,
            request_id=who.request_id,
        )

    def _log(self, scope: Scope, status: int | None, seconds: float) -> None:
        client, who = scope.get("client"), caller_in(scope)
        error = who.refusal
        access_logger.info(
            '%s "%s %s" %s %.0f ms %s%s',
            f"{client[0]}:{client[1]}" if client else "-",
            scope["method"],
            _printable(scope["path"]),
            status,
            1000 * seconds,
            who.request_id,
            "" if error is None else _printable(f" {error.type} {error.param or '-'}: {error.message}"),
            extra={"fields": self._fields(scope, status, seconds)},
        )

    def _fields(self, scope: Scope, status: int | None, seconds: float) -> dict[str, object]:
        """Return the fields of a JSON log line."""
        who = caller_in(scope)
        return {
            "method": scope["method"],
            "path": _printable(scope["path"]),
            "status": status,
            "seconds": round(seconds, 6),
            "request_id": who.request_id,
            "key": who.key and who.key.name,
        }


class Hosts:
    """Protects against DNS rebinding: answers 403 if the name in the Host header is not `allowed`.

    IP addresses and names without a dot, such as localhost, always pass.
    """

    def __init__(self, app: ASGIApp, allowed: list[str]):
        self.app, self.allowed = app, {name.lower() for name in allowed}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] == "http"
            and scope["path"] not in PROBES
            and not self._is_allowed(name := host_name(header(scope, b"host") or b""))
        ):
            await send_error(
                scope,
                send,
                Forbidden(
                    f"This server does not answer to the host name '{name[:200]}': start it with --allowed-hosts "
                    f"{name[:200]}."
                ),
            )
            return
        await self.app(scope, receive, send)

    def _is_allowed(self, name: str) -> bool:
        return "." not in name.rstrip(".") or name in self.allowed or name.endswith(".localhost") or _is_address(name)


def host_name(host: bytes) -> str:
    """Return the host of a Host header, without port and without the brackets of an IPv6 address."""
    text = host.decode("latin-1").strip().lower()
    return text[1:].partition("]")[0] if text.startswith("[") else text.partition(":")[0]


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _usable(request_id: bytes | None) -> str | None:
    """Return the client's id, if it is safe to put into headers and logs."""
    return request_id.decode("ascii") if request_id and re.fullmatch(rb"[\x21-\x7e]{1,256}", request_id) else None


def _printable(path: str) -> str:
    return path[:300].encode("unicode_escape").decode("ascii")


def _extra_headers(scope: Scope, keep_alive: bytes) -> list[tuple[bytes, bytes]]:
    who = caller_in(scope)
    headers = [(b"x-request-id", who.request_id.encode("ascii"))]
    headers += [(name.encode(), value.encode()) for name, value in who.limits.items()]
    if (connection := connection_of(scope)) is not None and connection.body_unread:
        headers.append((b"connection", b"close"))
    elif b"close" not in (header(scope, b"connection") or b"").lower():
        headers.append((b"keep-alive", keep_alive))  # clients then do not use a connection that is about to close
    if who.ignored is not None:
        headers.append((b"warning", f'199 quire "{_warning(who.ignored)}"'.encode("ascii")))
    return headers


def _warning(ignored: Ignored) -> str:
    """Return the text of the Warning header: the fields without effect."""
    what = {"unknown parameters ignored": ignored.unknown, "parameters without effect here": ignored.hints}
    text = "; ".join(f"{about}: {', '.join(names[:20])}" for about, names in what.items() if names)
    return "".join(
        c if c.isprintable() and c not in '"\\' else "?"
        for c in text.encode("ascii", "backslashreplace").decode("ascii")
    )
