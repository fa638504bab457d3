"""The engine, its client and the tokenizer behind an offline `LLM`: what `launch.py` composes for HTTP, without HTTP."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from typing import Any

from quire.configs.config import Config
from quire.configs.files import check_model_folder
from quire.server.engines.client import EngineClient
from quire.server.engines.process import EngineProcess
from quire.server.engines.supervisor import EngineFailed, Supervisor, in_thread
from quire.server.generate.sampling import read_sampling_defaults
from quire.server.startup import hub
from quire.server.startup.plan_table import plan_table
from quire.server.startup.progress import StartProgress
from quire.server.state import ModelInfo, ServerState, known_token_ids
from quire.server.text.tokenizer import Tokenizer

logger = logging.getLogger("quire")
TERMINATE_TIMEOUT = 5.0  # seconds for the engine to end


class Runtime:
    """Lives on one event loop: `start`, use `state.client` and `state.tokenizer`, `stop`.

    An engine that dies is started again, as under `quire serve`.
    """

    def __init__(self, config: Config):
        self.config = config
        self.state = ServerState(config, [config.model.model], version="", system_fingerprint="")
        self.supervisor: Supervisor | None = None
        self.watch: asyncio.Task | None = None

    async def start(self) -> None:
        """Until the engine has completed a step.

        Raises ValueError for a wrong model or setting, RuntimeError when the engine cannot start.
        """
        shown = StartProgress()
        loop = asyncio.get_running_loop()
        try:
            options = self.config.model
            folder = await in_thread(
                lambda: hub.resolve(
                    options.model,
                    revision=options.revision,
                    download_dir=options.download_dir,
                    progress=lambda *progress: loop.call_soon_threadsafe(shown.update, *progress),
                )
            )
            check_model_folder(folder)
            engine = EngineProcess(dataclasses.replace(self.config, model=dataclasses.replace(options, model=folder)))
            engine.start()  # it loads while the tokenizer does
            self.state.client = EngineClient(
                on_stats=self._on_stats, on_progress=lambda progress: shown.update(progress.phase, progress.fraction)
            )
            ready = asyncio.Event()
            self.supervisor = Supervisor(
                engine.config, engine, self.state.client, lambda again: ready.set(), lambda: None
            )
            self.watch = asyncio.create_task(self._watch())
            defaults = read_sampling_defaults(self.config, folder)
            self.state.tokenizer = await self._load_tokenizer(folder)
            await self._wait(ready)
        finally:
            shown.close()
        worker = self.state.client.ready.worker
        logger.info("%s", plan_table(worker))
        self.state.model = ModelInfo(
            worker.max_model_len,
            worker.vocab_size,
            known_token_ids(self.state.tokenizer.eos_token_ids, worker.vocab_size),
            defaults,
            self.config.server.max_logprobs,
            self.config.scheduler.scheduling_policy == "priority",
        )

    async def _load_tokenizer(self, folder: str) -> Any:
        options = self.config.model
        if options.tokenizer is not None:
            folder = await in_thread(
                lambda: hub.resolve(options.tokenizer, download_dir=options.download_dir, tokenizer_only=True)
            )
        return await in_thread(
            lambda: Tokenizer.load(
                folder, chat_template=self.config.server.chat_template, trust_remote_code=options.trust_remote_code
            )
        )

    async def _watch(self) -> None:
        """Over the engine's life.

        When it cannot be kept alive, or watching fails, every open request ends with an error, and later ones are
        refused.
        """
        try:
            await self.supervisor.run()
        except Exception as error:
            if not isinstance(error, EngineFailed):
                logger.exception("watching over the engine failed")
            self.state.failure = str(error) or type(error).__name__
            await self.state.client.close()

    async def _wait(self, ready: asyncio.Event) -> None:
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait({waiting, self.watch}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        self.require_alive()

    def require_alive(self) -> None:
        """Raises RuntimeError when the engine is gone for good."""
        if self.state.failure is not None:
            raise RuntimeError(f"the engine failed: {self.state.failure}")

    def _on_stats(self, stats: Any) -> None:
        self.state.stats = stats

    async def stop(self) -> None:
        """End the engine. Idempotent."""
        if self.supervisor is None:
            return
        supervisor, self.supervisor = self.supervisor, None
        await self.state.client.close()
        self.watch.cancel()
        await asyncio.gather(self.watch, return_exceptions=True)
        await in_thread(lambda: supervisor.engine.terminate(TERMINATE_TIMEOUT))
