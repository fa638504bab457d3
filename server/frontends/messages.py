"""The messages between the parent of several frontend processes and each frontend."""

from __future__ import annotations

import msgspec

from quire.configs.config import Config
from quire.server.metrics.metrics import Counts


class _Message(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, tag=True):
    pass


# ---- parent -> frontend


class Start(_Message):
    """The first message. `index` is the frontend's number."""

    config: Config
    index: int


class Phase(_Message):
    """Progress of the start, until an engine reports its own."""

    phase: str
    fraction: float


class Load(_Message):
    """Load the tokenizer: both folders are on this machine. Answered by `Loaded` or `CannotStart`."""

    model_folder: str
    tokenizer_folder: str


class Engine(_Message):
    """An engine was started: connect to it."""

    index: int
    address: str


class EngineGone(_Message):
    """That engine's process has ended. Its requests wait for the next one."""

    index: int
    reason: str


class Elsewhere(_Message):
    """The load of the other frontends: open requests per engine, and HTTP requests being answered."""

    num_open: list[int]
    num_in_flight: int


class Collect(_Message):
    """Answered by `Snapshot`."""

    number: int


class Ping(_Message):
    """Answered by `Pong`."""


class Page(_Message):
    """The answer to `Scrape`."""

    number: int
    text: bytes


class Drain(_Message):
    """Refuse new requests, let running ones finish within `shutdown_timeout`, end the rest; then say `Drained`."""


class Fail(_Message):
    """There will be no engine any more: end every request with an error; then say `Drained`."""

    reason: str


class End(_Message):
    """Stop serving, and exit."""


# ---- frontend -> parent


class Loaded(_Message):
    """The tokenizer is there."""


class CannotStart(_Message):
    """What the user has to correct."""

    reason: str


class Opened(_Message):
    """Serves clients, for the first time."""


class Busy(_Message):
    """How much is open here, when that has changed. As in `Elsewhere`."""

    num_open: list[int]
    num_in_flight: int


class TrialDeath(_Message):
    """That engine died while it tried requests of this frontend that were suspected of the death before."""

    index: int


class Snapshot(_Message):
    """What was counted here until now, by engine.

    `number` is that of the `Collect`, or 0 for one that was not asked for.
    """

    number: int
    counts: list[Counts]


class Scrape(_Message):
    """Somebody wants the metrics of all frontends: answered by `Page`."""

    number: int


class Pong(_Message):
    """The event loop turns here."""


class Drained(_Message):
    """No request is left here."""


ToFrontend = Start | Phase | Load | Engine | EngineGone | Elsewhere | Collect | Ping | Page | Drain | Fail | End
FromFrontend = Loaded | CannotStart | Opened | Busy | TrialDeath | Snapshot | Scrape | Pong | Drained
