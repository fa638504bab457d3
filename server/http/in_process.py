"""Calls a route of this process without a connection."""

from __future__ import annotations

import asyncio
import logging

import msgspec
from starlette.types import ASGIApp, Message

from quire.server.error_shapes import internal_body
from quire.server.http.caller import set_caller
from quire.server.keys.caller import Caller

logger = logging.getLogger(__name__)


async def call(app: ASGIApp, path: str, body: bytes, caller: Caller) -> tuple[int, str, bytes]:
    """Return (status, request id, body) of the answer to POST `path` with a JSON body, on behalf of `caller`. The
    returned body is JSON: a string if the answer has another type.
    """
    unread = [body]
    answer = bytearray()
    status, is_json = 500, True

    async def receive() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        await asyncio.get_running_loop().create_future()  # a caller that never disconnects
        raise AssertionError

    async def send(message: Message) -> None:
        nonlocal status, is_json
        if message["type"] == "http.response.start":
            status = message["status"]
            is_json = dict(message["headers"]).get(b"content-type", b"").startswith(b"application/json")
        else:
            answer.extend(message.get("body", b""))

    request = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
        "client": None,
        "server": None,
    }
    set_caller(request, caller)
    try:
        await app(request, receive, send)
    except Exception:
        logger.exception("POST %s failed (request %s)", path, caller.request_id)
        return 500, caller.request_id, internal_body(path)
    finally:
        caller.close(status)
    return status, caller.request_id, bytes(answer) if is_json else msgspec.json.encode(answer.decode())
