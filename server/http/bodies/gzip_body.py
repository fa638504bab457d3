"""Decompresses bodies sent with `Content-Encoding: gzip`, up to a size limit."""

from __future__ import annotations

import zlib

from quire.server.errors import BadRequest

_MAX_RATIO = 1032  # deflate's largest output per byte of input
_MAX_MEMBERS = 16  # each one copies the remaining input
_GZIP = 16 + zlib.MAX_WBITS


def largest_result(raw: bytes) -> int:
    """Return the maximum size of `raw` after decompression, in bytes."""
    return _MAX_RATIO * len(raw)


def decompress(raw: bytes, limit: int) -> bytes | None:
    """Return the bytes, or None if they are more than `limit`. Raises BadRequest for invalid or truncated gzip data."""
    parts, size = [], 0
    while raw or not parts:
        if len(parts) == _MAX_MEMBERS:
            raise BadRequest(f"The gzip of the body has more than {_MAX_MEMBERS} members.")
        stream = zlib.decompressobj(_GZIP)
        try:
            part = stream.decompress(raw, limit - size + 1)
        except zlib.error as error:
            raise BadRequest(f"The body is no gzip, as its Content-Encoding says: {error}.") from None
        parts.append(part)
        size += len(part)
        if size > limit:
            return None
        if not stream.eof:
            raise BadRequest("The gzip of the body is cut off.")
        raw = stream.unused_data
    return b"".join(parts)
