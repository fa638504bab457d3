"""POST /v1/chat/completions: messages -> prompt ids -> one body, or SSE chunks."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from quire.server.api.openai import prepare as intake
from quire.server.api.openai.logprobs import Formatter
from quire.server.api.openai.protocol import (
    ROLES,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatDelta,
    Message,
    ResponseMessage,
    TokenizeRequest,
    Usage,
)
from quire.server.api.openai.sampling import to_sampling_params
from quire.server.errors import BadRequest
from quire.server.generate import deltas
from quire.server.generate.generation import Delta, Generation, GenerationRequest
from quire.server.http import sse
from quire.server.state import ServerState

# fields of their own
RESERVED_KWARGS = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "conversation",
        "tokenize",
    }
)


async def chat_completions(request: Request, state: ServerState) -> Response:
    """Raises ApiError for everything that goes wrong before the first byte of the answer."""
    body, one = await intake.take(
        request, ChatCompletionRequest, state, lambda body: (body, _prepare(request, body, state))
    )
    total, predict = intake.deadlines(request, body)
    intake.reserve_room(request, state, [one], "messages")
    answer_id = f"chatcmpl-{request.scope['request_id']}"
    chat = _Chat(body, state, answer_id, one.prompt_token_ids)
    stream = deltas.run([Generation(state.client, state.tokenizer, one, state.metrics)], total, predict)
    if body.stream:
        return sse.EventStream(
            sse.to_the_end(chat.frames(stream), chat.id), state.config.server.sse_keep_alive_interval
        )
    choices = await sse.unless_disconnected(request, deltas.collect(stream, body.n or 1))
    return await state.threads.run(deltas.answer_size(choices), lambda: sse.JsonResponse(chat.whole(choices)))


def _prepare(request: Request, body: ChatCompletionRequest, state: ServerState) -> GenerationRequest:
    model = state.require_ready()
    state.require_model(body.model)
    intake.check_options(body)
    priority = intake.priority(request, body, model)
    state.require_room()
    sampling = to_sampling_params(body, model, state.tokenizer)
    ids = intake.truncate(prompt_ids(body, state), body, sampling, model)
    body.messages, body.documents, body.chat_template_kwargs = [], None, None  # told; to free many takes long, so here
    return intake.generation_request(
        ids,
        body,
        sampling,
        model,
        request_id=f"chatcmpl-{intake.request_id(request, body)}",
        priority=priority,
        param="messages",
        tenant=request.scope.get("tenant"),
    )


def prompt_ids(body: ChatCompletionRequest | TokenizeRequest, state: ServerState) -> list[int]:
    """The messages through the chat template and the tokenizer.

    Raises BadRequest naming the message or the option at fault.
    """
    if body.chat_template is not None and not state.config.server.trust_request_chat_template:
        raise BadRequest(
            "chat_template is only accepted by a server with --trust-request-chat-template.", param="chat_template"
        )
    if body.continue_final_message and body.add_generation_prompt:
        raise BadRequest(
            "continue_final_message and add_generation_prompt exclude each other.", param="continue_final_message"
        )
    kwargs = body.chat_template_kwargs or {}
    if reserved := sorted(RESERVED_KWARGS.intersection(kwargs)):
        raise BadRequest(
            f"chat_template_kwargs must not set {reserved[0]}: the request has a field for it.",
            param="chat_template_kwargs",
        )
    messages = [template_message(message, f"messages.{i}") for i, message in enumerate(body.messages)]
    if body.continue_final_message and messages[-1]["role"] != "assistant":
        raise BadRequest(
            "continue_final_message needs a last message of the assistant.", param="continue_final_message"
        )
    try:
        # templates older than the role know it as system
        if "developer" not in state.tokenizer.template_source(body.chat_template):
            messages = [
                message | {"role": "system"} if message["role"] == "developer" else message for message in messages
            ]
        text = state.tokenizer.render_chat(
            messages,
            add_generation_prompt=intake.resolve(body.add_generation_prompt, not body.continue_final_message),
            continue_final_message=bool(body.continue_final_message),
            documents=body.documents,
            chat_template=body.chat_template,
            variables=kwargs,
        )
    except ValueError as error:
        raise BadRequest(f"{str(error)[:1].upper()}{str(error)[1:]}.", param="messages") from error
    may_truncate = isinstance(body, TokenizeRequest) or body.truncate_prompt_tokens is not None
    return intake.encode([text], bool(body.add_special_tokens), state, "messages", may_truncate=may_truncate)[0]


def template_message(message: Message, path: str) -> dict[str, Any]:
    """A message as templates expect it, of text alone. Raises BadRequest."""
    if message.role not in ROLES:
        raise BadRequest(
            f"{path}.role must be one of {', '.join(ROLES)}, not '{message.role[:100]}'.", param=f"{path}.role"
        )
    content: Any = message.content
    if isinstance(content, list):
        content = [{"type": "text", "text": _part_text(part, f"{path}.content.{i}")} for i, part in enumerate(content)]
    elif content is None:
        content = message.refusal
    if content is None:
        raise BadRequest(
            f"Missing required parameter: {path}.content.", param=f"{path}.content", code="missing_required_parameter"
        )
    out = {"role": message.role, "content": content}
    return out if message.name is None else out | {"name": message.name}


def _part_text(part: Any, path: str) -> str:
    if part.type not in ("text", "refusal"):
        raise BadRequest(
            f"{path}.type: content of type '{part.type[:100]}' is not supported, only text.",
            param=f"{path}.type",
            code="unsupported_parameter",
        )
    text = part.text if part.type == "text" else part.refusal
    if text is None:
        raise BadRequest(
            f"Missing required parameter: {path}.{part.type}.",
            param=f"{path}.{part.type}",
            code="missing_required_parameter",
        )
    return text


class _Chat:
    """The answer to one request, whole or in chunks."""

    def __init__(self, body: ChatCompletionRequest, state: ServerState, answer_id: str, ids: list[int]):
        self.body, self.state, self.id, self.ids = body, state, answer_id, ids
        self.created = int(time.time())
        self.model = state.names[0]
        self.counter = deltas.Counter(len(ids), body.n or 1)
        options = body.stream_options
        self.include_usage = bool(options and options.include_usage)
        self.running_usage = bool(options and options.continuous_usage_stats)
        self.formatter = Formatter(
            state.tokenizer, body.top_logprobs or 0, as_ids=bool(body.return_tokens_as_token_ids)
        )
        self.started: set[int] = set()  # choices whose role was sent
        # Most chunks differ only in index and text: the rest is encoded once.
        empty = msgspec.json.encode(self._chunk([]))
        self.head, self.tail = (b"data: " + empty + b"\n\n").split(b'"choices":[]')
        self.head += b'"choices":[{"index":'

    def whole(self, choices: list[deltas.Choice]) -> ChatCompletion:
        for i, choice in enumerate(choices):
            self.counter.add(i, len(choice.token_ids), choice.num_cached_tokens)
        body = self.body
        return ChatCompletion(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=[
                ChatChoice(
                    i,
                    ResponseMessage("assistant", choice.text),
                    self.formatter.chat(choice.logprobs) if body.logprobs else None,
                    choice.finish_reason,
                    choice.stop_reason,
                    choice.token_ids if body.return_token_ids else UNSET,
                )
                for i, choice in enumerate(choices)
            ],
            usage=self.usage(),
            system_fingerprint=self.state.system_fingerprint,
            prompt_logprobs=UNSET
            if body.prompt_logprobs is None
            else Formatter(self.state.tokenizer, body.prompt_logprobs).prompt(choices[0].prompt_logprobs),
            prompt_token_ids=self.ids if body.return_token_ids else UNSET,
        )

    def usage(self) -> Usage:
        return Usage.of(
            self.counter.num_prompt_tokens, self.counter.num_completion_tokens, self.counter.num_cached_tokens
        )

    async def frames(self, stream: AsyncGenerator[Delta, None]) -> AsyncGenerator[bytes, None]:
        """Bytes of whole events. Closing it aborts the generation."""
        try:
            async for delta in stream:
                self.counter.add(delta.index, len(delta.token_ids), delta.num_cached_tokens)
                if frame := self._frames_of(delta):
                    yield frame
            if self.include_usage:
                yield self._event([], self.usage())
        finally:
            await stream.aclose()

    def _frames_of(self, delta: Delta) -> bytes:
        out = b""
        if delta.index not in self.started:
            out = self._event(
                [ChatChunkChoice(delta.index, ChatDelta(role="assistant", content=""))], prompt=not self.started
            )
            self.started.add(delta.index)
        body = self.body
        if body.logprobs or body.return_token_ids or self.running_usage:
            if delta.text or delta.token_ids:
                logprobs = self.formatter.chat(delta.logprobs or []) if body.logprobs else None
                ids = delta.token_ids if body.return_token_ids else UNSET
                out += self._event(
                    [ChatChunkChoice(delta.index, ChatDelta(content=delta.text), logprobs, token_ids=ids)]
                )
        elif delta.text:
            out += b'%b%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}]%b' % (
                self.head,
                delta.index,
                msgspec.json.encode(delta.text),
                self.tail,
            )
        if delta.finish_reason is not None:
            out += self._event(
                [ChatChunkChoice(delta.index, ChatDelta(), None, delta.finish_reason, delta.stop_reason)]
            )
        return out

    def _event(self, choices: list[ChatChunkChoice], usage: Usage | None = None, prompt: bool = False) -> bytes:
        return sse.event(msgspec.json.encode(self._chunk(choices, usage, prompt)))

    def _chunk(
        self, choices: list[ChatChunkChoice], usage: Usage | None = None, prompt: bool = False
    ) -> ChatCompletionChunk:
        if usage is None and self.running_usage and choices:
            usage = self.usage()
        return ChatCompletionChunk(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=choices,
            system_fingerprint=self.state.system_fingerprint,
            usage=usage if self.include_usage or self.running_usage else UNSET,
            prompt_token_ids=self.ids if prompt and self.body.return_token_ids else UNSET,
        )
