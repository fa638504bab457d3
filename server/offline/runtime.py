"""The engine, its client and the tokenizer of an offline `LLM`, started as in `quire serve` but without HTTP."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable

from quire.configs.config import Config
from quire.configs.options import removed_settings
from quire.engine.messages import EngineStats, Progress
from quire.server.engines.client import EngineClient
from quire.server.engines.supervisor import EngineFailed, Supervisor
from quire.server.request.sampling import SamplingDefaults, read_sampling_defaults
from quire.server.startup.engine_group import EngineGroup, load_tokenizer, model_info
from quire.server.startup.entry_settings import with_entry
from quire.server.startup.model_names import accepted_names, served_names
from quire.server.startup.plan_table import plan_table
from quire.server.startup.progress import StartProgress
from quire.server.state import ServerState

logger = logging.getLogger("quire")


class Runtime:
    """Lives on one event loop: `start`, use `state.client` and `state.tokenizer`, `stop`.

    An engine that dies is replaced, as under `quire serve`.
    """

    def __init__(self, config: Config):
        self.config = config = with_entry(config)
        self.state = ServerState(config, served_names(config), "", "", accepted_names(config))
        self.engines = EngineGroup(config)
        self._sampling_defaults: SamplingDefaults | None = None
        self._ready = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    @property
    def supervisor(self) -> Supervisor:
        return self.engines.supervisors[0]

    async def start(self) -> None:
        """Start the engine; returns after it has completed a step.

        Raises ValueError for a wrong model or setting, RuntimeError if the engine cannot start.
        """
        for warning in removed_settings(self.config):
            logger.warning("%s", warning)
        bar = StartProgress()
        try:
            self.engines.start_if_local()
            self._running = asyncio.create_task(self._run(bar.update))
            ready = asyncio.create_task(self._ready.wait())
            await asyncio.wait({ready, self._running}, return_when=asyncio.FIRST_COMPLETED)
            ready.cancel()
            if self._running.done():
                self._running.result()  # raises the ValueError
            self.require_alive()
        finally:
            bar.close()
        worker = self.state.client.ready.worker
        logger.info("%s", plan_table(worker))
        for warning in worker.warnings:
            logger.warning("%s", warning)

    async def _run(self, progress: Callable[[str, float], None]) -> None:
        """Run the engine until restarts fail; then fail all open and later requests.

        Raises ValueError for a wrong model or setting.
        """
        try:
            await self.engines.run(self, lambda again: self._open(), lambda engine, stats: None, progress)
        except Exception as error:
            if not isinstance(error, EngineFailed | ValueError):
                logger.exception("the engine's supervisor failed")
            self.state.failure = str(error) or type(error).__name__
            if self.state.client is not None:
                await self.state.client.close()
            if isinstance(error, ValueError):
                raise

    def require_alive(self) -> None:
        """Raise RuntimeError if the engine has failed for good."""
        if self.state.failure is not None:
            raise RuntimeError(f"the engine failed: {self.state.failure}")

    # ---- callbacks of the engine group

    def connect(
        self, on_stats: Callable[[int, EngineStats], None], on_progress: Callable[[int, Progress], None]
    ) -> list[EngineClient]:
        client = EngineClient(self._observe_stats, functools.partial(on_progress, 0))
        self.state.client = client
        return [client]

    async def load_tokenizer(self, model_folder: str, tokenizer_folder: str) -> None:
        self._sampling_defaults = read_sampling_defaults(self.config, model_folder)
        loaded = await load_tokenizer(self.config, tokenizer_folder, self.state.images, model_folder)
        self.state.speech.open(model_folder, loaded[0])
        await self.state.adapters.open(self.state.client)
        self.state.tokenizer, self.state.formats = loaded
        self._open()

    def on_death(self, engine: int) -> None:
        """Do nothing: the client keeps the requests for the next engine."""

    def _open(self) -> None:
        """Mark the runtime as open if both the engine and the tokenizer are loaded."""
        state = self.state
        if state.client.ready is None or state.tokenizer is None:
            return
        if state.model is None:
            worker = state.client.ready.worker
            state.model = model_info(self.config, worker, state.tokenizer, self._sampling_defaults)
            state.images.check_worker(worker.media)
            state.speech.check_worker(worker.media)
        self._ready.set()

    def _observe_stats(self, stats: EngineStats) -> None:
        self.state.stats = stats

    # ---- shutdown

    async def stop(self) -> None:
        """End the engine. Idempotent."""
        if self._running is None:
            return
        running, self._running = self._running, None
        if self.state.client is not None:
            await self.state.client.close()
        self.state.structures.close()
        self.state.images.close()
        self.state.speech.close()
        self.state.adapters.close()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await self.engines.terminate()
