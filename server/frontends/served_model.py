"""One served model: its facts, its tokenizer, and a client per engine."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from quire.configs.config import Config
from quire.engine.messages import EngineStats, Progress, Ready
from quire.server.engines.silence import Silence
from quire.server.model_info import context_length
from quire.server.startup.engine_group import load_tokenizer, model_info
from quire.server.state import ServerState

if TYPE_CHECKING:  # imported late, because these imports are slow
    from quire.server.engines.client import EngineClient
    from quire.server.engines.pool import EnginePool
    from quire.server.request.sampling import SamplingDefaults

logger = logging.getLogger("quire")


class ServedModel:
    """Fills `state` as the parts of a model load. The model opens once routes, tokenizer and an engine are ready;
    `on_open` is called the first time.
    """

    def __init__(self, config: Config, state: ServerState, on_open: Callable[[Ready], None]):
        self.config, self.state, self.on_open = config, state, on_open
        self.has_routes = False
        self.sampling_defaults: SamplingDefaults | None = None
        self._pool: EnginePool | None = None  # set if there are several engines
        self._silences: list[Silence] = []  # one per engine, after `connect`

    @property
    def chats(self) -> bool:
        """Return whether the model has a chat template."""
        return bool(self.state.tokenizer and self.state.tokenizer.chat_templates)

    # ---- start

    async def load_tokenizer(self, model_folder: str, tokenizer_folder: str) -> None:
        """Load the tokenizer. Raises ValueError for missing or malformed files."""
        from quire.server.request.sampling import read_sampling_defaults
        from quire.server.startup.model_details import LazyDetails

        self.state.details = LazyDetails(model_folder)
        self.sampling_defaults = read_sampling_defaults(self.config, model_folder)
        loaded = await load_tokenizer(self.config, tokenizer_folder, self.state.images, model_folder)
        self.state.speech.open(model_folder, loaded[0])
        await self.state.adapters.open(self.state.client)
        self.state.tokenizer, self.state.formats = loaded
        self.open()

    def connect(
        self, on_stats: Callable[[int, EngineStats], None], on_progress: Callable[[int, Progress], None]
    ) -> list[EngineClient]:
        """Return a client per engine, not yet connected. The callbacks get the engine's index first."""
        from quire.server.engines.client import EngineClient
        from quire.server.engines.pool import EnginePool

        def observe(engine: int, stats: EngineStats) -> None:
            self._observe_stats(engine, stats)
            on_stats(engine, stats)

        numbers = range(self.config.parallel.data_parallel_size)
        self._engine_stats = [EngineStats() for _ in numbers]
        clients = [
            EngineClient(functools.partial(observe, engine), functools.partial(on_progress, engine), engine)
            for engine in numbers
        ]
        self._pool = EnginePool(clients) if len(clients) > 1 else None
        self.state.client = self._pool or clients[0]
        self._silences = [Silence(client, functools.partial(_is_busy, client)) for client in clients]
        return clients

    def progress(self, phase: str, fraction: float) -> None:
        self.state.progress(phase, fraction)

    def open(self) -> None:
        """Open if everything is loaded. Called after each part has been loaded."""
        state = self.state
        if state.client is None or state.client.ready is None:
            return
        if state.tokenizer is None or not self.has_routes:
            self.progress("loading tokenizer", 0.0)
            return
        ready, first = state.client.ready, state.model is None
        if first:
            from quire.server.metrics.pool import make_metrics

            state.model = model_info(self.config, ready.worker, state.tokenizer, self.sampling_defaults)
            if state.model.writes:
                logger.info("default sampling parameters: %s", self.sampling_defaults.describe())
            if not self.chats and state.model.writes:
                logger.warning(
                    "the model has no chat template%s: /v1/chat/completions will return 400 and /v1/completions "
                    "answers; set one with --chat-template",
                    " in Jinja, and its TEMPLATE is in Ollama's language" if state.model.preset.entry.template else "",
                )
            state.images.check_worker(ready.worker.media)
            state.speech.check_worker(ready.worker.media)
            state.metrics = make_metrics(self.config, state.names[0], ready.worker)
        else:  # a new engine may have chosen another context length
            state.model = dataclasses.replace(
                state.model, max_model_len=context_length(ready.worker), vocab_size=ready.worker.vocab_size
            )
        state.ready = ready
        if first:
            self.on_open(ready)
            if state.model.writes:
                state.structures.warm(state)

    # ---- running

    async def watch(self) -> None:
        """Set `state.stalled` while an engine has requests and completes no step for `health_stall_timeout` seconds."""
        timeout = self.config.server.health_stall_timeout
        tick = min(timeout / 20, 1.0)
        while timeout:
            await asyncio.sleep(tick)
            for silence in self._silences:
                silence.tick(tick)
            longest = max((silence.seconds for silence in self._silences), default=0.0)
            self.state.stalled = (
                f"no step has ended for {longest:.0f} seconds, and requests wait" if longest >= timeout else None
            )

    def _observe_stats(self, engine: int, stats: EngineStats) -> None:
        self._engine_stats[engine] = stats
        self.state.queue_wait.observe(engine, stats)
        every = self._engine_stats
        self.state.stats = EngineStats(
            sum(one.num_running for one in every),
            sum(one.num_waiting for one in every),
            sum(one.kv_cache_usage for one in every) / len(every),
        )

    def observe_stats(self, engine: int, stats: EngineStats) -> None:
        """Publish an engine's statistics. With several frontends only the parent does: each receives the same."""
        if self.state.metrics is not None:
            self.state.metrics.for_engine(engine).observe_stats(stats)

    def on_death(self, engine: int) -> None:
        """Handle the death of an engine, after its client was notified."""
        self.state.incidents.record_death()
        if self._pool is not None:
            self._pool.forget(engine)
        self.state.ready = self.state.client.ready  # another engine may be up
        if self.state.ready is None:
            self.progress("restarting the engine", 0.0)

    async def close(self, reason: str | None = None) -> None:
        """Fail every request, and every later one."""
        if self.state.client is not None:
            await (self.state.client.close() if reason is None else self.state.client.close(reason))
        self.state.structures.close()


def _is_busy(client: EngineClient) -> bool:
    return client.ready is not None and client.load + client.num_background > 0
