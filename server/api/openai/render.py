"""POST /v1/chat/completions/render and llama.cpp's POST /apply-template: the prompt of a conversation, unanswered."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.server.api import needs
from quire.server.api.openai.protocol import ChatCompletionRequest
from quire.server.api.openai.translate import conversation
from quire.server.http.caller import caller
from quire.server.http.read_body import use_body
from quire.server.http.sse import JsonResponse
from quire.server.keys.access import require_model
from quire.server.prompt.conversation import Rendered, render_conversation
from quire.server.prompt.encode import encode_rendered
from quire.server.prompt.images import after_images
from quire.server.turns.threads import Deferred

R = TypeVar("R")


class RenderedPrompt(msgspec.Struct, kw_only=True):
    prompt: str
    prompt_token_ids: list[int]
    count: int
    max_model_len: int


class AppliedTemplate(msgspec.Struct):
    prompt: str


async def render(request: Request, state: needs.Tokenizing) -> Response:
    """Return the prompt of a conversation as text and as token ids, of any length."""

    def show(rendered: Rendered, body: ChatCompletionRequest) -> RenderedPrompt:
        ids = encode_rendered(rendered, state, bool(body.add_special_tokens))
        return RenderedPrompt(
            prompt=rendered.text, prompt_token_ids=ids, count=len(ids), max_model_len=state.model.max_model_len
        )

    return JsonResponse(await _rendered(request, state, show))


async def apply_template(request: Request, state: needs.Tokenizing) -> Response:
    """Return the prompt of a conversation as text."""
    return JsonResponse(await _rendered(request, state, lambda rendered, body: AppliedTemplate(rendered.text)))


async def _rendered(
    request: Request, state: needs.Tokenizing, show: Callable[[Rendered, ChatCompletionRequest], R]
) -> R:
    """`show(rendered conversation)`. Each run of image tokens is one token in its text."""

    def work(body: ChatCompletionRequest) -> R | Deferred[R]:
        state.require_ready()
        require_model(caller(request), body.model, state)
        prompt = conversation(body)
        tenant = caller(request).tenant
        return after_images(prompt, state, tenant, lambda: show(render_conversation(prompt, state), body))

    return await use_body(request, ChatCompletionRequest, state, work)
