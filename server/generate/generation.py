"""One request, from token ids to deltas: sends it to the engine, detokenizes outputs, ends it at a stop string."""

from __future__ import annotations

import asyncio
import time

import msgspec

from quire.engine.messages import (
    NO_COUNTS,
    AddRequest,
    Choice,
    EngineOutput,
    RequestTiming,
    TokenLogprobs,
)
from quire.server.engines.client import OutputStream
from quire.server.engines.handle import EngineHandle
from quire.server.errors import BadRequest
from quire.server.request.delta import Delta
from quire.server.request.generation_request import GenerationRequest
from quire.server.request.sink import EngineMetrics, MetricsSink
from quire.server.text.detokenizer import Detokenizer
from quire.server.text.tokenizer import Tokenizer

SLICE = 64  # tokens of a pile that are turned into text before others get their turn


class Generation:
    """Async iterator over the deltas of all choices in order of arrival; of equal choices, only the first yields.

    The request is sent when iteration begins; `aclose` aborts the rest.
    """

    def __init__(
        self,
        client: EngineHandle,
        tokenizer: Tokenizer,
        request: GenerationRequest,
        metrics: MetricsSink | None = None,
    ):
        self.request = request
        self._client = client
        self._tokenizer = tokenizer
        self._sink = metrics
        self._metrics: EngineMetrics | None = None  # once an engine is chosen
        self._stream: OutputStream | None = None
        self._choices: dict[str, _Choice] = {}  # the unfinished ones, by their engine request
        self._num_output_tokens = 0  # for the longest finished choice
        self._rest: EngineOutput | None = None  # for a pile

    @property
    def client(self) -> EngineHandle:
        return self._client

    @property
    def open_ids(self) -> list[str]:
        """Return the ids of the engine requests of the unfinished choices."""
        return list(self._choices)

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Delta:
        if self._stream is None:
            self._start()
        while True:
            output = await self._next_output()
            choice = self._choices[output.request_id]
            if self.request.progress is not None and self._only_reports(output):
                continue
            if self._metrics is not None:
                choice.observe(self._metrics, output)
            delta = choice.advance(output)
            if delta is None:
                continue
            if delta.finish_reason is not None:
                self._finish(output, delta, choice)
            return delta

    def _only_reports(self, output: EngineOutput) -> bool:
        """Report the progress; return whether the output carries nothing else."""
        progress, prompt = self.request.progress, self.request.request_id
        if output.new_token_ids:
            progress.record_first_token(prompt, output.counts)
            return False
        progress.note(prompt, output.counts)
        return output.finish_reason is None and output.prompt_logprobs is None

    async def _next_output(self) -> EngineOutput:
        """Yield the backlog of a choice in slices, with a turn of the event loop between them."""
        if self._rest is None:
            output = await self._stream.__anext__()
        else:
            output, self._rest = self._rest, None
            await asyncio.sleep(0)
        if len(output.new_token_ids) > SLICE:
            output, self._rest = _split(output)
        return output

    @property
    def _ids(self) -> list[str]:
        """Return the ids of the engine requests, one per choice unless the choices are equal."""
        name, n = self.request.request_id, self.request.n // self.request.num_copies
        return [name] if n == 1 else [f"{name}/{index}" for index in range(n)]

    async def aclose(self) -> None:
        """Abort what still runs. Idempotent."""
        if self._stream is not None:
            for _ in range(len(self._choices)):
                self._choices.popitem()
                if self._metrics is not None:
                    self._metrics.observe_abort()
            await self._stream.aclose()
        for one in self.request.media:
            one.lease.release()

    def called_tools(self, index: int) -> None:
        """Report that the answer of a choice, which has ended, called tools: the engine keeps its cached prefix for a
        while.
        """
        if self._stream is not None:
            self._stream.called_tools(self._ids[index // self.request.num_copies])

    def _start(self) -> None:
        request, ids = self.request, self._ids
        assert request.structure is None or request.sampling.grammar is not None, "not compiled"
        siblings = [
            Choice(request_id, _int64(request.sampling.seed + index)) for index, request_id in enumerate(ids) if index
        ]
        message = AddRequest(
            ids[0],
            request.prompt_token_ids,
            request.sampling,
            priority=request.priority,
            cache_salt=request.cache_salt,
            siblings=siblings,
            background=request.background,
            cache_key=request.cache_key,
            cache_seconds=request.cache_seconds,
            may_call_tools=request.parsing is not None and bool(request.parsing.tools),
            media=[one.item for one in request.media],
            tenant=request.tenant,
            weight=request.weight,
            adapters=[one.use for one in request.adapters],
            report_prefill=request.progress is not None,
            turn_start=request.turn_start,
            transfer=request.transfer,
            engine=request.engine,
        )
        try:
            self._stream = self._client.generate(message)
        except ValueError as error:
            raise BadRequest(str(error), param="request_id") from None
        self._choices = {request_id: _Choice(index, request, self._tokenizer) for index, request_id in enumerate(ids)}
        if self._sink is not None:
            self._metrics = self._sink.for_engine(self._stream.engine)
            for lease in {id(one.lease): one.lease for one in request.media}.values():
                self._metrics.observe_medium(lease.medium.num_tokens, lease.found, lease.seconds)

    def _finish(self, output: EngineOutput, delta: Delta, choice: _Choice) -> None:
        del self._choices[output.request_id]
        self._rest = None  # a stop string may end a choice before its pile does
        if output.finish_reason is None:  # a stop string, which the engine does not know
            self._stream.abort(output.request_id)
        timing = choice.timing
        if timing is not None and output.finish_reason is None:
            timing = msgspec.structs.replace(timing, finished=time.time())
        self.request.timing = timing or self.request.timing
        self.request.sent = output.sent or self.request.sent
        if self._metrics is None:
            return
        num_tokens = choice.detokenizer.num_tokens + choice.num_silent
        self._num_output_tokens = max(self._num_output_tokens, num_tokens)
        self._metrics.observe_request(self.request, delta.finish_reason, num_tokens, choice.first_token_time, timing)
        if not self._choices:
            self._metrics.observe_group(self.request, self._num_output_tokens)


def _split(output: EngineOutput) -> tuple[EngineOutput, EngineOutput]:
    """Return the first `SLICE` tokens, and the rest with all that ends the request."""
    logprobs = output.logprobs
    first = EngineOutput(
        output.request_id,
        output.new_token_ids[:SLICE],
        logprobs=logprobs and logprobs[:SLICE],
        prompt_logprobs=output.prompt_logprobs,
        counts=output.counts,
    )
    return first, msgspec.structs.replace(
        output, new_token_ids=output.new_token_ids[SLICE:], logprobs=logprobs and logprobs[SLICE:], prompt_logprobs=None
    )


def _int64(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


def _text_ends(request: GenerationRequest, tokenizer: Tokenizer) -> frozenset[int]:
    """Return `request.text_ends` and the stop tokens that are shown but are not text themselves."""
    if not request.include_stop_str_in_output:
        return request.text_ends
    sampling = request.sampling
    return request.text_ends | (tokenizer.added_ids & {*sampling.stop_token_ids, *sampling.eos_token_ids})


class _Choice:
    """One of the n: its detokenizer, and the tokens whose text is not complete."""

    __slots__ = (
        "counts",
        "detokenizer",
        "first_token_time",
        "index",
        "last_token_time",
        "logprobs",
        "num_silent",
        "num_taken",
        "request",
        "timing",
        "token_ids",
    )

    def __init__(self, index: int, request: GenerationRequest, tokenizer: Tokenizer):
        self.index = index
        self.request = request
        self.detokenizer = Detokenizer(
            tokenizer,
            request.prompt_token_ids,
            request.stop,
            request.include_stop_str_in_output,
            request.skip_special_tokens,
            request.spaces_between_special_tokens,
            request.sampling.min_tokens,
            request.visible_ids,
            _text_ends(request, tokenizer),
        )
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.num_taken = 0  # tokens given out
        self.num_silent = 0  # 1 once a stop token without text ended it
        self.counts = NO_COUNTS
        self.first_token_time = self.last_token_time = 0.0
        self.timing: RequestTiming | None = None  # the engine's newest

    def advance(self, output: EngineOutput) -> Delta | None:
        """Take an output and return its delta, or None if there is nothing to send yet."""
        detokenizer, finish_reason, stop_reason = self.detokenizer, output.finish_reason, output.stop_reason
        self.counts = self.counts.then(output.counts)
        self.timing = output.timing or self.timing
        ids = output.new_token_ids
        self.token_ids += ids
        if output.logprobs is not None:
            self.logprobs += output.logprobs
        self.num_silent = int(finish_reason == "stop" and bool(ids) and not self.request.include_stop_str_in_output)
        text = detokenizer.push(ids[:-1] if self.num_silent else ids)
        if finish_reason is not None:
            text += detokenizer.finish()
        num_released = detokenizer.num_released
        if detokenizer.stopped is not None:
            finish_reason, stop_reason, self.num_silent = "stop", detokenizer.stopped, 0
        elif finish_reason is not None:
            num_released += self.num_silent
        count = num_released - self.num_taken
        if not (count or text or finish_reason or output.prompt_logprobs):
            return None
        self.num_taken = num_released
        logprobs = None if self.request.sampling.logprobs is None else self._remove_first(self.logprobs, count)
        return Delta(
            self.index,
            text,
            self._remove_first(self.token_ids, count),
            logprobs,
            output.prompt_logprobs,
            finish_reason,
            stop_reason,
            self.counts,
            output.error,
            output.error_kind,
        )

    def _remove_first(self, items: list, count: int) -> list:
        taken = items[:count]
        del items[:count]
        return taken

    def observe(self, metrics: EngineMetrics, output: EngineOutput) -> None:
        """Record when tokens came. A prompt is counted at its first token, or when a request without tokens ends."""
        num_tokens = len(output.new_token_ids)
        if not self.last_token_time and (num_tokens or output.finish_reason == "length"):
            metrics.observe_prompt(len(self.request.prompt_token_ids), output.counts.cached)
        if not num_tokens:
            return
        now = time.time()
        if self.last_token_time:
            metrics.observe_tokens(now - self.last_token_time, num_tokens)
        else:
            self.first_token_time = now
            metrics.observe_first_token(now - self.request.arrival_time)
        self.last_token_time = now
