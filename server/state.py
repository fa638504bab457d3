"""Server state that the routes read: the status, the served model, and the engine client.

Written only by `frontends/frontend.py`, `frontends/member.py` and `offline/runtime.py`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quire.configs.config import Config
from quire.engine.messages import EngineStats, Ready
from quire.server.errors import BadRequest, NotFound, Unavailable
from quire.server.generate.structures import Structures
from quire.server.http.resumable import Streams
from quire.server.incidents import Incidents
from quire.server.library.pulls import Pulls
from quire.server.lora.adapters import Adapters
from quire.server.lora.shared import SharedAdapters
from quire.server.media.audio.service import Speech
from quire.server.media.service import Images
from quire.server.metrics.history import History
from quire.server.model_info import ModelInfo
from quire.server.queue_wait import QueueWait, retry_after
from quire.server.turns.threads import Threads

if TYPE_CHECKING:
    from quire.server.api.openai.responses.service import Responses
    from quire.server.batches.runner import Batches
    from quire.server.engines.handle import EngineHandle
    from quire.server.keys.audit import AuditLog
    from quire.server.keys.request_log import RequestLog
    from quire.server.keys.ring import KeyRing
    from quire.server.request.formats import Formats
    from quire.server.request.sink import MetricsSink, View
    from quire.server.startup.model_details import LazyDetails
    from quire.server.text.tokenizer import Tokenizer
    from quire.server.traces import Traces

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class ServerState:
    """One per server process."""

    config: Config
    names: list[str]  # model names; responses use the first
    version: str
    system_fingerprint: str
    aliases: frozenset[str] = frozenset()  # names that requests may use and no answer shows
    created: int = field(default_factory=lambda: int(time.time()))
    phase: str = "starting"
    fraction: float = 0.0  # completed fraction of the phase
    model: ModelInfo | None = None
    tokenizer: Tokenizer | None = None
    formats: Formats | None = None  # known with the tokenizer
    client: EngineHandle | None = None
    metrics: MetricsSink | None = None
    details: LazyDetails | None = None  # for the model's files; known with the tokenizer
    ready: Ready | None = None  # None while loading, and again while a new engine starts
    stats: EngineStats = field(default_factory=EngineStats)  # the engine's latest gauges
    draining: bool = False
    failure: str | None = None  # reason of the engine's final failure
    stalled: str | None = None  # reason for which the engine seems to hang
    num_in_flight: int = 0  # HTTP requests being answered, except probes
    num_in_flight_elsewhere: int = 0  # HTTP requests in other frontends, as last reported
    # the metrics of all frontends, if there are several; raises TimeoutError
    scrape: Callable[[View], Awaitable[bytes]] | None = None
    idle: asyncio.Event = field(default_factory=asyncio.Event)  # set while num_in_flight is 0
    threads: Threads = field(default_factory=Threads)
    queue_wait: QueueWait = field(default_factory=QueueWait)
    incidents: Incidents = field(default_factory=Incidents)
    structures: Structures = field(default_factory=Structures)
    unknown_fields: set[str] = field(default_factory=set)  # fields without an effect, already logged
    num_reserved: int = 0  # choices of admitted HTTP requests, until their answers have ended
    num_waiting_of: Counter[str] = field(default_factory=Counter)  # admitted choices without a token, by name of a key
    keys: KeyRing | None = None  # if there are API keys; set with the routes
    audit: AuditLog | None = None  # with --audit-log
    request_log: RequestLog | None = None  # with --enable-log-requests
    traces: Traces | None = None  # with --otlp-traces-endpoint
    batches: Batches | None = None  # with --batch-dir
    responses: Responses | None = None  # set with the routes
    pulls: Pulls = field(default_factory=Pulls)  # downloads that clients asked for
    history: History = field(default_factory=History)  # for the metrics
    streams: Streams = field(default_factory=Streams)
    images: Images = None  # made from the settings
    speech: Speech = None  # the same
    adapters: Adapters | SharedAdapters = None  # the same

    def __post_init__(self) -> None:
        self.images = Images(self.config)
        self.speech = Speech(self.config.parallel.spans_machines)
        several = self.config.server.api_server_count > 1
        self.adapters = SharedAdapters(self.config) if several else Adapters(self.config)
        self.idle.set()

    def progress(self, phase: str, fraction: float) -> None:
        self.phase, self.fraction = phase, fraction

    def enter(self) -> None:
        self.num_in_flight += 1
        self.idle.clear()

    def leave(self) -> None:
        self.num_in_flight -= 1
        if self.num_in_flight == 0:
            self.idle.set()

    @property
    def status(self) -> str:
        """Return failed, draining, loading, stalled (requests are accepted and wait) or ready."""
        if self.failure is not None:
            return "failed"
        if self.draining:
            return "draining"
        if self.ready is None:
            return "loading"
        return "ready" if self.stalled is None else "stalled"

    def health(self) -> dict[str, Any]:
        """Return the JSON body of /health and /ready; 200 exactly when `status` is "ready"."""
        body: dict[str, Any] = {"status": self.status}
        if self.status == "loading":
            body |= {"phase": self.phase, "percent": round(100 * self.fraction)}
        if (reason := self.failure if self.failure is not None else self.stalled) is not None:
            body["reason"] = reason
        return body

    def require_ready(self) -> ModelInfo:
        """Raise Unavailable if no request can be accepted now."""
        match self.status:
            case "failed":
                raise Unavailable("The engine has failed and the server is ending.", code="engine_dead", retry_after=10)
            case "draining":
                raise Unavailable("The server is shutting down.", code="shutting_down", retry_after=5)
            case "loading" if self.model is None:  # during a restart requests wait for the new engine
                raise Unavailable(
                    f"The model is loading: {self.phase} {100 * self.fraction:.0f}%.",
                    code="model_loading",
                    retry_after=2,
                )
        return self.model

    def require_room(self, num_choices: int = 1, num_tokens: int = 0, param: str | None = None) -> None:
        """Raise Unavailable if, with `num_choices` more, waiting choices would exceed --max-num-queued-reqs, or, with
        `num_tokens` more (each choice counts its prompt), the tokens of waiting prompts --max-num-queued-tokens;
        BadRequest for the field `param` if a limit would be exceeded even on an idle server.
        """
        server, load = self.config.server, max(self.client.load, self.num_reserved)
        num_waiting = self.would_wait(num_choices)
        num_waiting_tokens = self.client.num_waiting_tokens + num_tokens if num_waiting else 0
        for count, limit, what, flag in (
            (num_waiting, server.max_num_queued_reqs, "choices of requests", "--max-num-queued-reqs"),
            (num_waiting_tokens, server.max_num_queued_tokens, "tokens of prompts", "--max-num-queued-tokens"),
        ):
            if limit and count > limit:
                if not load and param is not None:
                    raise BadRequest(
                        f"{param}: {count} {what} would have to wait, and this server's limit is {limit} ({flag}).",
                        param=param,
                    )
                seconds = self.queue_wait.seconds(num_waiting)
                raise Unavailable(
                    f"With this request {count} {what} would wait, and the limit is {limit} ({flag}). The last of "
                    f"them would wait for about {math.ceil(seconds)} seconds.",
                    retry_after=retry_after(seconds),
                )

    @property
    def num_rows(self) -> int:
        """Return the number of choices that can run at once; 0 while no engine is ready."""
        return self.ready.worker.max_num_seqs if self.ready is not None else 0

    def would_wait(self, num_choices: int = 0) -> int:
        """Return the number of choices that wait, or would with `num_choices` more."""
        num_open = max(self.client.load, self.num_reserved) + num_choices
        num_waiting = max(num_open - self.num_rows, 0)
        if stuck := min(self.stats.num_waiting, self.client.load):  # the KV cache is full but rows are free
            num_waiting = max(num_waiting, stuck + num_choices)
        return num_waiting

    def require_batches(self) -> Batches:
        """Raise NotFound without --batch-dir."""
        if self.batches is None:
            raise NotFound("This server keeps no files: start it with --batch-dir DIR for /v1/files and /v1/batches.")
        return self.batches

    @property
    def all_names(self) -> list[str]:
        """Return the names that the API lists: the model's, then those of LoRA adapters."""
        return [*self.names, *self.adapters.loaded] if self.adapters.loaded else self.names

    @property
    def sources(self) -> dict[str, str]:
        """Return the folder, file or id of the model of each name."""
        return dict.fromkeys(self.names, self.config.model.model)

    def answering(self, name: str | None) -> str:
        """Return the name of the model in an answer of OpenAI's form: that of the adapter asked for, else the first."""
        return name if name in self.adapters.loaded else self.names[0]

    def display_name(self, name: str | None) -> str:
        """Return the name for the answer to a request for `name`: the same if it is listed, else the first."""
        return name if name in self.all_names else self.names[0]

    def require_model(self, name: str | None, known: Sequence[str]) -> None:
        """Raise NotFound, which names the `known` ones, unless `name` is absent, empty or a name of the model."""
        if name and name not in self.all_names and name not in self.aliases:
            names = ", ".join(f"'{one}'" for one in known[:20]) or "no model for this key"
            raise NotFound(
                f"The model '{name[:200]}' does not exist. This server has {names}.",
                param="model",
                code="model_not_found",
            )
