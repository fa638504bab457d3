"""/v1/streams: the streams that clients named in order to resume them."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response

from quire.server.api import needs
from quire.server.errors import BadRequest
from quire.server.http.caller import caller
from quire.server.http.numbers import bounded_int
from quire.server.http.paging import owner
from quire.server.http.resumable import HEADER, ResumableStream, expired
from quire.server.http.sse import EventStream, Progress

_NAME = re.compile(r"[A-Za-z0-9_-]{16,64}")


class _Keeping(needs.Settings, needs.Streams, Protocol):
    """The state needed to send the rest of a stream."""


def stream_name(request: Request, streams: bool | None) -> str | None:
    """Return the name under which the client may resume the stream of its answer, if it gave one. Raises BadRequest."""
    if (name := request.headers.get(HEADER)) is None:
        return None
    if not streams:
        raise BadRequest(f"{HEADER} needs stream to be true.", param=HEADER)
    if not _NAME.fullmatch(name):
        raise BadRequest(f"{HEADER} must have 16 to 64 letters, digits, - and _.", param=HEADER)
    return name


def event_stream(
    request: Request, state: _Keeping, frames: AsyncGenerator[bytes, None], progress: Progress | None
) -> EventStream:
    """Return the response that sends `frames`: resumable, if the client named it and there is room."""
    keep_alive = state.config.server.sse_keep_alive_interval
    name = stream_name(request, True)
    kept = None if name is None else state.streams.add(owner(request), name, caller(request).turn)
    if kept is None:
        return EventStream(frames, keep_alive, progress)
    return ResumableStream(kept, frames, keep_alive, progress)


async def resume_stream(request: Request, state: _Keeping) -> Response:
    """Return the events of a stream that the client named by X-Resumable-Stream, after that of `Last-Event-ID`."""
    kept = state.streams.get(owner(request), request.path_params["stream_id"])
    after = bounded_int(request.headers.get("Last-Event-ID") or "0", 0, 2**53, "Last-Event-ID")
    if after + 1 < kept.first:
        raise expired(kept.first)
    return EventStream(kept.follow(after), state.config.server.sse_keep_alive_interval)


async def stop_stream(request: Request, state: needs.Streams) -> Response:
    """End a stream that the client named, if it runs: its generation is aborted."""
    state.streams.stop(owner(request), request.path_params["stream_id"])
    return Response(status_code=204)
