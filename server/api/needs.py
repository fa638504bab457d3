"""Protocols of the server for the routes of all dialects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from quire.server.http.needs import (
    Admission,
    Body,
    BodyLimit,
    Completion,
    Drain,
    Health,
    Preparing,
    Streams,
    Threads,
    Transcriptions,
    Vectors,
)
from quire.server.keys.account import Accounts
from quire.server.keys.needs import Choice, Names
from quire.server.request.needs import (
    Adapters,
    ConfiguredEngine,
    Encoding,
    Engine,
    Media,
    Metrics,
    Model,
    Prompting,
    Queue,
    Readiness,
    Settings,
    Text,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from quire.engine.messages import EngineStats
    from quire.server.batches.runner import Batches as BatchService
    from quire.server.request.sink import View
    from quire.server.startup.model_details import LazyDetails

__all__ = [
    "Accounts",
    "Adapters",
    "Admission",
    "Batches",
    "Body",
    "BodyLimit",
    "Choice",
    "Completion",
    "ConfiguredEngine",
    "Details",
    "Drain",
    "Encoding",
    "Engine",
    "Health",
    "Listing",
    "Load",
    "Media",
    "Model",
    "Names",
    "Preparing",
    "Prompting",
    "Queue",
    "Readiness",
    "Scrape",
    "Settings",
    "Streams",
    "Text",
    "Threads",
    "Tokenizing",
    "Transcriptions",
    "Vectors",
    "Version",
]


class Batches(Protocol):
    """Files and batches, with --batch-dir."""

    def require_batches(self) -> BatchService: ...


class Details(Protocol):
    """Details of the model's files."""

    details: LazyDetails


class Load(Protocol):
    """The HTTP requests that are being answered, and the engines' latest gauges."""

    num_in_flight: int
    num_in_flight_elsewhere: int
    stats: EngineStats


class Version(Protocol):
    version: str


class Scrape(Metrics, Readiness, Protocol):
    """The metrics, of all frontends if there are several."""

    scrape: Callable[[View], Awaitable[bytes]] | None


class Tokenizing(Prompting, Body, Readiness, Choice, Protocol):
    """A route that answers with a prompt, or with its tokens."""


class Listing(Prompting, Adapters, Choice, Protocol):
    """A route that lists models."""

    created: int
