"""Server-sent events: an ASGI response that sends frames, sends keep-alive comments between them, and detects that the
client disconnected.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.server.error_shapes import INTERNAL
from quire.server.errors import ApiError, EngineError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LINE_ENDS = [(code.encode(), b"\\u%04x" % ord(code)) for code in "\x85\u2028\u2029"]
DONE = b"data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Progress(Protocol):
    """Progress to report before the first frame."""

    async def wait(self) -> None:
        """Wait until there is progress to report."""

    def take(self) -> bytes:
        """Return the comment to send; empty if nothing changed since the last."""


def event(data: bytes, kind: str | None = None) -> bytes:
    """Return one event with JSON as data."""
    head = b"data: " if kind is None else b"event: %b\ndata: " % kind.encode()
    return head + one_line(data) + b"\n\n"


def one_line(data: bytes) -> bytes:
    """Return JSON without the characters at which Python's `str.splitlines` ends a line, other than those that JSON
    escapes anyway: clients split decoded streams of events and of JSON lines by it (httpx's `iter_lines`).
    """
    if data.isascii():
        return data
    for raw, escaped in _LINE_ENDS:
        data = data.replace(raw, escaped)
    return data


async def to_the_end(
    frames: AsyncGenerator[bytes, None],
    request_id: str,
    error_event: Callable[[ApiError], bytes] = lambda error: event(error.body()),
    done: bytes = DONE,
) -> AsyncGenerator[bytes, None]:
    """Yield `frames`, then `done`. A late error becomes an event, as the status was sent. `aclose` closes `frames`."""
    try:
        async for frame in frames:
            yield frame
    except ApiError as error:
        yield error_event(error)
    except Exception:
        logger.exception("request %s failed", request_id)
        yield error_event(EngineError(INTERNAL, code="internal_error"))
    finally:
        await frames.aclose()
    yield done


class EventStream(Response):
    """Sends each of `frames` (bytes of whole events) as it comes. A comment is sent after `keep_alive` seconds of
    silence; 0 disables it. Frames of `progress` are sent at once, and before those of `frames` that follow.

    `send` waits while the client's buffers are full; no frames are requested then, so that pending outputs are
    merged into fewer of them.
    """

    def __init__(self, frames: AsyncGenerator[bytes, None], keep_alive: float, progress: Progress | None = None):
        self.frames, self.keep_alive, self.progress = frames, keep_alive, progress
        self.status_code, self.background, self.raw_headers = 200, None, list(HEADERS)
        self.last_sent = 0.0
        self.comment = b": waiting for the first token\n\n"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.last_sent = asyncio.get_running_loop().time()
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        if scope["method"] == "HEAD":
            await self.frames.aclose()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        # send the headers now: the first token may take a while
        await send({"type": "http.response.body", "body": b"", "more_body": True})
        pump = asyncio.create_task(self._pump(send))
        watch = asyncio.create_task(self._watch(receive, send))
        progress_task = asyncio.create_task(self._send_progress(send))
        try:
            await asyncio.wait({pump, watch}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (progress_task, watch, pump):
                task.cancel()
            await asyncio.gather(pump, watch, progress_task, return_exceptions=True)
            await self.frames.aclose()
        if not pump.cancelled():
            pump.result()

    async def _pump(self, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        async for frame in self.frames:
            self.comment = b": keep-alive\n\n"
            self.last_sent = clock()
            if self.progress is not None:
                frame = self.progress.take() + frame
            await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_progress(self, send: Send) -> None:
        """Send the frames of `progress`, if there is one."""
        while self.progress is not None:
            await self.progress.wait()
            if frame := self.progress.take():
                self.last_sent = asyncio.get_running_loop().time()
                await send({"type": "http.response.body", "body": frame, "more_body": True})

    async def _watch(self, receive: Receive, send: Send) -> None:
        """Send the comments; return once the client disconnects."""
        clock = asyncio.get_running_loop().time
        while True:
            silence = clock() - self.last_sent
            try:
                async with asyncio.timeout(max(self.keep_alive - silence, 0.001) if self.keep_alive else None):
                    if (await receive())["type"] == "http.disconnect":
                        return
            except TimeoutError:
                if clock() - self.last_sent >= self.keep_alive:
                    self.last_sent = clock()
                    await send({"type": "http.response.body", "body": self.comment, "more_body": True})


class ClientGone(Exception):
    """The client closed the connection before it received its answer."""


async def unless_disconnected(request: Request, work: Awaitable[T]) -> T:
    """Return the result of `work`. If the client disconnects, cancels it and raises ClientGone."""
    task = asyncio.ensure_future(work)
    watch = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        watch.cancel()
        task.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class JsonResponse(Response):
    """A Struct or plain object, encoded by msgspec."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        return content if isinstance(content, bytes) else msgspec.json.encode(content)
