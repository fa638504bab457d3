"""POST /v1/responses and /v1/responses/input_tokens."""

from __future__ import annotations

import logging
import sqlite3
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.server.api.openai.logprobs import Formatter
from quire.server.api.openai.responses import compaction, needs
from quire.server.api.openai.responses import history as past
from quire.server.api.openai.responses.answer import Answer
from quire.server.api.openai.responses.background import Run
from quire.server.api.openai.responses.conversations import append
from quire.server.api.openai.responses.history import History
from quire.server.api.openai.responses.items import as_items, stored
from quire.server.api.openai.responses.namespaces import by_joined_name
from quire.server.api.openai.responses.objects import ConversationId, InputTokens, ResponseObject, ResponseText
from quire.server.api.openai.responses.output import Output
from quire.server.api.openai.responses.protocol import (
    InputTokensRequest,
    ReasoningOptions,
    ResponsePrompt,
    ResponsesRequest,
    TextFormat,
)
from quire.server.api.openai.responses.store import Stored
from quire.server.api.openai.responses.translate import (
    conversation,
    prewarms,
    spec,
    truncate,
    wants_logprobs,
)
from quire.server.errors import BadRequest, NotFound
from quire.server.generate import deltas
from quire.server.generate.prepare import prepare
from quire.server.generate.transfer import answered, check_transfer
from quire.server.http import admission, sse
from quire.server.http.cache_hint import RETENTION, with_retention
from quire.server.http.caller import caller
from quire.server.http.paging import owner
from quire.server.http.parse_body import is_left_out
from quire.server.http.read_body import in_turns, use_body
from quire.server.keys.access import require_model
from quire.server.prompt.encode import encode_conversation
from quire.server.prompt.images import after_images
from quire.server.request.delta import Delta
from quire.server.request.generation_request import GenerationRequest
from quire.server.request.progress import PrefillProgress, check_progress, report_progress
from quire.server.request.usage import TokenUsage
from quire.server.turns.threads import SMALL, Deferred

logger = logging.getLogger(__name__)

ID_PREFIX = "resp_"

B = TypeVar("B", bound=ResponsePrompt)
R = TypeVar("R")
Work = tuple[B, R] | Deferred[tuple[B, R]]  # immediate, or deferred until images are loaded


class _Posting(needs.Body, needs.Responses, Protocol):
    """The state needed to read a body and the responses before it."""


class _Counting(_Posting, needs.Tokenizing, Protocol):
    """The state needed to count the tokens of a prompt."""


class _Preparing(needs.Preparing, needs.Responses, Protocol):
    """The state needed to prepare a response."""


class _Keeping(needs.Responses, needs.Threads, Protocol):
    """The state needed to store a response."""


class _Background(needs.Responses, needs.Drain, needs.Queue, needs.Settings, Protocol):
    """The state needed to run a response in the background."""


class _Creating(_Posting, needs.Completion, needs.Drain, Protocol):
    """The state needed to create a response."""


@dataclass(slots=True)
class _Prepared:
    """A prepared response. `items`: JSON of the request's own input, to be stored."""

    one: GenerationRequest
    answer: Answer
    items: bytes


async def create_response(request: Request, state: _Creating) -> Response:
    """Answer an input, as a whole, as a stream of events or in the background, and store the answer unless `store` is
    false. Raises ApiError for everything that goes wrong before the first byte of the answer.
    """
    key = uuid.uuid4().hex  # ids that clients choose may occur twice

    def work(body: ResponsesRequest, history: History | None) -> Work[ResponsesRequest, _Prepared]:
        return _prepare(request, body, history, state, key)

    body, prepared = await _with_history(request, ResponsesRequest, state, work)
    answer = prepared.answer
    progress = report_progress(body.return_progress, [prepared.one])
    generation = await admission.generate(request, state, [prepared.one], "input")
    keep = partial(_keep, request, state, body, prepared)
    if body.background:
        return await _in_background(request, state, body, answer, generation, keep, progress)
    if body.stream:
        frames = _frames(answer, generation, keep)
        return sse.EventStream(
            sse.to_the_end(frames, answer.response.id, done=b""),
            state.config.server.sse_keep_alive_interval,
            progress,
        )
    every = await sse.unless_disconnected(request, _all(generation))
    size = _size(sum(len(delta.token_ids) for delta in every), wants_logprobs(body))
    await state.threads.run(size, lambda: _finish(answer, every), caller(request).turn)
    return sse.JsonResponse(await keep(None))


