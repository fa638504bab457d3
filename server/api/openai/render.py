"""POST /v1/chat/completions/render and llama.cpp's POST /apply-template: the prompt of a conversation, unanswered."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.server.api.openai.protocol import ChatCompletionRequest
from quire.server.api.openai.translate import conversation
from quire.server.generate.conversation import render_conversation
from quire.server.generate.prepare import encode_texts
from quire.server.http.read_body import take
from quire.server.http.sse import JsonResponse
from quire.server.state import ServerState


class RenderedPrompt(msgspec.Struct, kw_only=True):
    prompt: str
    prompt_token_ids: list[int]
    count: int
    max_model_len: int


class AppliedTemplate(msgspec.Struct):
    prompt: str


async def render(request: Request, state: ServerState) -> Response:
    """The prompt as text and as token ids, of any length."""

    def work(body: ChatCompletionRequest) -> RenderedPrompt:
        text = _text(body, state)
        (ids,) = encode_texts([text], state, bool(body.add_special_tokens), "messages", may_truncate=True)
        return RenderedPrompt(
            prompt=text, prompt_token_ids=ids, count=len(ids), max_model_len=state.model.max_model_len
        )

    return JsonResponse(await take(request, ChatCompletionRequest, state, work))


async def apply_template(request: Request, state: ServerState) -> Response:
    """The prompt as text."""
    text = await take(request, ChatCompletionRequest, state, lambda body: _text(body, state))
    return JsonResponse(AppliedTemplate(text))


def _text(body: ChatCompletionRequest, state: ServerState) -> str:
    state.require_ready()
    state.require_model(body.model)
    return render_conversation(conversation(body), state).text
