"""The ASGI layer that requires API keys."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.routing import compile_path
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.server.errors import ApiError, Forbidden, Unauthorized
from quire.server.http.caller import caller_in
from quire.server.http.middleware import PROBES, header, send_error
from quire.server.http.route import Route
from quire.server.keys.ring import KeyRing
from quire.server.web.pages import PAGES


class ApiKeys:
    """Requires a key of `keys`, as `Authorization: Bearer KEY` or `x-api-key: KEY`. Everything except the probes and
    the static pages, unknown routes included, returns 401 without it. Those of `routes` with `admin` need an
    administrator's key, and others get 403; they need it even if no other route needs a key.

    Sets the caller's `key`; with several keys `owner`, and an equal `tenant` unless `share_prefix_cache`.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing, routes: Iterable[Route], share_prefix_cache: bool = False):
        self.app, self.keys, self.share_prefix_cache = app, keys, share_prefix_cache
        # includes paths with parameters, matched as Starlette does
        self._admin = [(frozenset(route.methods), compile_path(route.path)[0]) for route in routes if route.admin]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_open = scope["type"] != "http" or scope["path"] in PROBES or _is_page(scope)
        if not is_open and (error := self._refusal(scope)) is not None:
            await send_error(scope, send, error)
            return
        await self.app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        """Return the error for a request without access; otherwise set its caller."""
        presented, for_admins = _presented_key(scope), self._is_for_admins(scope)
        holder = None if presented is None else self.keys.find(presented)
        if holder is None:
            if not for_admins and not self.keys.is_required:
                return None
            return Unauthorized(
                "Incorrect API key provided."
                if presented
                else "No API key provided: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
            )
        if for_admins and not holder.key.admin:
            return Forbidden(
                f"{scope['path'][:200]} needs the API key of an administrator: one of --admin-api-key, or of "
                "--api-key-file with `admin: true`."
            )
        who = caller_in(scope)
        who.key, who.owner = holder.key, holder.owner
        if not self.share_prefix_cache:
            who.tenant = holder.owner
        return None

    def _is_for_admins(self, scope: Scope) -> bool:
        method, path = scope["method"], scope["path"]
        return any(method in methods and pattern.match(path) for methods, pattern in self._admin)


def _is_page(scope: Scope) -> bool:
    return scope["path"] in PAGES and scope["method"] in ("GET", "HEAD")


def _presented_key(scope: Scope) -> bytes | None:
    scheme, _, token = (header(scope, b"authorization") or b"").partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else header(scope, b"x-api-key")