async def _with_history(
    request: Request, cls: type[B], state: _Posting, work: Callable[[B, History | None], Work[B, R]]
) -> tuple[B, R]:
    """Return the body, and the result of `work` on it and on the items to which it refers; fetching these takes
    another turn in a thread.
    """
    body, done = await use_body(
        request, cls, state, lambda body: (body, None) if past.is_needed(body) else work(body, None)
    )
    if done is None:
        history = await past.fetch(request, body, state.responses, state)
        body, done = await in_turns(request, state, max(history.size, SMALL), lambda: work(body, history))
    return body, done


def _prepare(
    request: Request, body: ResponsesRequest, history: History | None, state: _Preparing, key: str
) -> Work[ResponsesRequest, _Prepared]:
    identity = admission.admit(request, state, ID_PREFIX, model=body.model, priority=body.priority)
    check_progress(body.return_progress, body.stream)
    check_transfer(body.kv_transfer_params, state.config.cache)
    if history is not None and (name := history.name):
        identity = with_retention(identity, RETENTION["in_memory"], name)
    _decide_to_store(request, body, state)
    before = [] if history is None else past.resolve(body, history)
    wanted = spec(body, before, **identity)

    def finish() -> tuple[ResponsesRequest, _Prepared]:
        truncate(wanted.prompts, body, state, body.max_output_tokens or 1)
        (one,) = prepare(wanted, state)
        wanted.prompts = []  # freed here, in the thread: freeing takes long
        return body, _prepared(body, one, state, key)

    return after_images(wanted, state, wanted.tenant, finish)


def _prepared(body: ResponsesRequest, one: GenerationRequest, state: needs.Preparing, key: str) -> _Prepared:
    items, compacts = msgspec.json.encode(stored(as_items(body.input), key)), compaction.is_asked(body.input)
    body.input = None  # freed here, too
    response = _response(body, one, state, key)
    output = Output(
        key,
        TokenUsage.for_requests([one]),
        by_joined_name(response.tools),
        response.reasoning.summary is not None,
        "reasoning.encrypted_content" in (body.include or ()),
        Formatter(state.tokenizer, body.top_logprobs or 0) if wants_logprobs(body) else None,
        prewarms(body),
        compacts,
    )
    return _Prepared(one, Answer(response, output, lambda: answered([one])), items)


def _decide_to_store(request: Request, body: ResponsesRequest, state: needs.Responses) -> None:
    """Set the default of `store`: true, but false for a batch line."""
    in_batch = caller(request).background
    if body.background and in_batch:
        raise BadRequest("background is not available in batches.", param="background")
    if body.store or body.background:
        state.responses.require_kept()
    if body.store is None:
        body.store = state.responses.kept and not in_batch


def _response(body: ResponsesRequest, one: GenerationRequest, state: needs.Names, key: str) -> ResponseObject:
    conversation_id = past.conversation_id(body)
    reasoning = body.reasoning or ReasoningOptions()
    summary = reasoning.summary or reasoning.generate_summary
    text_format = (body.text and body.text.format) or TextFormat(type="text")
    return ResponseObject(
        id=ID_PREFIX + key,
        created_at=int(time.time()),
        status="in_progress",
        background=bool(body.background),
        instructions=body.instructions,
        conversation=conversation_id and ConversationId(id=conversation_id),
        max_output_tokens=body.max_output_tokens,
        model=state.answering(body.model),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        reasoning=ReasoningOptions(effort=reasoning.effort, summary=summary),
        store=body.store,
        temperature=one.sampling.temperature,
        text=ResponseText(format=text_format),
        tool_choice=body.tool_choice or "auto",
        tools=[tool for tool in body.tools or () if not is_left_out(tool)],
        top_logprobs=body.top_logprobs or 0,
        top_p=one.sampling.top_p,
        truncation=body.truncation or "disabled",
        metadata=body.metadata or {},
    )


