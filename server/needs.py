"""The parts of the server as protocols, for the functions that use them.

A route or helper is typed with the smallest protocol that has the attributes it uses, so its signature says what it
depends on, and a test passes an object with these attributes. `ServerState` has all of them. Its `model`, `tokenizer`,
`formats` and `client` exist once the server is ready: after `require_ready`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from quire.server.keys.account import Accounts

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Awaitable, Callable, Sequence

    from quire.configs.config import Config
    from quire.engine.messages import EngineStats, Ready
    from quire.server.api.openai.responses.service import Responses as ResponseService
    from quire.server.batches.runner import Batches as BatchService
    from quire.server.engines.handle import EngineHandle
    from quire.server.generate.formats import Formats as FormatsOfModel
    from quire.server.http.threads import Threads as ThreadsOfServer
    from quire.server.lora.served import ChangeableAdapters
    from quire.server.media.service import Images as ImagesOfModel
    from quire.server.metrics.sink import MetricsSink
    from quire.server.metrics.view import View
    from quire.server.model_info import ModelInfo
    from quire.server.queue_wait import QueueWait
    from quire.server.startup.model_details import LazyDetails
    from quire.server.structured.service import Structures
    from quire.server.text.tokenizer import Tokenizer


# ---- one part each


class Settings(Protocol):
    config: Config


class Names(Protocol):
    """The names of the model, and of its adapters."""

    names: list[str]
    aliases: frozenset[str]

    @property
    def all_names(self) -> list[str]: ...
    def answering(self, name: str | None) -> str: ...
    def shown_name(self, name: str | None) -> str: ...
    def require_model(self, name: str | None, known: Sequence[str]) -> None: ...


class Model(Protocol):
    """The served model, as requests are checked against it."""

    model: ModelInfo


class Text(Protocol):
    tokenizer: Tokenizer


class Formats(Protocol):
    """How the model writes thoughts and tool calls."""

    formats: FormatsOfModel


class Media(Protocol):
    images: ImagesOfModel


class Adapters(Protocol):
    adapters: ChangeableAdapters


class Threads(Protocol):
    threads: ThreadsOfServer


class Readiness(Protocol):
    def require_ready(self) -> ModelInfo: ...


class Engine(Readiness, Protocol):
    """The engines, and their latest reports."""

    client: EngineHandle
    ready: Ready | None
    stats: EngineStats


class Queue(Protocol):
    """The room for requests that wait."""

    num_reserved: int
    num_waiting_of: Counter[str]
    queue_wait: QueueWait

    def would_wait(self, num_choices: int = 0) -> int: ...
    def require_room(self, num_choices: int = 1, num_tokens: int = 0, param: str | None = None) -> None: ...


class Drain(Protocol):
    """Requests in flight, which the shutdown waits for."""

    def enter(self) -> None: ...
    def leave(self) -> None: ...


class Batches(Protocol):
    """Files and batches, with --batch-dir."""

    def require_batches(self) -> BatchService: ...


class Responses(Protocol):
    responses: ResponseService


class Details(Protocol):
    """Details of the model's files."""

    details: LazyDetails


class Health(Readiness, Protocol):
    @property
    def status(self) -> str: ...
    def health(self) -> dict[str, Any]: ...


class Load(Protocol):
    """The HTTP requests that are being answered, and the engines' latest gauges."""

    num_in_flight: int
    num_in_flight_elsewhere: int
    stats: EngineStats


class Version(Protocol):
    version: str


class Scrape(Readiness, Protocol):
    """The metrics, of all frontends if there are several."""

    metrics: MetricsSink | None
    scrape: Callable[[View], Awaitable[bytes]] | None


# ---- the parts for one job


class ConfiguredEngine(Engine, Settings, Protocol):
    """The engines, and their settings."""


class Choice(Names, Accounts, Protocol):
    """To decide which models a request may name."""


class Images(Media, Model, Protocol):
    """To load the images of a prompt."""


class BodyLimit(Images, Settings, Protocol):
    """To know how large a body may be."""


class Body(BodyLimit, Threads, Protocol):
    """To read a body, in threads if it is large."""

    unknown_fields: set[str]


class Encoding(Text, Model, Protocol):
    """To turn texts into token ids that fit the model."""


class Prompting(Encoding, Images, Formats, Settings, Protocol):
    """To turn a conversation or text into the token ids of a prompt."""


class Tokenizing(Prompting, Body, Readiness, Choice, Protocol):
    """A route that answers with a prompt, or with its tokens."""


class Listing(Adapters, Model, Choice, Settings, Protocol):
    """A route that lists models."""

    created: int


class Admission(Queue, Adapters, Choice, ConfiguredEngine, Protocol):
    """To decide whether a request is accepted."""


class Preparing(Prompting, Admission, Protocol):
    """To accept a request, and to prepare its prompt."""


class Reservation(Queue, Accounts, Protocol):
    """To reserve the room of an accepted request, and to charge it."""


class Running(Reservation, Settings, Protocol):
    """To run accepted requests for vectors."""

    client: EngineHandle


class Generation(Encoding, Running, Protocol):
    """To run accepted requests for text."""

    structures: Structures


class Vectors(Encoding, Body, Running, Admission, Protocol):
    """A route that answers with vectors."""


class Completion(Vectors, Generation, Preparing, Protocol):
    """A route that answers with generated text."""

    system_fingerprint: str
