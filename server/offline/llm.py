"""`from quire import LLM, SamplingParams`: generate in a script, without HTTP. Names, defaults and shapes are vLLM's.

The engine is the same child process that `quire serve` runs, with the same client and the same checks; an event loop
in a thread drives it.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import weakref
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from quire.configs.config import Config
from quire.configs.options import all_options, config_from
from quire.configs.sources import EMBEDDED_MODEL, embedded_model
from quire.engine.messages import EngineCalls
from quire.server.api.openai.logprobs import Formatter
from quire.server.api.openai.translate import COMPLETION_MAX_TOKENS
from quire.server.errors import ApiError, BadRequest
from quire.server.generate import deltas, pooling
from quire.server.generate.generation import Generation
from quire.server.generate.pooling import Vector
from quire.server.generate.prepare import prepare
from quire.server.generate.structures import constrain
from quire.server.offline import pooled
from quire.server.offline.images import ImageTurns, has_images
from quire.server.offline.lora import LoRARequest, LoRARequests, chosen
from quire.server.offline.params import CompletionOutput, RequestOutput, SamplingParams
from quire.server.offline.progress import Progress
from quire.server.offline.prompts import (
    Prompt,
    as_list,
    checked_options,
    checked_tools,
    plain,
    plain_and_fields,
    template_messages,
)
from quire.server.offline.runtime import Runtime
from quire.server.offline.transcribe import MAX_FILES, AudioFile, TranscriptionOutput, transcribe_file
from quire.server.request.generation_request import GenerationRequest
from quire.server.request.request import Conversation, GenerationOptions, GenerationSpec
from quire.server.request.tools import ToolChoice
from quire.server.request.usage import TokenUsage
from quire.server.startup.bar import Bar
from quire.server.structured.structure import Structure
from quire.server.text.tokenizer import Tokenizer

T = TypeVar("T")
# those that mean something without HTTP
SERVER_SETTINGS = (
    "chat_template",
    "exclude_tools_when_tool_choice_none",
    "generation_config",
    "generic_tool_prompt",
    "max_logprobs",
    "override_generation_config",
    "reasoning_parser",
    "step_timeout",
    "tool_call_parser",
)


class LLM:
    """An engine for one model. `settings` are the names of `configs/config.py`: `LLM("Qwen/Qwen3-0.6B",
    max_model_len=4096, dtype="bfloat16")`.

    Without `model`, the small one that comes with quire. Blocks until the engine is ready. Raises ValueError for a
    wrong setting or model, RuntimeError when the engine cannot start. Close it, use it as a context manager, or leave
    it to the end of the program.
    """

    def __init__(self, model: str = "", **settings: object):
        self._ids = itertools.count()
        self._loop = asyncio.new_event_loop()
        self._runtime = Runtime(offline_config(model, settings))
        threading.Thread(target=self._loop.run_forever, name="quire", daemon=True).start()
        self._close = weakref.finalize(self, _close, self._loop, self._runtime)  # also at the end of the program
        try:
            self._run(self._runtime.start())
        except BaseException:
            self.close()
            raise

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer."""
        return self._runtime.state.tokenizer

    def get_tokenizer(self) -> Tokenizer:
        return self.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequests = None,
    ) -> list[RequestOutput]:
        """Continue every prompt, in order. A prompt is a text, a list of token ids, or {"prompt": text} or
        {"prompt_token_ids": ids}, each with an optional "cache_salt"; one prompt or a list. The images of a text, which
        has the model's placeholder for each, are its "multi_modal_data": {"image": one PIL.Image.Image or a list},
        optionally with "mm_processor_kwargs" and "multi_modal_uuids". `sampling_params` are for all prompts, one each,
        or the model's defaults, and so is `lora_request`; None is the model itself.

        Raises ValueError for an invalid prompt or parameter, before anything runs unless its prompt has images;
        RuntimeError if the engine fails.
        """
        inputs = [plain_and_fields(prompt) for prompt in as_list(prompts)]
        options = self._options(sampling_params, len(inputs))
        adapters = self._run(chosen(self._runtime.state, lora_request, len(inputs)))
        specs = [
            self._spec([prompt], one, adapters=lora, **fields)
            for (prompt, fields), one, lora in zip(inputs, options, adapters, strict=True)
        ]
        return self._run(self._generate(specs, use_tqdm))

    def chat(
        self,
        messages: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
        lora_request: LoRARequests = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of several.

        `chat_template` stands in for the model's. `tools` are in OpenAI's form; the texts have calls and thoughts as
        the model writes them. Images are parts of OpenAI's type image_url, or {"type": "image_pil", "image_pil":
        PIL.Image.Image}; `mm_processor_kwargs` say how the model sizes them. Raises as `generate` does.
        """
        conversations = [messages] if not messages or isinstance(messages[0], dict) else messages
        options = self._options(sampling_params, len(conversations))
        adapters = self._run(chosen(self._runtime.state, lora_request, len(conversations)))
        known, processor_options = checked_tools(tools), checked_options(mm_processor_kwargs)
        specs = [
            self._spec(
                Conversation(
                    template_messages(conversation),
                    add_generation_prompt,
                    continue_final_message,
                    chat_template,
                    chat_template_kwargs or {},
                    tools=known,
                    tool_choice=ToolChoice("auto" if known else "none"),
                    parse=False,
                    processor_options=processor_options,
                ),
                one,
                adapters=lora,
            )
            for conversation, one, lora in zip(conversations, options, adapters, strict=True)
        ]
        return self._run(self._generate(specs, use_tqdm))

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate_prompt_tokens: int | None = None,
        lora_request: LoRARequests = None,
    ) -> list[pooled.PooledRequestOutput]:
        """Return the embedding of every prompt, in order, as `outputs.embedding`. Prompts are as for `generate`, all
        texts or all token ids. `normalize=None` is the model's default; `dimensions` keeps the first ones.
        `lora_request` is as for `generate`.

        Raises ValueError for an invalid prompt or parameter, or a model that makes no embeddings.
        """
        return self._run(self._embed(plain(prompts), dimensions, normalize, truncate_prompt_tokens, lora_request))

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        lora_request: LoRARequests = None,
    ) -> list[pooled.PooledRequestOutput]:
        """Return the probabilities of a classifier's labels for every prompt, as `outputs.probs`. Raises as `embed`
        does.
        """
        return self._run(self._classify(plain(prompts), truncate_prompt_tokens, lora_request))

    def transcribe(
        self,
        audio: AudioFile | Sequence[AudioFile],
        *,
        task: str = "transcribe",
        language: str | None = None,
        temperature: float = 0.0,
        timestamps: bool = False,
        word_timestamps: bool = False,
        use_tqdm: bool = True,
    ) -> list[TranscriptionOutput]:
        """Transcribe every file, in order: a path or the bytes of a file, or a list of them. `task` may also be
        translate, to English. `language` is a code or an English name, by default detected; `temperature` 0 is
        Whisper's attempts at rising temperatures. With `timestamps`, `segments` says when what is said, with
        `word_timestamps` also `words`.

        Raises ValueError for a file or a parameter that cannot be used, or a model that transcribes nothing.
        """
        files = [audio] if isinstance(audio, str | bytes | os.PathLike) else list(audio)
        options = {"task": task, "language": language, "temperature": temperature, "timestamps": timestamps}
        options["word_timestamps"] = word_timestamps
        return self._run(self._transcribe(files, options, use_tqdm))

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        truncate_prompt_tokens: int | None = None,
        lora_request: LoRARequest | None = None,
    ) -> list[pooled.PooledRequestOutput]:
        """Return how well each text of `data_2` answers the one of `data_1`, or the one at its place there, as
        `outputs.score`: by a cross-encoder, else the cosine of embeddings. Raises as `embed` does.
        """
        first, second = ([data] if isinstance(data, str) else list(data) for data in (data_1, data_2))
        return self._run(self._score(first, second, truncate_prompt_tokens, lora_request))

    def reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes; returns False if running requests use them."""
        return all(self._run(self._runtime.state.client.call_each(EngineCalls.reset_prefix_cache)))

    def close(self) -> None:
        """End the engine. Idempotent."""
        self._close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ---- in the caller's thread

    def _options(
        self, params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
    ) -> list[tuple[GenerationOptions, Structure | None]]:
        """Return the options of each prompt, and the constraint on its output. Raises ValueError if there are not as
        many `params` as prompts.
        """
        if params is None:
            return [(GenerationOptions(), None)] * num_prompts
        if isinstance(params, SamplingParams):
            return [self._without_default_limit(params)] * num_prompts
        if len(params) != num_prompts:
            raise ValueError(f"sampling_params: {len(params)} for {num_prompts} prompts")
        return [self._without_default_limit(one) for one in params]

    def _without_default_limit(self, params: SamplingParams) -> tuple[GenerationOptions, Structure | None]:
        """Let `max_tokens=None` mean all that the context holds instead of the default."""
        options = params.to_options()
        if options.max_tokens is None:
            options.max_tokens = self._runtime.state.model.max_model_len
        return options, params.structured_outputs and params.structured_outputs.to_structure()

    def _spec(
        self,
        prompts: list[str] | list[list[int]] | Conversation,
        how: tuple[GenerationOptions, Structure | None],
        **fields: object,
    ) -> GenerationSpec:
        """Return the spec of a request; `fields` are other fields of it."""
        options, structure = how
        return GenerationSpec(
            request_id=str(next(self._ids)),
            prompts=prompts,
            options=options,
            structure=structure,
            default_max_tokens=COMPLETION_MAX_TOKENS,
            prompt_param="messages" if isinstance(prompts, Conversation) else "prompt",
            **fields,
        )

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the engine's loop. Ctrl-C cancels it, which aborts its requests."""
        if not self._close.alive:
            work.close()
            raise RuntimeError("this LLM is closed")
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except ApiError as error:
            raise (ValueError if isinstance(error, BadRequest) else RuntimeError)(error.message) from None
        except BaseException:
            future.cancel()
            raise

    # ---- on the loop

    async def _generate(self, specs: list[GenerationSpec], use_tqdm: bool) -> list[RequestOutput]:
        """Run all requests at once; the engine queues what does not fit. The first failure aborts the others. Those
        with images are prepared when it is their turn.
        """
        state = self._runtime.state
        requests = [None if has_images(spec) else prepare(spec, state)[0] for spec in specs]
        await constrain([request for request in requests if request is not None], state)
        self._runtime.require_alive()
        turns = ImageTurns(state)
        with Progress(len(requests), use_tqdm) as progress:
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [
                        group.create_task(
                            self._with_images(spec, turns, progress)
                            if request is None
                            else self._one(spec, request, progress)
                        )
                        for spec, request in zip(specs, requests, strict=True)
                    ]
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _with_images(self, spec: GenerationSpec, turns: ImageTurns, progress: Progress) -> RequestOutput:
        async with turns.turn(spec):
            requests = prepare(spec, self._runtime.state)
            await constrain(requests, self._runtime.state)
            return await self._one(spec, requests[0], progress)

    async def _transcribe(
        self, files: Sequence[AudioFile], options: dict[str, Any], use_tqdm: bool
    ) -> list[TranscriptionOutput]:
        """Transcribe a few files at once, each of which has several pieces in the engine."""
        self._runtime.require_alive()
        limit = asyncio.Semaphore(MAX_FILES)

        async def one(file: AudioFile, bar: Bar) -> TranscriptionOutput:
            async with limit:
                found = await transcribe_file(self._runtime.state, self._next_id(), file, **options)
            bar.update()
            return found

        with Bar(total=len(files), desc="Transcribed files", disable=not use_tqdm) as bar:
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(one(file, bar)) for file in files]
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _embed(
        self,
        prompts: list[str] | list[list[int]],
        dimensions: int | None,
        normalize: bool | None,
        truncate_prompt_tokens: int | None,
        lora: LoRARequests,
    ) -> list[pooled.PooledRequestOutput]:
        state = self._runtime.state
        requests = pooled.embedding_requests(
            self._next_id(), prompts, state, dimensions, normalize, truncate_prompt_tokens
        )
        return pooled.embedding_outputs(requests, await self._vectors(requests, lora))

    async def _classify(
        self, prompts: list[str] | list[list[int]], truncate_prompt_tokens: int | None, lora: LoRARequests
    ) -> list[pooled.PooledRequestOutput]:
        state = self._runtime.state
        requests = pooled.classification_requests(self._next_id(), prompts, state, truncate_prompt_tokens)
        activation = state.model.pooling.activation
        return pooled.classification_outputs(requests, await self._vectors(requests, lora), activation)

    async def _score(
        self, first: list[str], second: list[str], truncate_prompt_tokens: int | None, lora: LoRARequest | None
    ) -> list[pooled.PooledRequestOutput]:
        found = pooled.scoring(self._next_id(), first, second, self._runtime.state, truncate_prompt_tokens)
        return pooled.scoring_outputs(found, await self._vectors(found.requests, lora))

    async def _vectors(self, requests: list[GenerationRequest], lora: LoRARequests) -> list[Vector]:
        for request, adapters in zip(requests, await chosen(self._runtime.state, lora, len(requests)), strict=True):
            request.adapters = adapters
        self._runtime.require_alive()
        return await pooling.run(self._runtime.state, requests)

    def _next_id(self) -> str:
        return str(next(self._ids))

    async def _one(self, spec: GenerationSpec, request: GenerationRequest, progress: Progress) -> RequestOutput:
        generation = Generation(self._runtime.state.client, self.tokenizer, request)
        choices = await deltas.collect(deltas.run([generation]), request.n)
        used = TokenUsage.for_requests([request])
        for choice in choices:
            used.add(choice)
        progress.add(used.num_prompt, used.num_output)
        text, options = request.prompt_text, spec.options
        if isinstance(spec.prompts, Conversation):
            text = self.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
        outputs = [
            CompletionOutput(
                i,
                choice.text,
                choice.token_ids,
                None
                if options.logprobs is None
                else Formatter(self.tokenizer, options.logprobs).prompt(choice.logprobs)[1:],
                choice.finish_reason,
                choice.stop_reason,
            )
            for i, choice in enumerate(choices)
        ]
        prompt_logprobs = (
            None
            if options.prompt_logprobs is None
            else Formatter(self.tokenizer, options.prompt_logprobs).prompt(choices[0].prompt_logprobs)
        )
        return RequestOutput(
            request.request_id,
            text,
            request.prompt_token_ids,
            prompt_logprobs,
            outputs,
            True,
            used.counts.cached,
        )


def offline_config(model: str, settings: dict[str, Any]) -> Config:
    """Return checked settings; those of the HTTP server are refused. Raises ValueError."""
    for name in settings:
        option = all_options().get(name)
        if option is not None and option.section == "server" and name not in SERVER_SETTINGS:
            raise ValueError(f"{name} is a setting of the HTTP server; LLM has none")
    if settings.get("data_parallel_size", 1) != 1:
        raise ValueError(
            "data_parallel_size: LLM has one engine; start several on one port with `quire serve --data-parallel-size`"
        )
    if not model or (model == EMBEDDED_MODEL.name and not os.path.exists(model)):
        model = embedded_model() or ""
    if not model:
        raise ValueError("model: name a folder, a GGUF file or a Hub id; no model comes with this copy of quire")
    # the caller of chat() is trusted
    return config_from({**settings, "model": model, "trust_request_chat_template": True})


def _close(loop: asyncio.AbstractEventLoop, runtime: Runtime) -> None:
    if loop.is_running():
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(runtime.stop(), loop).result(timeout=30)
        loop.call_soon_threadsafe(loop.stop)
