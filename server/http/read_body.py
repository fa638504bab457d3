"""Reads the body of a POST, within the limits, and hands it to a function that runs in a thread unless the body is
small. That function must not wait, or write to shared state.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from quire.server.errors import ApiError, PayloadTooLarge, UnsupportedMediaType
from quire.server.http import sse
from quire.server.http.parse_body import parse
from quire.server.http.threads import SMALL
from quire.server.state import ServerState

logger = logging.getLogger("quire.requests")

T = TypeVar("T", bound=msgspec.Struct)
R = TypeVar("R")

MIN_BODY_BYTES = 2 * 2**20  # default limit of a body
BYTES_PER_TOKEN = 32  # default limit per token of a long context; JSON encodes a character in up to 6 bytes
_MAX_NAMES = 1000  # maximum number of logged unknown names


async def take(request: Request, cls: type[T], state: ServerState, use: Callable[[T], R]) -> R:
    """The result of `use(body)`, with `body` parsed as `cls`. The event loop frees the parts of a large body that `use`
    keeps. Unknown fields are noted for the response's `Warning` header.

    Raises BadRequest, PayloadTooLarge, UnsupportedMediaType, the errors of `use`, and ClientGone if the client
    disconnects, which cancels work that still waits for a thread.
    """
    content_type = _content_type(request)
    if content_type != "application/json":  # also prevents web pages from posting here without a CORS check
        raise UnsupportedMediaType(
            f"The body must be sent with Content-Type: application/json, not '{content_type[:100]}'."
        )
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise UnsupportedMediaType("Compressed bodies are not accepted.")
    raw = await read_body(request, max_body_bytes(state))

    def work() -> tuple[R | None, list[str], ApiError | None]:
        try:
            parsed, unknown = parse(raw, cls, strict=state.config.server.strict_params)
            return use(parsed), unknown, None
        except ApiError as error:  # drop the frames that hold the parsed body, because freeing a large body is slow
            error.__traceback__ = error.__context__ = error.__cause__ = None
            return None, [], error

    # a template in the request is a program: its run time does not depend on its size
    size = max(len(raw), SMALL) if state.config.server.trust_request_chat_template else len(raw)
    if state.threads.takes_long(size):
        used, unknown, refusal = await sse.unless_disconnected(request, state.threads.run(size, work))
    else:
        used, unknown, refusal = await state.threads.run(size, work)
    if (connection := request.scope.get("state", {}).get("connection")) is not None:
        connection.forget_body()
    if refusal is not None:
        raise refusal
    if unknown:
        request.scope["unknown_parameters"] = unknown
        _log_once(unknown, state)
    return used


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


def _content_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def max_body_bytes(state: ServerState) -> int:
    limit = state.config.server.max_body_size
    return limit or max(MIN_BODY_BYTES, BYTES_PER_TOKEN * (state.model.max_model_len if state.model else 0))


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body. Raises PayloadTooLarge, and ClientGone if the client disconnects."""
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared[:20]) > limit:
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


def _log_once(unknown: list[str], state: ServerState) -> None:
    for name in unknown:
        if name not in state.unknown_fields and len(state.unknown_fields) < _MAX_NAMES:
            state.unknown_fields.add(name)
            logger.warning(
                "requests have a field that is not known and is ignored (--strict-params refuses it): %s",
                name.encode("unicode_escape").decode("ascii"),
            )
