"""Owners of objects, and pages of lists of objects."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from quire.server.http.caller import caller
from quire.server.http.numbers import bounded_int


def owner(request: Request) -> str:
    """Return the owner of the files and batches that a request may see: by its API key, or all with only one key."""
    return caller(request).owner or ""


def page_size(request: Request, largest: int) -> int:
    """Return the `limit` of a list. Raises BadRequest."""
    given = request.query_params.get("limit", str(min(largest, 20) if largest < 10_000 else largest))
    return bounded_int(given, 1, largest, "limit")


def ends(items: list[Any]) -> dict[str, str | None]:
    """Return `first_id` and `last_id` of a list."""
    return {"first_id": items[0].id if items else None, "last_id": items[-1].id if items else None}
