"""Failures since the start, for the page at `/` and /server_info: refused and failed requests, and engines that
died. Nothing of a request's content is kept; the log has the message, under the request's id.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

import msgspec

from quire.server.values import Json

NUM_ERRORS = 50  # kept, the newest


class Failure(msgspec.Struct, kw_only=True):
    """One request that was answered with an error status."""

    time: float  # seconds since the epoch
    method: str
    route: str  # as declared, such as /v1/models/{model_id:path}; none: no such route
    status: int
    type: str
    code: str | None
    param: str | None
    request_id: str


class Restarts(msgspec.Struct, kw_only=True):
    since: float  # when this server started, seconds since the epoch
    engine: int  # deaths of engines, each followed by a new one
    last: float | None  # time of the newest


@dataclass(slots=True)
class Incidents:
    """The incidents of one server process, written by its event loop."""

    since: float = field(default_factory=time.time)
    num_deaths: int = 0
    last_death: float | None = None
    errors: deque[Failure] = field(default_factory=lambda: deque(maxlen=NUM_ERRORS))

    def record_death(self) -> None:
        """Record the death of an engine."""
        self.num_deaths += 1
        self.last_death = time.time()

    def record_error(self, **facts: Json) -> None:
        """Record an answer with an error; `facts` are the fields of `Failure` but the time."""
        self.errors.append(Failure(time=time.time(), **facts))

    def restarts(self) -> Restarts:
        return Restarts(since=self.since, engine=self.num_deaths, last=self.last_death)

    def recent_errors(self) -> list[Failure]:
        """Return the newest first."""
        return list(reversed(self.errors))
