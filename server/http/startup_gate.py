"""Answers probes, and 503 to other requests, until the routes are imported (FastAPI and pydantic: most of a second)."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.server.errors import ApiError
from quire.server.http import needs
from quire.server.http.middleware import PROBES, send_error, send_json

POLL_SECONDS = 0.02
# first requests of many clients, and pages, which a browser does not request again: held until the answer is known
_HELD = ("/v1/models", "/docs", "/ui/")


class StartupGate:
    """ASGI application that forwards to `app` once it is set."""

    def __init__(self, state: needs.Health):
        self.state = state
        self.app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.app is not None:
            await self.app(scope, receive, send)
        elif self.state.status == "loading" and (scope["path"] == "/" or scope["path"].startswith(_HELD)):
            await self._wait()
            await self(scope, receive, send)
        elif scope["path"] in PROBES and scope["method"] in ("GET", "HEAD"):
            await self._probe(scope["path"], send)
        else:
            try:
                self.state.require_ready()
            except ApiError as error:
                await send_error(scope, send, error)

    async def _wait(self) -> None:
        while self.app is None and self.state.status == "loading":
            await asyncio.sleep(POLL_SECONDS)

    async def _probe(self, path: str, send: Send) -> None:
        if path == "/live":
            await send_json(send, 200, msgspec.json.encode({"status": "live"}), {})
        else:
            await send_json(send, 503, msgspec.json.encode(self.state.health()), {"Retry-After": "2"})
