"""Reads a multipart form with one file, which is streamed to a temporary file."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

from starlette.datastructures import FormData
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request

from quire.server.errors import ApiError, BadRequest, NotInstalled, UnsupportedMediaType
from quire.server.http.caller import connection_of
from quire.server.http.numbers import bounded_int
from quire.server.http.sse import ClientGone

MAX_FORM_BYTES = 1 << 16  # in addition to the file


def declared_size(request: Request, most: int, too_large: Callable[[], ApiError]) -> int | None:
    """Return the body size in its header; None if it comes in chunks. Raises `too_large()` above `most` bytes."""
    if (given := request.headers.get("content-length")) is None:
        return None
    if (size := bounded_int(given, 0, 2**63 - 1, "Content-Length")) > most:
        raise too_large()
    return size


async def read_form(
    request: Request, most: int, too_large: Callable[[], ApiError], what: str, max_fields: int = 16
) -> FormData:
    """Return the form in a body of at most `most` bytes; raises `too_large()` above that. `what` names, for errors, the
    required content. Raises BadRequest, NotInstalled, UnsupportedMediaType, ClientGone.
    """
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise UnsupportedMediaType(f"{what} must be sent as multipart/form-data.")
    try:
        from python_multipart.exceptions import MultipartParseError
    except ModuleNotFoundError:
        raise NotInstalled(
            "This server cannot read uploads: it lacks the package python-multipart (pip install 'quire[files]')."
        ) from None
    body = _counted(request, most, too_large)
    parser = MultiPartParser(request.headers, body, max_files=1, max_fields=max_fields, max_part_size=MAX_FORM_BYTES)
    try:
        return await parser.parse()
    except ClientDisconnect:
        raise ClientGone from None
    except (MultiPartException, MultipartParseError, KeyError) as error:
        raise BadRequest(f"The form is not valid: {getattr(error, 'message', error)}") from None


async def _counted(request: Request, most: int, too_large: Callable[[], ApiError]) -> AsyncGenerator[bytes, None]:
    """Yield the body. Bytes that were read go to a temporary file, so they no longer count as memory."""
    connection, size = connection_of(request.scope), 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise too_large()
        yield part
        if connection is not None:
            connection.forget_body()
