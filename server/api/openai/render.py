"""POST /v1/chat/completions/render, /v1/completions/render, llama.cpp's POST /apply-template: prompts, unanswered."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.server.api import needs
from quire.server.api.openai.protocol import ChatCompletionRequest, CompletionRequest
from quire.server.api.openai.translate import completion_spec, conversation
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
    prompt: str | None  # null for a prompt of token ids
    token_ids: list[int]  # vLLM's name
    prompt_token_ids: list[int]
    count: int
    max_model_len: int


class AppliedTemplate(msgspec.Struct):
    prompt: str


async def render(request: Request, state: needs.Tokenizing) -> Response:
    """Return the prompt of a conversation as text and as token ids, of any length."""

    def show(rendered: Rendered, body: ChatCompletionRequest) -> RenderedPrompt:
        ids = encode_rendered(rendered, state, bool(body.add_special_tokens))
        return _prompt(rendered.text, ids, state)

    return JsonResponse(await _rendered(request, state, show))


async def render_texts(request: Request, state: needs.Tokenizing) -> Response:
    """Return the prompts of a text completion as text and as token ids, of any length."""

    def work(body: CompletionRequest) -> list[RenderedPrompt]:
        state.require_ready()
        require_model(caller(request), body.model, state)
        spec = completion_spec(body, request_id="render")
        special = spec.add_special_tokens is not False
        return [
            _prompt(None, one, state)
            if isinstance(one, list)
            else _prompt(one, state.tokenizer.encode(one, special), state)
            for one in spec.prompts
        ]

    return JsonResponse(await use_body(request, CompletionRequest, state, work))


def _prompt(text: str | None, ids: list[int], state: needs.Tokenizing) -> RenderedPrompt:
    return RenderedPrompt(
        prompt=text, token_ids=ids, prompt_token_ids=ids, count=len(ids), max_model_len=state.model.max_model_len
    )


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
