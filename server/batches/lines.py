"""The input of a batch, one JSON object per line:
`{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from quire.server.batches.store import Line
from quire.server.errors import BadRequest

MAX_LINES = 50_000
MAX_LINE_BYTES = 16 << 20
MAX_CUSTOM_ID = 512  # characters
MAX_ERRORS = 100  # reported per batch


class InputLine(msgspec.Struct):
    """`body` is not looked into: the endpoint reads it, and refuses it as it would refuse a request."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Streaming(msgspec.Struct):
    stream: msgspec.Raw = msgspec.Raw(b"false")


_decode = msgspec.json.Decoder(InputLine).decode
_decode_streaming = msgspec.json.Decoder(_Streaming).decode


def read_lines(path: Path, endpoint: str) -> tuple[list[Line], list[dict[str, Any]]]:
    """Return the lines of an input file, and the errors of those that cannot be run. Blank lines do not count."""
    lines: list[Line] = []
    errors: list[dict[str, Any]] = []
    seen: set[str] = set()
    with open(path, "rb") as file:
        for number, (start, text) in enumerate(_split(file), start=1):
            if not text.strip():
                continue
            problem, param, custom_id = _check(text, endpoint, seen)
            if problem is not None:
                errors.append({"code": "invalid_line", "line": number, "message": problem, "param": param})
            elif len(lines) == MAX_LINES:
                errors.append(_too_many())
            else:
                seen.add(custom_id)
                lines.append(Line(number, start, len(text), custom_id))
            if len(errors) >= MAX_ERRORS or len(lines) > MAX_LINES:
                break
    if not lines and not errors:
        errors.append({"code": "empty_file", "line": None, "message": "The file has no requests.", "param": None})
    return lines, errors


def _too_many() -> dict[str, Any]:
    message = f"A batch may have at most {MAX_LINES} requests."
    return {"code": "too_many_requests", "line": None, "message": message, "param": None}


def _split(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield (position, bytes) of each line; of a line that is too long only a first part."""
    start = 0
    while text := file.readline(MAX_LINE_BYTES + 1):
        length = len(text)
        while len(text) > MAX_LINE_BYTES and not text.endswith(b"\n") and (rest := file.readline(1 << 20)):
            length += len(rest)
            if rest.endswith(b"\n"):
                break
        yield start, text
        start += length


def _check(text: bytes, endpoint: str, seen: set[str]) -> tuple[str | None, str | None, str]:
    """Return (what is wrong, the field at fault, custom_id)."""
    if len(text) > MAX_LINE_BYTES:
        return f"The line is longer than {MAX_LINE_BYTES} bytes.", None, ""
    try:
        line = _decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        return f"The line is not a request of a batch: {error}", None, ""
    if not 0 < len(line.custom_id) <= MAX_CUSTOM_ID:
        return f"custom_id must have 1 to {MAX_CUSTOM_ID} characters.", "custom_id", ""
    if line.custom_id in seen:
        return f"The custom_id '{line.custom_id[:100]}' is used by an earlier line.", "custom_id", ""
    if line.method != "POST":
        return "method must be POST.", "method", ""
    if line.url != endpoint:
        return f"url must be the endpoint of the batch, {endpoint}, not {line.url[:100]}.", "url", ""
    if not bytes(line.body).lstrip().startswith(b"{"):
        return "body must be an object.", "body", ""
    return None, None, line.custom_id


def read_body(path: Path, line: Line) -> bytes:
    """Return the body of a line that `read_lines` accepted. Raises OSError, and BadRequest if it asks for a stream."""
    with open(path, "rb") as file:
        file.seek(line.start)
        body = bytes(_decode(file.read(line.length)).body)
    try:
        streams = bytes(_decode_streaming(body).stream) not in (b"false", b"null")
    except (ValueError, RecursionError):  # no JSON, for the endpoint to say so
        return body
    if streams:
        raise BadRequest("stream is not available in batches.", param="stream")
    return body
