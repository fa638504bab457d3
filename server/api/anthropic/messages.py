"""Anthropic's POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from quire.server.api import needs
from quire.server.api.anthropic import stream as streams
from quire.server.api.anthropic.caching import Caching, caching, seconds_wanted
from quire.server.api.anthropic.protocol import CountTokensRequest, MessageResponse, MessagesRequest, TokenCount
from quire.server.api.anthropic.translate import conversation, spec
from quire.server.generate import deltas
from quire.server.generate.prepare import prepare
from quire.server.generate.transfer import answered, check_transfer
from quire.server.http import admission, sse
from quire.server.http.cache_hint import with_retention
from quire.server.http.caller import caller
from quire.server.http.read_body import use_body
from quire.server.keys.access import require_model
from quire.server.parsers.events import Content
from quire.server.prompt.encode import encode_conversation
from quire.server.prompt.images import after_images
from quire.server.request.generation_request import GenerationRequest
from quire.server.request.progress import check_progress, report_progress
from quire.server.request.usage import TokenUsage
from quire.server.turns.threads import Deferred

ID_PREFIX = "msg_"


async def create_message(request: Request, state: needs.Completion) -> Response:
    """Answer a conversation, as a whole or as a stream of events. Raises ApiError for everything that goes wrong before
    the first byte of the answer.
    """
    body, one, cached = await use_body(request, MessagesRequest, state, lambda body: _prepare(request, body, state))
    progress = report_progress(body.return_progress, [one])
    generation = await admission.generate(request, state, [one], "messages")
    used = TokenUsage.for_requests([one])
    message = MessageResponse(
        id=ID_PREFIX + caller(request).request_id,
        model=state.display_name(body.model),
        content=[],
        usage=cached.usage(used),
    )
    clipped = one.sampling.max_tokens < body.max_tokens
    if body.stream:
        frames = streams.Stream(message, used, clipped, cached).frames(generation)
        return sse.EventStream(
            sse.to_the_end(frames, message.id, streams.error_event, b""),
            state.config.server.sse_keep_alive_interval,
            progress,
        )
    (choice,) = await sse.unless_disconnected(request, deltas.collect(generation, 1))
    return await state.threads.run(
        deltas.answer_size([choice]),
        lambda: _whole(message, choice, one, clipped, cached, used),
        caller(request).turn,
    )


Prepared = tuple[MessagesRequest, GenerationRequest, Caching]


def _prepare(request: Request, body: MessagesRequest, state: needs.Preparing) -> Prepared | Deferred[Prepared]:
    check_progress(body.return_progress, body.stream)
    check_transfer(body.kv_transfer_params, state.config.cache)
    seconds = seconds_wanted(body)
    identity = with_retention(admission.admit(request, state, ID_PREFIX, model=body.model), seconds)
    wanted = spec(body, state.formats.reasoning is not None, **identity)

    def finish() -> Prepared:
        (one,) = prepare(wanted, state)
        body.messages, wanted.prompts = [], []  # freed here, in the thread: freeing takes long
        return body, one, caching(seconds, len(one.prompt_token_ids), state)

    return after_images(wanted, state, wanted.tenant, finish)


def _whole(
    message: MessageResponse,
    choice: deltas.Choice,
    one: GenerationRequest,
    clipped: bool,
    cached: Caching,
    used: TokenUsage,
) -> Response:
    used.add(choice)
    if one.sampling.max_tokens:
        message.content = streams.blocks(choice.events if one.parsing else [Content(choice.text)])
    message.stop_reason, message.stop_sequence = streams.stopped(choice.finish_reason, choice.stop_reason, clipped)
    message.usage, message.kv_transfer_params = cached.usage(used), answered([one])
    return sse.JsonResponse(message)


async def count_tokens(request: Request, state: needs.Tokenizing) -> Response:
    """Count the tokens of a prompt, without an answer."""

    def work(body: CountTokensRequest) -> TokenCount | Deferred[TokenCount]:
        state.require_ready()
        require_model(caller(request), body.model, state)
        prompt = conversation(body, state.formats.reasoning is not None)
        count = lambda: TokenCount(len(encode_conversation(prompt, state, False)))  # noqa: E731
        return after_images(prompt, state, caller(request).tenant, count)

    return sse.JsonResponse(await use_body(request, CountTokensRequest, state, work))
