"""The messages between the parent of several frontend processes and each frontend."""

from __future__ import annotations

import msgspec

from quire.configs.config import Config
from quire.server.lora.shared import Change, Listing, Refusal
from quire.server.metrics.metrics import Counts
from quire.server.request.sink import View


class _Message(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, tag=True):
    pass


# ---- parent -> frontend


class Start(_Message):
    """The first message. `index` is the frontend's number."""

    config: Config
    index: int


class Phase(_Message):
    """Progress of startup until an engine reports its own."""

    phase: str
    fraction: float


class Load(_Message):
    """Load the tokenizer; both folders exist on this machine. Answered by `Loaded` or `CannotStart`."""

    model_folder: str
    tokenizer_folder: str


class Engine(_Message):
    """An engine was started: connect to it."""

    index: int
    address: str


class EngineGone(_Message):
    """The engine's process has ended. Its requests wait for the next one."""

    index: int
    reason: str


class EngineLeaves(_Message):
    """The engine drains: it finishes its requests; others wait for the next engine."""

    index: int


class Turn(_Message):
    """The frontend that may now try its suspects at the engine; the others send nothing new. None: all may send."""

    index: int
    frontend: int | None


class Elsewhere(_Message):
    """The load of the other frontends: open requests per engine, and HTTP requests being answered."""

    num_open: list[int]
    num_in_flight: int


class AdapterList(_Message):
    """All LoRA adapters. Answered by `Adopted` when the frontend serves these."""

    number: int
    listing: Listing


class AdaptersChanged(_Message):
    """The answer to `ChangeAdapters`: every frontend serves the new list, or the change was refused."""

    number: int
    refusal: Refusal | None


class Collect(_Message):
    """Request for the counts. Answered by `Snapshot`."""

    number: int


class Ping(_Message):
    """Check of the event loop. Answered by `Pong`."""


class Page(_Message):
    """The answer to `Scrape`."""

    number: int
    text: bytes


class Drain(_Message):
    """Refuse new requests, let running ones finish within `shutdown_timeout`, fail the rest, then send `Drained`."""


class Fail(_Message):
    """Fail every request, because no engine will run again; then send `Drained`."""

    reason: str


class End(_Message):
    """Stop serving, and exit."""


# ---- frontend -> parent


class Loaded(_Message):
    """The tokenizer is loaded. `chats`: it has a chat template."""

    chats: bool


class CannotStart(_Message):
    """The frontend cannot start; `reason` is an error for the user to correct."""

    reason: str


class Opened(_Message):
    """The frontend serves clients for the first time."""


class Busy(_Message):
    """The load of this frontend after a change, in the fields of `Elsewhere`."""

    num_open: list[int]
    num_in_flight: int


class ExplainedDeath(_Message):
    """The engine died while it ran requests of this frontend."""

    index: int


class Suspects(_Message):
    """Report of whether requests of this frontend are suspected of killing the engine. Answered by `Turn`."""

    index: int
    active: bool


class Snapshot(_Message):
    """The counts of this frontend so far, by engine.

    `number` is that of the `Collect`, or 0 for an unrequested snapshot.
    """

    number: int
    counts: list[Counts]


class Scrape(_Message):
    """Request for the metrics of all frontends. Answered by `Page`."""

    number: int
    view: View


class ChangeAdapters(_Message):
    """Request for a change of the LoRA adapters of all frontends. Answered by `AdaptersChanged`."""

    number: int
    change: Change


class Adopted(_Message):
    """The answer to `AdapterList`."""

    number: int


class Pong(_Message):
    """The answer to `Ping`: the event loop is running."""


class Drained(_Message):
    """This frontend has no requests left."""


ToFrontend = (
    Start
    | Phase
    | Load
    | Engine
    | EngineGone
    | EngineLeaves
    | Turn
    | Elsewhere
    | AdapterList
    | AdaptersChanged
    | Collect
    | Ping
    | Page
    | Drain
    | Fail
    | End
)
FromFrontend = (
    Loaded
    | CannotStart
    | Opened
    | Busy
    | ExplainedDeath
    | Suspects
    | Snapshot
    | Scrape
    | ChangeAdapters
    | Adopted
    | Pong
    | Drained
)
