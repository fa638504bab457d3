"""The client's time limit for a request: the field `timeout` of any body, and the header X-Request-Timeout."""

from __future__ import annotations

import math

import msgspec
from starlette.requests import Request

from quire.server.errors import BadRequest
from quire.server.http.parse_body import bad_request
from quire.server.request.limits import Seconds


class TimeLimit(msgspec.Struct):
    timeout: Seconds | None = None  # from the request's arrival to the end of its answer


_decode = msgspec.json.Decoder(TimeLimit).decode


def read_timeout(body: bytes) -> float | None:
    """Return seconds from the arrival of a request with a valid body to the end of its answer. Raises BadRequest."""
    if b"timeout" not in body:
        return None
    try:
        return _decode(body).timeout
    except msgspec.ValidationError as error:
        raise bad_request(error, None) from None


def seconds_of_header(request: Request) -> float | None:
    """Return the seconds in the header X-Request-Timeout. Raises BadRequest."""
    if (header := request.headers.get("x-request-timeout")) is None:
        return None
    try:
        total = math.nan if "_" in header else float(header)  # which Python's floats allow
    except ValueError:
        total = math.nan
    if not 0 < total < math.inf:
        raise BadRequest("The X-Request-Timeout header must be a number of seconds above 0.", param="X-Request-Timeout")
    return total
