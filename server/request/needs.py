"""The parts of the server that reading and preparing a request uses, as protocols.

A route or helper is typed with the smallest protocol that has the attributes it uses, so its signature shows its
dependencies, and a test passes an object with these attributes. `ServerState` has all of them. Its `model`,
`tokenizer`, `formats` and `client` exist once the server is ready: after `require_ready`. Each folder has its own
`needs.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections import Counter

    from quire.configs.config import Config
    from quire.engine.messages import EngineStats, Ready
    from quire.server.engines.handle import EngineHandle
    from quire.server.lora.served import ChangeableAdapters
    from quire.server.media.audio.service import Speech as SpeechOfModel
    from quire.server.media.service import Images as ImagesOfModel
    from quire.server.model_info import ModelInfo
    from quire.server.queue_wait import QueueWait
    from quire.server.request.formats import Formats as FormatsOfModel
    from quire.server.request.sink import MetricsSink
    from quire.server.text.tokenizer import Tokenizer


class Settings(Protocol):
    config: Config


class Model(Protocol):
    """The served model, as requests are checked against it."""

    model: ModelInfo


class Text(Protocol):
    tokenizer: Tokenizer


class Formats(Protocol):
    """The formats of the model's thoughts and tool calls."""

    formats: FormatsOfModel


class Media(Protocol):
    images: ImagesOfModel


class Speech(Protocol):
    speech: SpeechOfModel


class Adapters(Protocol):
    adapters: ChangeableAdapters


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


class Metrics(Protocol):
    metrics: MetricsSink | None


class ConfiguredEngine(Engine, Settings, Protocol):
    """The engines, and their settings."""


class Images(Media, Model, Protocol):
    """Parts of the server that load the images of a prompt."""


class Encoding(Text, Model, Protocol):
    """Parts of the server that turn texts into token ids that fit the model."""


class Prompting(Encoding, Images, Formats, Settings, Protocol):
    """Parts of the server that turn a conversation or text into the token ids of a prompt."""
