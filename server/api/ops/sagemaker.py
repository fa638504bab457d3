"""Amazon SageMaker's container contract: GET /ping and POST /invocations, which is the endpoint that the body fits."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from quire.server.errors import BadRequest
from quire.server.http.read_body import max_body_bytes, read_body
from quire.server.http.route import Handler
from quire.server.state import ServerState


async def ping(request: Request, state: ServerState) -> Response:
    """200 when requests are served. Raises Unavailable before."""
    state.require_ready()
    return Response(status_code=200)


def invocations(handlers: Mapping[str, Handler]) -> Handler:
    """`handlers` by the field that only their bodies have."""

    async def invoke(request: Request, state: ServerState) -> Response:
        raw = await read_body(request, max_body_bytes(state))
        try:
            fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise BadRequest(f"The body is not a JSON object: {error}") from None
        handler = next((handler for name, handler in handlers.items() if name in fields), None)
        if handler is None:
            raise BadRequest(f"The body must have one of {', '.join(handlers)}.")
        unread = [raw]

        async def receive() -> Message:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            return await request.receive()

        return await handler(Request(request.scope, receive), state)

    invoke.__name__, invoke.__doc__ = "invocations", "The endpoint that the body fits."
    return invoke
