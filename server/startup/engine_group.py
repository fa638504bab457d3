"""The startup shared by `quire serve` and the offline `LLM`: model folder -> engine processes -> clients, supervisors
and the tokenizer.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from quire.checkpoints import hub
from quire.checkpoints.library.names import is_hub_adapter
from quire.checkpoints.lora import local_modules, parse_module
from quire.configs.config import Config
from quire.configs.speculation import draft_model_of
from quire.engine.messages import EngineStats, Progress, WorkerReady
from quire.server.engines.process import EngineProcess
from quire.server.engines.remote import RemoteEngine, Rendezvous
from quire.server.engines.supervisor import Supervisor, in_thread
from quire.server.model_info import ModelInfo, context_length, known_token_ids
from quire.server.startup.checks import local_config

if TYPE_CHECKING:  # imported late, because these imports are slow
    from quire.server.engines.client import EngineClient
    from quire.server.media.service import Images
    from quire.server.request.formats import Formats
    from quire.server.request.sampling import SamplingDefaults
    from quire.server.text.tokenizer import Tokenizer

logger = logging.getLogger("quire")

# for vision models without a chat template, such as DeepSeek-OCR: the messages, concatenated
PLAIN = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
TERMINATE_TIMEOUT = 5.0  # seconds for an engine to exit
SAVE_TIMEOUT = 15.0  # additional seconds for one that writes its KV cache first


class EngineUser(Protocol):
    """The component that serves requests: `Frontend`, `FrontendGroup` or the offline `Runtime`."""

    def connect(
        self, on_stats: Callable[[int, EngineStats], None], on_progress: Callable[[int, Progress], None]
    ) -> list[EngineClient]: ...

    async def load_tokenizer(self, model_folder: str, tokenizer_folder: str) -> None: ...

    def on_death(self, engine: int) -> None: ...


TakeSpare = Callable[[Config], EngineProcess | None]


def no_engine(config: Config) -> EngineProcess | None:
    return None


class EngineGroup:
    """The engines of one model, each with a supervisor once `run` is called. `take_spare` gives a process that was
    started before its configuration was known.
    """

    def __init__(self, config: Config, take_spare: TakeSpare = no_engine):
        self.config, self._take_spare = config, take_spare
        self.draft = draft_model_of(config.scheduler.speculative_config)
        self.folder: str | None = None  # the model folder, once it is on this machine
        self.processes: list[EngineProcess | RemoteEngine] = []
        self._rendezvous: Rendezvous | None = None  # of engines on other machines
        self.supervisors: list[Supervisor] = []
        self.saves = False  # whether engines write their KV cache before they end

    def start_if_local(self) -> None:
        """Call `start` if neither the model nor the draft model needs a download or a conversion. Raises ValueError."""
        if any(is_hub_adapter(parse_module(text)[1]) for text in self.config.lora.lora_modules):
            return
        folder, draft = hub.ready_folder(self.config.model.model), None
        if folder is not None and self.draft is not None:
            draft = hub.ready_folder(self.draft)
        if folder is not None and (draft is None) == (self.draft is None):
            self.start(folder, draft)

    def start(self, folder: str, draft: str | None = None) -> None:
        """Start one process per engine of this machine, with the models in `folder` and `draft`, and wait for those of
        other machines.

        Raises ValueError if a folder has no model or the system cannot start a process or listen.
        """
        config = local_config(self.config, folder, draft, needs_weights=self.config.model.load_format != "dummy")
        self.folder = folder
        local = config.parallel.local_engines
        own = dataclasses.replace(config, parallel=config.parallel.on_this_machine())
        if len(local) < config.parallel.data_parallel_size:
            self._rendezvous = Rendezvous(config)
        for index in range(config.parallel.data_parallel_size):
            engine = None
            try:
                if index in local:
                    engine = self._take_spare(own) or EngineProcess(own, index)
                else:
                    engine = RemoteEngine(own, index, self._rendezvous)
                engine.start()
            except OSError as error:
                if engine is not None:
                    engine.kill()
                raise ValueError(f"engine {index} cannot be started: {error.strerror}") from error
            self.processes.append(engine)

    async def run(
        self,
        user: EngineUser,
        on_ready: Callable[[bool], None],
        on_stats: Callable[[int, EngineStats], None],
        progress: Callable[[str, float], None],
    ) -> None:
        """Download the model if needed, load the tokenizer, and keep the engines alive.

        `on_ready` is told whether the engine was ready before; `progress` receives a phase and the fraction done.
        Never returns; raises ValueError for a wrong model or setting, EngineFailed.
        """
        if self.folder is None:
            progress("resolving model", 0.0)
            folder = await self._resolve(self.config.model.model, progress)
            draft = None if self.draft is None else await self._resolve(self.draft, progress, is_draft=True)
            await self._download_adapters()
            self.start(folder, draft)

        def on_progress(engine: int, message: Progress) -> None:
            if engine == 0:  # show one progress bar; the other engines load the same model
                progress(message.phase, message.fraction)

        def note_ready(again: bool) -> None:
            found = [client.ready.worker for client in clients if client.ready is not None]
            self.saves = any(tier.saves for worker in found for tier in worker.tiers)
            on_ready(again)

        clients = user.connect(on_stats, on_progress)
        self.supervisors = [
            Supervisor(engine.config, engine, client, note_ready, functools.partial(user.on_death, engine.index))
            for engine, client in zip(self.processes, clients, strict=True)
        ]
        try:
            async with asyncio.TaskGroup() as tasks:
                for supervisor in self.supervisors:
                    tasks.create_task(supervisor.run())
                tasks.create_task(self._load_tokenizer(user, progress))
        except ExceptionGroup as errors:  # the first error cancelled the other tasks
            raise errors.exceptions[0] from None

    async def _download_adapters(self) -> None:
        lora, download_dir = self.config.lora, self.config.model.download_dir
        modules = await in_thread(lambda: local_modules(lora.lora_modules, download_dir))
        self.config = dataclasses.replace(self.config, lora=dataclasses.replace(lora, lora_modules=modules))

    async def _load_tokenizer(self, user: EngineUser, progress: Callable[[str, float], None]) -> None:
        tokenizer, folder = self.config.model.tokenizer, self.folder
        if tokenizer is not None:
            folder = await self._resolve(tokenizer, progress, tokenizer_only=True)
        await user.load_tokenizer(self.folder, folder)

    async def _resolve(
        self,
        model: str,
        progress: Callable[[str, float], None],
        tokenizer_only: bool = False,
        is_draft: bool = False,
    ) -> str:
        """Return the folder of a model on this machine, downloaded if needed. Raises ValueError."""
        loop, options = asyncio.get_running_loop(), self.config.model
        return await in_thread(
            lambda: hub.resolve(
                model,
                revision=None if tokenizer_only or is_draft else options.revision,
                download_dir=options.download_dir,
                tokenizer_only=tokenizer_only,
                progress=lambda phase, fraction: loop.call_soon_threadsafe(progress, phase, fraction),
            )
        )

    def _current(self) -> list[EngineProcess | RemoteEngine]:
        return [supervisor.engine for supervisor in self.supervisors] or self.processes

    async def terminate(self) -> None:
        """Terminate all engines; kill them after TERMINATE_TIMEOUT, later if they write their KV cache first."""
        timeout = TERMINATE_TIMEOUT + (SAVE_TIMEOUT if self.saves else 0)
        if self._rendezvous is not None:
            self._rendezvous.close()
        await asyncio.gather(*(in_thread(functools.partial(engine.terminate, timeout)) for engine in self._current()))

    def kill(self) -> None:
        if self._rendezvous is not None:
            self._rendezvous.close()
        for engine in self._current():
            engine.kill()


def read_text(config: Config, folder: str, images: Images, model_folder: str) -> tuple[Tokenizer, Formats]:
    """Return the tokenizer, and the formats of thoughts and calls that go with its chat template; `images` learns what
    the model does with images.

    Raises ValueError for missing or malformed files, and for a parser or an option that does not exist.
    """
    from quire.server.request.formats import choose_formats
    from quire.server.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(
        folder, chat_template=config.server.chat_template, trust_remote_code=config.model.trust_remote_code
    )
    images.open(model_folder, tokenizer)
    if images.why_not is None and not tokenizer.chat_templates:
        tokenizer.chat_templates = {"default": PLAIN}
    return tokenizer, choose_formats(config.server, tokenizer)


async def load_tokenizer(config: Config, folder: str, images: Images, model_folder: str) -> tuple[Tokenizer, Formats]:
    """Run `read_text` in a thread, and precompute what the first request would wait for."""

    def load() -> tuple[Tokenizer, Formats]:
        tokenizer, formats = read_text(config, folder, images, model_folder)
        _ = tokenizer.max_token_chars
        return tokenizer, formats

    return await in_thread(load)


def model_info(config: Config, worker: WorkerReady, tokenizer: Tokenizer, sampling: SamplingDefaults) -> ModelInfo:
    """Return the facts about the model that requests are checked against."""
    return ModelInfo(
        context_length(worker),
        worker.vocab_size,
        known_token_ids(tokenizer.eos_token_ids, worker.vocab_size),
        sampling.declared,
        config.server.max_logprobs,
        config.scheduler.scheduling_policy == "priority",
        worker.pooling,
        worker.num_states > 0,
        sampling.others,
        sampling.preset,
        worker.media is not None and worker.media.audio,
    )
