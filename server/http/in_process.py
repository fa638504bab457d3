"""Calls a route of this process without a connection."""

from __future__ import annotations

import asyncio
import logging
import uuid
from typing import Any

from starlette.types import ASGIApp, Message

from quire.server.error_shapes import internal_body
from quire.server.keys.account import close_account

logger = logging.getLogger(__name__)


async def call(app: ASGIApp, path: str, body: bytes, scope: dict[str, Any]) -> tuple[int, str, bytes]:
    """(status, request id, body) of the answer to POST `path` with a JSON body. `scope` adds to the ASGI scope."""
    request_id = uuid.uuid4().hex
    unread = [body]
    answer = bytearray()
    status = 500

    async def receive() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        await asyncio.get_running_loop().create_future()  # a caller that stays until the answer
        raise AssertionError

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
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
        "request_id": request_id,
    }
    request |= scope
    try:
        await app(request, receive, send)
    except Exception:
        logger.exception("POST %s failed (request %s)", path, request_id)
        return 500, request_id, internal_body(path)
    finally:
        close_account(request, status)
    return status, request_id, bytes(answer)
