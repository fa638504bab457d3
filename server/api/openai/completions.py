"""POST /v1/completions: one or several prompts, as text or ids -> one body, or SSE chunks."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from functools import partial

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.messages import TokenLogprobs
from quire.server.api.openai import prepare as intake
from quire.server.api.openai.logprobs import Formatter
from quire.server.api.openai.protocol import (
    MAX_PROMPTS,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    Usage,
)
from quire.server.api.openai.sampling import to_sampling_params
from quire.server.errors import BadRequest
from quire.server.generate import deltas
from quire.server.generate.generation import Delta, Generation, GenerationRequest
from quire.server.http import sse
from quire.server.state import ServerState

MAX_CHOICES = 16384  # prompts times n


async def completions(request: Request, state: ServerState) -> Response:
    """Raises ApiError for everything that goes wrong before the first byte of the answer."""
    body, texts, requests = await intake.take(
        request, CompletionRequest, state, lambda body: (body, *_prepare(request, body, state))
    )
    total, predict = intake.deadlines(request, body)
    intake.reserve_room(request, state, requests, "prompt")
    generations = [Generation(state.client, state.tokenizer, one, state.metrics) for one in requests]
    prompts = [one.prompt_token_ids for one in requests]
    completion = _Completion(body, state, f"cmpl-{request.scope['request_id']}", prompts, texts)
    stream = deltas.run(generations, total, predict)
    if body.stream:
        return sse.EventStream(
            sse.to_the_end(completion.frames(stream), completion.id), state.config.server.sse_keep_alive_interval
        )
    choices = await sse.unless_disconnected(request, deltas.collect(stream, len(prompts) * (body.n or 1)))
    size = deltas.answer_size(choices) + (sum(map(completion._echo_size, range(len(choices)))) if body.echo else 0)
    return await state.threads.run(size, lambda: sse.JsonResponse(completion.whole(choices)))


def _prepare(
    request: Request, body: CompletionRequest, state: ServerState
) -> tuple[list[str | None], list[GenerationRequest]]:
    """The prompts' texts, where they were given as text and are not cut, and a request for each."""
    model = state.require_ready()
    state.require_model(body.model)
    intake.check_options(body)
    if body.best_of not in (None, body.n or 1):
        raise BadRequest(f"best_of must equal n ({body.n or 1}): candidates are not ranked here.", param="best_of")
    priority = intake.priority(request, body, model)
    state.require_room()
    sampling = to_sampling_params(body, model, state.tokenizer)
    texts, prompts = prompt_ids(body, state)
    prompts = [intake.truncate(ids, body, sampling, model) for ids in prompts]
    body.prompt = ""  # told; to free many takes long, so here
    request_id = f"cmpl-{intake.request_id(request, body)}"
    return texts, [
        intake.generation_request(
            ids,
            body,
            sampling,
            model,
            request_id=request_id,
            priority=priority,
            param="prompt",
            tenant=request.scope.get("tenant"),
        )
        for ids in prompts
    ]


def prompt_ids(body: CompletionRequest, state: ServerState) -> tuple[list[str | None], list[list[int]]]:
    """The prompts' texts, where they were given as text and are not cut, and their ids.

    Raises BadRequest for `prompt`.
    """
    prompts = _as_list(body.prompt)
    if len(prompts) > MAX_PROMPTS:
        raise BadRequest(f"prompt: {len(prompts)} prompts are more than {MAX_PROMPTS}.", param="prompt")
    if len(prompts) * (body.n or 1) > MAX_CHOICES:
        raise BadRequest(f"prompt: {len(prompts)} prompts times n are more than {MAX_CHOICES} choices.", param="prompt")
    if isinstance(prompts[0], str):
        all_ids = intake.encode(
            prompts,
            body.add_special_tokens is not False,
            state,
            "prompt",
            may_truncate=body.truncate_prompt_tokens is not None,
        )
    else:
        all_ids = prompts
    if not all(all_ids):
        raise BadRequest("prompt must not be empty.", param="prompt")
    kept = isinstance(prompts[0], str) and body.truncate_prompt_tokens is None
    return prompts if kept else [None] * len(prompts), all_ids


def _as_list(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(item) for item in prompt}
    if len(kinds) > 1:
        raise BadRequest(
            "prompt must be a string, a list of strings, a list of token ids, or a list of such lists; not a mixture.",
            param="prompt",
        )
    return [prompt] if int in kinds else prompt


