"""One route with several handlers, chosen by a field that only one of the bodies has."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from quire.server.errors import BadRequest
from quire.server.http import needs
from quire.server.http.read_body import read_body
from quire.server.http.route import Handler


def by_field(name: str, about: str, handlers: Mapping[str, Handler]) -> Handler:
    """Return the handler; `handlers` are by distinguishing field, `name` and `about` for OpenAPI."""

    async def dispatch(request: Request, state: needs.Completion) -> Response:
        raw = await read_body(request, state)
        try:
            fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise BadRequest(f"The body is not a JSON object: {error}") from None
        handler = next((handler for field, handler in handlers.items() if field in fields), None)
        if handler is None:
            raise BadRequest(f"The body must have one of {', '.join(handlers)}.")
        unread = [raw]

        async def receive() -> Message:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            return await request.receive()

        return await handler(Request(request.scope, receive), state)

    dispatch.__name__, dispatch.__doc__ = name, about
    return dispatch
