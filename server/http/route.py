"""A row of a dialect's route table: the handler, and its entry in the OpenAPI document."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.responses import Response

# (starlette's Request, the parts of the server that the handler names) -> the response
Handler = Callable[..., Awaitable[Response]]
Schema = dict[str, Any]
EVENTS, NDJSON = "text/event-stream", "application/x-ndjson"
EMPTY = ()
ANY_OBJECT: Schema = {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}}


@dataclass(frozen=True, slots=True)
class Route:
    """`body`: the type of a JSON body, or an OpenAPI request body. `answer`: one or several types of a JSON answer, the
    media type of another, EMPTY for one without a body, or None if there are only errors. `stream`: the media type of
    the streamed answer. `query`: parameters and their schemas. `others`: types of non-error answers with a status code
    other than 200. `admin`: needs an administrator's API key, if there are API keys. `status`: of the answer. The
    handler's docstring describes the route: one sentence, then more; its "Raises" part is left out of the document.
    """

    method: str
    path: str
    handler: Handler
    body: type | Schema | None = None
    answer: object = None
    stream: str | None = None
    query: Mapping[str, Schema] = field(default_factory=dict)
    others: Mapping[str, type] = field(default_factory=dict)
    admin: bool = False
    status: int = 200

    def __post_init__(self) -> None:
        if isinstance(self.body, type):
            msgspec.json.Decoder(self.body)  # builds the type now: msgspec crashes if two threads do so at once

    @property
    def methods(self) -> list[str]:
        return ["GET", "HEAD"] if self.method == "GET" else [self.method]

    @property
    def types(self) -> list[Any]:
        """Return the types that the OpenAPI document describes."""
        body = [] if self.body is None or isinstance(self.body, dict) else [self.body]
        return [*body, *self.answers, *self.others.values()]

    @property
    def answers(self) -> tuple[Any, ...]:
        if self.answer is None or isinstance(self.answer, str):
            return ()
        return self.answer if isinstance(self.answer, tuple) else (self.answer,)


def page(largest: int, *, after: str = "after", order: bool = False) -> dict[str, Schema]:
    """Return the query parameters of a list: see `paging.py`."""
    query: dict[str, Schema] = {"limit": {"type": "integer", "minimum": 1, "maximum": largest}}
    query[after] = {"type": "string"}
    return query | ({"order": {"type": "string", "enum": ["asc", "desc"]}} if order else {})
