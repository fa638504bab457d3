"""Reads the body of a POST, within the limits, and hands it to a function that runs in a thread unless the body is
small. That function must not wait, or write to shared state.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from quire.server.errors import ApiError, PayloadTooLarge, UnsupportedMediaType
from quire.server.http import needs, sse
from quire.server.http.bodies.gzip_body import decompress, largest_result
from quire.server.http.cache_hint import read_hint
from quire.server.http.caller import caller, connection_of
from quire.server.http.numbers import bounded_int
from quire.server.http.parse_body import parse
from quire.server.http.time_limit import read_timeout
from quire.server.request.hints import Ignored
from quire.server.turns.threads import SMALL, Deferred

logger = logging.getLogger("quire.requests")

T = TypeVar("T", bound=msgspec.Struct)
R = TypeVar("R")

MIN_BODY_BYTES = 2 * 2**20  # default limit of a body
MIN_BYTES_WITH_IMAGES = 32 * 2**20  # the same for models that read images
BYTES_PER_TOKEN = 32  # default limit per token of a long context; JSON encodes a character in up to 6 bytes
_OF_COMPRESSED = (b"content-encoding", b"content-length")  # headers that do not describe the decompressed body
_MAX_NAMES = 1000  # maximum number of logged names of fields without an effect
_INDEX = re.compile(r"\.\d+(?=[. ]|$)")
_RENDERED = frozenset({"messages", "instructions", "system"})  # fields of bodies whose prompt a chat template renders


async def use_body(request: Request, cls: type[T], state: needs.Body, use: Callable[[T], R | Deferred[R]]) -> R:
    """Return the result of `use(body)`, with `body` parsed as `cls`, or of the work that it defers. The event loop
    frees the parts of a large body that `use` keeps. Fields without effect are noted for the response's `Warning`
    header.

    Raises BadRequest, PayloadTooLarge, UnsupportedMediaType, the errors of `use`, and ClientGone if the client
    disconnects, which cancels work that still waits for a thread.
    """
    content_type = _content_type(request)
    # also prevents web pages from posting here without a CORS check
    if content_type != "application/json" and not _is_ollama_client(request):
        raise UnsupportedMediaType(
            f"The body must be sent with Content-Type: application/json, not '{content_type[:100]}'."
        )
    raw = await read_body(request, state)
    num_bytes, unparsed = len(raw), [raw]
    del raw

    ignored, who = Ignored(), caller(request)

    def work() -> R | Deferred[R]:
        body = unparsed.pop()
        parsed, found = parse(body, cls, strict=state.config.server.strict_params)
        who.hint, who.timeout = read_hint(request, body), read_timeout(body)
        ignored.unknown, ignored.hints = found.unknown, found.hints
        del body
        return use(parsed)

    # a chat template is a program: its run time is independent of the body's size
    renders = not _RENDERED.isdisjoint(cls.__struct_fields__)
    size = max(num_bytes, SMALL) if renders else num_bytes
    used = await in_turns(request, state, size, work)
    # only after deferred work has ended: until then the body's images are in memory
    if (connection := connection_of(request.scope)) is not None:
        connection.forget_body()
    if ignored:
        who.ignored = ignored
        _log_once(ignored, state)
    return used


async def in_turns(request: Request, state: needs.Threads, size: int, work: Callable[[], R | Deferred[R]]) -> R:
    """Return the result of `work`, or of the work that it defers, for a part of a body of `size` bytes. Raises as
    `take`.
    """
    used = await _run(request, state, size, work)
    while isinstance(used, Deferred):
        await sse.unless_disconnected(request, used.awaited(caller(request).turn))
        used = await _run(request, state, size, used.then)
    return used


async def _run(request: Request, state: needs.Threads, size: int, work: Callable[[], R]) -> R:
    """Return the result of `work`, without its errors keeping a large body alive. Raises as `work`."""

    def guarded() -> tuple[R | None, ApiError | None]:
        try:
            return work(), None
        except ApiError as error:  # drop the frames that hold the parsed body, because freeing a large body is slow
            error.__traceback__ = error.__context__ = error.__cause__ = None
            return None, error

    running = state.threads.run(size, guarded, caller(request).turn)
    result, refusal = await (sse.unless_disconnected(request, running) if state.threads.takes_long(size) else running)
    if refusal is not None:
        raise refusal
    return result


def require_deliberate(request: Request) -> None:
    """Check a POST without a body: require a header that a web page cannot send cross-origin without a CORS check.

    Raises UnsupportedMediaType.
    """
    if _content_type(request) != "application/json" and not any(
        name in request.headers for name in ("x-requested-with", "authorization", "x-api-key")
    ):
        raise UnsupportedMediaType(
            "This POST must be sent with Content-Type: application/json or with an X-Requested-With header, "
            "which web pages of others cannot."
        )


def _is_ollama_client(request: Request) -> bool:
    """Return whether a body for Ollama's API comes from a program: its clients often send another content type, but web
    pages always send an Origin.
    """
    from_page = any(name in request.headers for name in ("origin", "sec-fetch-site"))
    return request.url.path.startswith("/api/") and not from_page


def _content_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def max_body_bytes(state: needs.BodyLimit) -> int:
    limit = state.config.server.max_body_size
    least = MIN_BODY_BYTES if state.images.why_not else MIN_BYTES_WITH_IMAGES
    return limit or max(least, BYTES_PER_TOKEN * (state.model.max_model_len if state.model else 0))


async def read_body(request: Request, state: needs.Body, limit: int | None = None) -> bytes:
    """Return the whole body, decompressed, of at most `limit` bytes (default: `max_body_bytes`).

    Raises PayloadTooLarge, UnsupportedMediaType, BadRequest for bytes that are no gzip, and ClientGone if the client
    disconnects.
    """
    limit = max_body_bytes(state) if limit is None else limit
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "gzip", "x-gzip"):
        raise UnsupportedMediaType(f"The body's Content-Encoding must be gzip or none, not '{encoding[:100]}'.")
    raw = await _received(request, limit)
    if encoding == "identity":
        return raw
    return await _decompressed(request, state, raw, limit)


async def _decompressed(request: Request, state: needs.Threads, raw: bytes, limit: int) -> bytes:
    """Return the decompressed body. Raises as `read_body`."""
    # in one of a few threads: that bounds how many are decompressed at once, and each then counts as memory
    found = await _run(request, state, min(largest_result(raw), limit), lambda: decompress(raw, limit))
    if found is None:
        raise _too_large(limit)
    connection = connection_of(request.scope)
    if connection is not None and not connection.count_body(len(found)):
        raise sse.ClientGone  # the body was refused
    request.scope["headers"] = [one for one in request.scope["headers"] if one[0] not in _OF_COMPRESSED]
    return found


async def _received(request: Request, limit: int) -> bytes:
    if bounded_int(request.headers.get("content-length", "0"), 0, 2**63 - 1, "Content-Length") > limit:
        raise _too_large(limit)
    chunks, size = [], 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                raise _too_large(limit)
            chunks.append(chunk)
    except ClientDisconnect:
        raise sse.ClientGone from None
    return b"".join(chunks)


def _too_large(limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"The body is larger than {limit} bytes, the limit that --max-body-size sets.")


def _log_once(ignored: Ignored, state: needs.Body) -> None:
    what = {
        "a field that is not known and is ignored (--strict-params refuses it)": ignored.unknown,
        "a field that has no effect here": ignored.hints,
    }
    for about, names in what.items():
        for name in dict.fromkeys(_INDEX.sub(".*", name) for name in names):
            if name not in state.unknown_fields and len(state.unknown_fields) < _MAX_NAMES:
                state.unknown_fields.add(name)
                logger.warning("requests have %s: %s", about, name.encode("unicode_escape").decode("ascii"))