# ---- whole and streamed


async def _all(generation: AsyncGenerator[Delta, None]) -> list[Delta]:
    try:
        return [delta async for delta in generation]
    finally:
        await generation.aclose()


def _size(num_tokens: int, logprobs: bool) -> int:
    """Return the work of serializing an answer, for `Threads.run`."""
    return num_tokens * (deltas.POSITION_SIZE if logprobs else 1) + 16


def _finish(answer: Answer, every: list[Delta]) -> None:
    for delta in every:
        for _ in answer.output.push(delta):
            pass
    answer.complete()


async def _frames(answer: Answer, generation: AsyncGenerator[Delta, None], keep) -> AsyncGenerator[bytes, None]:
    lists = answer.events(generation)
    try:
        async for events in lists:
            yield b"".join(events)
    finally:
        await lists.aclose()
    yield answer.last(await keep(None))


async def _keep(
    request: Request,
    state: _Keeping,
    body: ResponsesRequest,
    prepared: _Prepared,
    events: bytes | None,
) -> bytes:
    """Store the response as it is now, if it is to be stored, and its items in its conversation. Returns its JSON.

    If the store fails or the answer is too large for it, the answer says that it is not stored.
    """
    response, responses = prepared.answer.response, state.responses
    size = _size(prepared.answer.output.used.num_output, wants_logprobs(body))
    encoded = await state.threads.run(size, lambda: msgspec.json.encode(response), caller(request).turn)
    try:
        if response.store:
            kept = Stored(
                response.id,
                owner(request),
                response.previous_response_id,
                response.status,
                encoded,
                prepared.items,
                events,
            )
            was_stored = response.background and response.status != "queued"
            response.store = await responses.run(responses.store.finish if was_stored else responses.store.put, kept)
        if response.conversation is not None and response.status in ("completed", "incomplete"):
            new = [*msgspec.json.decode(prepared.items, type=list[msgspec.Raw]), *response.output]
            await append(responses, response.conversation.id, owner(request), msgspec.json.encode(new))
    except NotFound:
        logger.info("%s: its conversation was deleted", response.id)
    except (BadRequest, sqlite3.Error):
        logger.exception("%s could not be stored", response.id)
        response.store = False
    return encoded if response.store == body.store else msgspec.json.encode(response)


# ---- in the background


async def _in_background(
    request: Request,
    state: _Background,
    body: ResponsesRequest,
    answer: Answer,
    generation: AsyncGenerator[Delta, None],
    keep,
    progress: PrefillProgress | None,
) -> Response:
    answer.response.status = "queued"
    encoded = await keep(None)
    if not answer.response.store:
        await generation.aclose()
        raise BadRequest("The response could not be stored, which background needs.", param="background")
    run = Run(owner(request), answer, generation, keep, bool(body.stream))
    num_reserved, account = caller(request).detach()  # until the run has ended

    def on_end() -> None:
        state.num_reserved -= num_reserved
        if account is not None:
            account.close(200)
        state.leave()

    state.enter()
    state.responses.start(run, on_end)
    if body.stream:
        frames = sse.to_the_end(run.follow(0), run.id, done=b"")
        return sse.EventStream(frames, state.config.server.sse_keep_alive_interval, progress)
    return sse.JsonResponse(encoded)


# ---- counting


async def count_input_tokens(request: Request, state: _Counting) -> Response:
    """Count the tokens of an input, without an answer."""

    def work(body: ResponsePrompt, history: History | None) -> Work[ResponsePrompt, InputTokens]:
        state.require_ready()
        require_model(caller(request), body.model, state)
        before = [] if history is None else past.resolve(body, history)
        prompt = conversation(body, before)

        def finish() -> tuple[ResponsePrompt, InputTokens]:
            truncate(prompt, body, state, 1)
            return body, InputTokens(input_tokens=len(encode_conversation(prompt, state, False)))

        return after_images(prompt, state, caller(request).tenant, finish)

    _, count = await _with_history(request, InputTokensRequest, state, work)
    return sse.JsonResponse(count)