class _Completion:
    """The answer to one request, whole or in chunks."""

    def __init__(
        self,
        body: CompletionRequest,
        state: ServerState,
        answer_id: str,
        prompts: list[list[int]],
        texts: list[str | None],
    ):
        self.body, self.state, self.id, self.prompts, self.texts = body, state, answer_id, prompts, texts
        self.created = int(time.time())
        self.model = state.names[0]
        self.n = body.n or 1
        self.counter = deltas.Counter(sum(map(len, prompts)), self.n)
        options = body.stream_options
        self.include_usage = bool(options and options.include_usage)
        self.running_usage = bool(options and options.continuous_usage_stats)
        self.formatters: dict[int, Formatter] = {}  # per choice, which counts its own text offsets
        self.prompt_logprobs: dict[int, list[TokenLogprobs]] = {}  # of a stream, per choice, until they are sent
        self.started: set[int] = set()
        empty = msgspec.json.encode(self._chunk([]))
        self.head, self.tail = (b"data: " + empty + b"\n\n").split(b'"choices":[]')
        self.head += b'"choices":[{"index":'

    def whole(self, choices: list[deltas.Choice]) -> Completion:
        out = []
        for i, choice in enumerate(choices):
            echo = self._echo(i, choice.prompt_logprobs)
            out.append(
                self._output(
                    i, choice.text, choice.token_ids, choice.logprobs, choice.finish_reason, choice.stop_reason, echo
                )
            )
            self.counter.add(i, len(choice.token_ids), choice.num_cached_tokens)
            if self.body.prompt_logprobs is not None:
                out[-1].prompt_logprobs = Formatter(self.state.tokenizer, self.body.prompt_logprobs).prompt(
                    choice.prompt_logprobs
                )
            if self.body.return_token_ids:
                out[-1].prompt_token_ids = self.prompts[i // self.n]
        return Completion(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=out,
            system_fingerprint=self.state.system_fingerprint,
            usage=self.usage(),
        )

    def usage(self) -> Usage:
        return Usage.of(
            self.counter.num_prompt_tokens, self.counter.num_completion_tokens, self.counter.num_cached_tokens
        )

    def _formatter(self, index: int) -> Formatter:
        if index not in self.formatters:
            self.formatters[index] = Formatter(
                self.state.tokenizer,
                self.body.logprobs or 0,
                as_ids=bool(self.body.return_tokens_as_token_ids),
                skip_special_tokens=self.body.skip_special_tokens is not False,
            )
        return self.formatters[index]

    def _echo_size(self, index: int) -> int:
        """How much work the echo is, for `Threads.run`."""
        return len(self.prompts[index // self.n]) * (1 if self.body.logprobs is None else deltas.POSITION_SIZE)

    def _echo(self, index: int, prompt_logprobs: list[TokenLogprobs]) -> tuple[str, CompletionLogprobs | None]:
        """Text and log-probabilities of the prompt that go before the output; nothing when it is not echoed."""
        if not self.body.echo:
            return "", None
        ids, text = self.prompts[index // self.n], self.texts[index // self.n]
        if text is None:
            text = self.state.tokenizer.decode(ids, skip_special_tokens=self.body.skip_special_tokens is not False)
        logprobs = None
        if self.body.logprobs is not None:
            logprobs = self._formatter(index).completion(prompt_logprobs, ids[0])
        return text, logprobs

    def _output(
        self,
        index: int,
        text: str,
        ids: list[int],
        logprobs: list[TokenLogprobs],
        finish_reason: str | None,
        stop_reason: int | str | None,
        echo: tuple[str, CompletionLogprobs | None] = ("", None),
    ) -> CompletionChoice:
        """A choice with these tokens behind the echo."""
        prompt_text, formatted = echo
        if self.body.logprobs is not None:
            new = self._formatter(index).completion(logprobs)
            formatted = _joined(formatted, new) if formatted else new
        return CompletionChoice(
            index,
            prompt_text + text,
            formatted,
            finish_reason,
            stop_reason,
            ids if self.body.return_token_ids else UNSET,
        )

    async def frames(self, stream: AsyncGenerator[Delta, None]) -> AsyncGenerator[bytes, None]:
        """Bytes of whole events. Closing it aborts the generation."""
        try:
            async for delta in stream:
                self.counter.add(delta.index, len(delta.token_ids), delta.num_cached_tokens)
                if self.body.echo and delta.index not in self.started:
                    frame = await self.state.threads.run(self._echo_size(delta.index), partial(self._frame, delta))
                else:
                    frame = self._frame(delta)
                if frame:
                    yield frame
            if self.include_usage:
                yield self._event([], self.usage())
        finally:
            await stream.aclose()

    def _frame(self, delta: Delta) -> bytes:
        body = self.body
        if delta.prompt_logprobs:  # in parts, all before the first token
            self.prompt_logprobs.setdefault(delta.index, []).extend(delta.prompt_logprobs)
        if not (delta.text or delta.token_ids or delta.finish_reason):
            return b""
        first = delta.index not in self.started
        self.started.add(delta.index)
        plain = body.logprobs is None and not body.return_token_ids and not self.running_usage
        if plain and delta.finish_reason is None and not (first and body.echo):
            return (
                b""
                if not delta.text
                else b'%b%d,"text":%b,"logprobs":null,"finish_reason":null,"stop_reason":null}]%b'
                % (self.head, delta.index, msgspec.json.encode(delta.text), self.tail)
            )
        echo = self._echo(delta.index, self.prompt_logprobs.pop(delta.index, [])) if first else ("", None)
        choice = self._output(
            delta.index, delta.text, delta.token_ids, delta.logprobs or [], delta.finish_reason, delta.stop_reason, echo
        )
        if first and body.return_token_ids:
            choice.prompt_token_ids = self.prompts[delta.index // self.n]
        return self._event([choice])

    def _event(self, choices: list[CompletionChoice], usage: Usage | None = None) -> bytes:
        return sse.event(msgspec.json.encode(self._chunk(choices, usage)))

    def _chunk(self, choices: list[CompletionChoice], usage: Usage | None = None) -> Completion:
        if usage is None and self.running_usage and choices:
            usage = self.usage()
        return Completion(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=choices,
            system_fingerprint=self.state.system_fingerprint,
            usage=usage if self.include_usage or self.running_usage else UNSET,
        )


def _joined(a: CompletionLogprobs, b: CompletionLogprobs) -> CompletionLogprobs:
    return CompletionLogprobs(
        a.tokens + b.tokens,
        a.token_logprobs + b.token_logprobs,
        a.top_logprobs + b.top_logprobs,
        a.text_offset + b.text_offset,
    )
