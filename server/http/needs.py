"""Protocols of the server for functions that read, admit and answer HTTP requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from quire.server.generate.needs import Generation, Running, Transcribing
from quire.server.keys.account import Accounts
from quire.server.keys.needs import Choice, Reservation
from quire.server.request.needs import (
    Adapters,
    ConfiguredEngine,
    Encoding,
    Engine,
    Images,
    Media,
    Prompting,
    Queue,
    Readiness,
    Settings,
)

if TYPE_CHECKING:
    from quire.server.http.resumable import Streams as ResumableStreams
    from quire.server.turns.threads import Threads as ThreadsOfServer

__all__ = [
    "Accounts",
    "Adapters",
    "Admission",
    "Body",
    "BodyLimit",
    "Choice",
    "Completion",
    "ConfiguredEngine",
    "Drain",
    "Encoding",
    "Engine",
    "Generation",
    "Health",
    "Images",
    "Media",
    "Preparing",
    "Prompting",
    "Queue",
    "Readiness",
    "Reservation",
    "Running",
    "Settings",
    "Streams",
    "Threads",
    "Transcribing",
    "Transcriptions",
    "Vectors",
]


class Threads(Protocol):
    threads: ThreadsOfServer


class Streams(Protocol):
    """Event streams that a client may resume."""

    streams: ResumableStreams


class Drain(Protocol):
    """Requests in flight, for which the shutdown waits."""

    def enter(self) -> None: ...
    def leave(self) -> None: ...


class Health(Readiness, Protocol):
    @property
    def status(self) -> str: ...
    def health(self) -> dict[str, Any]: ...


class BodyLimit(Images, Settings, Protocol):
    """The state needed to know how large a body may be."""


class Body(BodyLimit, Threads, Protocol):
    """The state needed to read a body, in threads if it is large."""

    unknown_fields: set[str]


class Admission(Queue, Adapters, Choice, ConfiguredEngine, Protocol):
    """The state needed to decide whether a request is accepted."""


class Preparing(Prompting, Admission, Protocol):
    """The state needed to accept a request, and to prepare its prompt."""


class Transcriptions(Transcribing, Body, Admission, Protocol):
    """A route that answers with the text of audio."""


class Vectors(Encoding, Body, Running, Admission, Protocol):
    """A route that answers with vectors."""


class Completion(Vectors, Generation, Preparing, Streams, Protocol):
    """A route that answers with generated text."""

    system_fingerprint: str
