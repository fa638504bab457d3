"""Common parts of chat and text completions: admission, usage, the stream of chunks, the whole body."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.server.api import needs
from quire.server.api.openai import streams
from quire.server.api.openai.objects import Timings, Usage
from quire.server.api.openai.protocol import GenerationFields
from quire.server.errors import BadRequest
from quire.server.generate import deltas
from quire.server.generate.transfer import answered, check_transfer
from quire.server.http import admission, sse
from quire.server.http.caller import caller
from quire.server.request.delta import Delta
from quire.server.request.generation_request import GenerationRequest
from quire.server.request.progress import check_progress, report_progress
from quire.server.request.usage import TokenUsage

T = TypeVar("T", bound=msgspec.Struct)


def admit(request: Request, body: GenerationFields, state: needs.Admission, prefix: str) -> dict[str, Any]:
    """Check that the server can take a request now. Returns the identity fields of its `GenerationSpec`.

    Raises Unavailable, NotFound for the model, BadRequest.
    """
    identity = admission.admit(
        request,
        state,
        prefix,
        model=body.model,
        priority=body.priority,
        request_id=body.request_id,
        lora=body.lora,
    )
    if body.stream_options is not None and not body.stream:
        raise BadRequest("stream_options needs stream to be true.", param="stream_options")
    check_progress(body.return_progress, body.stream)
    check_transfer(body.kv_transfer_params, state.config.cache)
    streams.stream_name(request, body.stream)
    return identity


async def respond(
    request: Request, state: needs.Completion, answer: Answer, requests: Sequence[GenerationRequest], param: str
) -> Response:
    """Generate and write the answer whole or as a stream. `param` is the field that holds the prompt.

    Raises ApiError for everything that goes wrong before the first byte of the answer.
    """
    body = answer.body
    progress = report_progress(body.return_progress, requests)
    predict = body.t_max_predict_ms / 1000 if body.t_max_predict_ms else None
    stream = await admission.generate(request, state, requests, param, predict)
    if body.stream:
        frames = sse.to_the_end(answer.frames(stream, caller(request).turn), answer.id)
        return streams.event_stream(request, state, frames, progress)
    choices = await sse.unless_disconnected(request, deltas.collect(stream, len(requests) * answer.n))
    return await state.threads.run(
        answer.size(choices), lambda: sse.JsonResponse(answer.whole(choices)), caller(request).turn
    )


class Answer(ABC):
    """The answer to one request. A subclass writes the objects of its endpoint."""

    chunk_type: type[msgspec.Struct]  # of an event of a stream

    def __init__(
        self,
        body: GenerationFields,
        state: needs.Completion,
        answer_id: str,
        requests: Sequence[GenerationRequest],
    ):
        self.body, self.state, self.id = body, state, answer_id
        self.requests = requests
        self.prompts = [one.prompt_token_ids for one in requests]
        self.created = int(time.time())
        self.model = state.answering(body.model)
        self.n = body.n or 1
        self.used = TokenUsage.for_requests(requests)
        options = body.stream_options
        self.include_usage = bool(options and options.include_usage)
        self.running_usage = bool(options and options.continuous_usage_stats)
        self.started: set[int] = set()  # choices that have had a chunk
        # Most chunks differ only in index and text: the rest is encoded once.
        empty = msgspec.json.encode(self._chunk([]))
        self.head, self.tail = (b"data: " + empty + b"\n\n").split(b'"choices":[]')
        self.head += b'"choices":[{"index":'

    @abstractmethod
    def whole(self, choices: list[deltas.Choice]) -> msgspec.Struct:
        """Return the body of an answer that is not streamed."""

    @abstractmethod
    def frame(self, delta: Delta) -> bytes:
        """Return the events for one delta; may be empty."""

    def filled(self, kind: type[T], choices: list[Any], timings: Timings | msgspec.UnsetType, **more: object) -> T:
        """Return an object of `kind` with the members that answers and chunks share."""
        return kind(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=choices,
            system_fingerprint=self.state.system_fingerprint,
            timings=timings,
            kv_transfer_params=answered(self.requests),
            **more,
        )

    def _chunk(self, choices: list[Any], usage: Usage | None = None) -> msgspec.Struct:
        timings = self.timings(usage is not None)
        return self.filled(self.chunk_type, choices, timings, usage=self.chunk_usage(choices, usage))

    def size(self, choices: list[deltas.Choice]) -> int:
        """Return the work of `whole`, for `Threads.run`."""
        return deltas.answer_size(choices)

    def frame_size(self, delta: Delta) -> int:
        """Return the work of `frame`, for `Threads.run`; 0 runs it on the event loop."""
        return 0

    async def frames(self, stream: AsyncGenerator[Delta, None], tenant: str) -> AsyncGenerator[bytes, None]:
        """Yield bytes of whole events, large ones written in the tenant's turn. Closing it aborts the generation."""
        try:
            async for delta in stream:
                self.used.add(delta)
                if size := self.frame_size(delta):
                    frame = await self.state.threads.run(size, partial(self.frame, delta), tenant)
                else:
                    frame = self.frame(delta)
                if frame:
                    yield frame
            if self.include_usage or self.body.return_timings:
                yield self.event([], Usage.from_usage(self.used))
        finally:
            await stream.aclose()

    def event(self, choices: list[Any], usage: Usage | None = None) -> bytes:
        return sse.event(msgspec.json.encode(self._chunk(choices, usage)))

    def chunk_usage(self, choices: list[Any], usage: Usage | None) -> Usage | msgspec.UnsetType | None:
        """Return the `usage` of a chunk: absent unless asked for; null until the last unless asked for in every
        chunk.
        """
        if usage is None and self.running_usage and choices:
            usage = Usage.from_usage(self.used)
        return usage if self.include_usage or self.running_usage else msgspec.UNSET

    def timings(self, ended: bool) -> Timings | msgspec.UnsetType:
        """Return the `timings` of the answer, or of its last chunk, if they were asked for."""
        if not (ended and self.body.return_timings):
            return msgspec.UNSET
        return Timings.from_requests(self.used, [one.timing for one in self.requests if one.timing is not None])
