"""POST /v1/chat/completions: messages -> one body, or SSE chunks."""

from __future__ import annotations

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from quire.server.api import needs
from quire.server.api.openai.answer import Answer, admit, respond
from quire.server.api.openai.logprobs import Formatter
from quire.server.api.openai.objects import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ResponseMessage,
    Usage,
)
from quire.server.api.openai.parsed import EventWriter
from quire.server.api.openai.protocol import ChatCompletionRequest
from quire.server.api.openai.translate import chat_spec
from quire.server.generate import deltas
from quire.server.generate.prepare import prepare
from quire.server.http import sse
from quire.server.http.caller import caller
from quire.server.http.read_body import use_body
from quire.server.parsers.events import Content
from quire.server.prompt.images import after_images
from quire.server.request.delta import Delta
from quire.server.request.generation_request import GenerationRequest
from quire.server.turns.threads import Deferred

ID_PREFIX = "chatcmpl-"


async def chat_completions(request: Request, state: needs.Completion) -> Response:
    """Answer a conversation with one or several choices, as a whole or as a stream of events. Raises ApiError for
    everything that goes wrong before the first byte of the answer.
    """
    body, one = await use_body(request, ChatCompletionRequest, state, lambda body: _prepare(request, body, state))
    answer = ChatAnswer(body, state, ID_PREFIX + caller(request).request_id, one)
    return await respond(request, state, answer, [one], "messages")


Prepared = tuple[ChatCompletionRequest, GenerationRequest]


def _prepare(request: Request, body: ChatCompletionRequest, state: needs.Preparing) -> Prepared | Deferred[Prepared]:
    identity = admit(request, body, state, ID_PREFIX)
    spec = chat_spec(body, **identity)

    def finish() -> Prepared:
        (one,) = prepare(spec, state)
        # freed here, in the thread: freeing takes long
        body.messages, body.documents, body.chat_template_kwargs, spec.prompts = [], None, None, []
        return body, one

    return after_images(spec, state, spec.tenant, finish)


class ChatAnswer(Answer):
    """A `ChatCompletion`, or its chunks."""

    chunk_type = ChatCompletionChunk
    body: ChatCompletionRequest

    def __init__(self, body: ChatCompletionRequest, state: needs.Completion, answer_id: str, one: GenerationRequest):
        super().__init__(body, state, answer_id, [one])
        self.parsed = one.parsing is not None
        self.writer = EventWriter(body, state.config.server.reasoning_field)
        self.formatter = Formatter(
            state.tokenizer, body.top_logprobs or 0, as_ids=bool(body.return_tokens_as_token_ids)
        )

    def whole(self, choices: list[deltas.Choice]) -> ChatCompletion:
        for choice in choices:
            self.used.add(choice)
        body = self.body
        found = [
            ChatChoice(
                i,
                self.writer.message(choice.events) if self.parsed else ResponseMessage(content=choice.text),
                self.formatter.chat(choice.logprobs) if body.logprobs else None,
                self.writer.finish_reason(choice.finish_reason),
                choice.stop_reason,
                choice.token_ids if body.return_token_ids else UNSET,
            )
            for i, choice in enumerate(choices)
        ]
        prompt_logprobs = UNSET
        if body.prompt_logprobs is not None:
            prompt_logprobs = Formatter(self.state.tokenizer, body.prompt_logprobs).prompt(choices[0].prompt_logprobs)
        return self.filled(
            ChatCompletion,
            found,
            self.timings(True),
            usage=Usage.from_usage(self.used),
            prompt_logprobs=prompt_logprobs,
            prompt_token_ids=self.prompts[0] if body.return_token_ids else UNSET,
        )

    def frame(self, delta: Delta) -> bytes:
        return self._first_event(delta) + self._content_event(delta) + self._last_event(delta)

    def _first_event(self, delta: Delta) -> bytes:
        """Return the role of a choice; with the first of all, the prompt's ids if they were asked for."""
        if delta.index in self.started:
            return b""
        chunk = self._chunk([ChatChunkChoice(delta.index, ChatDelta(role="assistant", content=""))])
        if not self.started and self.body.return_token_ids:
            chunk.prompt_token_ids = self.prompts[0]
        self.started.add(delta.index)
        return sse.event(msgspec.json.encode(chunk))

    def _content_event(self, delta: Delta) -> bytes:
        if self.parsed:
            return self._parsed_events(delta)
        if self._with_tokens():
            return self._token_event(delta, ChatDelta(content=delta.text)) if delta.text or delta.token_ids else b""
        return self._text_event(delta.index, delta.text) if delta.text else b""

    def _text_event(self, index: int, text: str) -> bytes:
        return b'%b%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}]%b' % (
            self.head,
            index,
            sse.one_line(msgspec.json.encode(text)),
            self.tail,
        )

    def _with_tokens(self) -> bool:
        """Return whether tokens are reported in addition to the text."""
        return bool(self.body.logprobs or self.body.return_token_ids or self.running_usage)

    def _token_event(self, delta: Delta, content: ChatDelta) -> bytes:
        logprobs = self.formatter.chat(delta.logprobs or []) if self.body.logprobs else None
        ids = delta.token_ids if self.body.return_token_ids else UNSET
        return self.event([ChatChunkChoice(delta.index, content, logprobs, token_ids=ids)])

    def _parsed_events(self, delta: Delta) -> bytes:
        """Return one chunk per event; the first has the tokens of all of them."""
        match delta.events:
            case [Content(text)] if not self._with_tokens():  # most deltas
                return self._text_event(delta.index, text)
        deltas = [self.writer.delta(delta.index, event) for event in delta.events or ()]
        deltas = [one for one in deltas if one is not None]
        out = b""
        if self._with_tokens() and (deltas or delta.token_ids):
            out = self._token_event(delta, deltas.pop(0) if deltas else ChatDelta(content=""))
        return out + b"".join(self.event([ChatChunkChoice(delta.index, one)]) for one in deltas)

    def _last_event(self, delta: Delta) -> bytes:
        if delta.finish_reason is None:
            return b""
        reason = self.writer.finish_reason(delta.finish_reason)
        return self.event([ChatChunkChoice(delta.index, ChatDelta(), None, reason, delta.stop_reason)])
