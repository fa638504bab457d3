"""POST /v1/chat/completions/render, /v1/completions/render, llama.cpp's POST /apply-template: prompts, unanswered."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.messages import MediaItem
from quire.server.api import needs
from quire.server.api.openai.protocol import ChatCompletionRequest, CompletionRequest, JsonObject, StreamOptions
from quire.server.api.openai.translate import chat_spec, completion_spec, conversation
from quire.server.generate.prepare import checked
from quire.server.http.caller import caller
from quire.server.http.read_body import use_body
from quire.server.http.sse import JsonResponse
from quire.server.keys.access import require_model
from quire.server.media.inputs import MediaKind
from quire.server.prompt.conversation import Rendered, render_conversation
from quire.server.prompt.encode import encode_rendered
from quire.server.prompt.images import after_images
from quire.server.request.request import GenerationSpec
from quire.server.turns.threads import Deferred

R = TypeVar("R")


class RenderedSampling(msgspec.Struct, kw_only=True):
    """The parameters that would apply, by the names of requests."""

    n: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    max_tokens: int
    min_tokens: int
    stop: list[str]
    stop_token_ids: list[int]
    ignore_eos: bool
    logprobs: int | None
    prompt_logprobs: int | None


class Place(msgspec.Struct):
    offset: int
    length: int


class Features(msgspec.Struct):
    """The images and videos of a prompt, as KV events name them, and the places of their tokens."""

    mm_hashes: dict[str, list[str]]
    mm_placeholders: dict[str, list[Place]]


class RenderedPrompt(msgspec.Struct, kw_only=True):
    """vLLM's answer, and the text and the size of the prompt."""

    request_id: str
    model: str | None
    prompt: str | None  # null for a prompt of token ids
    token_ids: list[int]
    prompt_token_ids: list[int]
    count: int
    max_model_len: int
    features: Features | None  # null without media
    sampling_params: RenderedSampling | None  # null for a model that does not generate
    stream: bool
    stream_options: StreamOptions | None
    cache_salt: str | None
    priority: int
    kv_transfer_params: JsonObject | None


class AppliedTemplate(msgspec.Struct):
    prompt: str


async def render(request: Request, state: needs.Tokenizing) -> Response:
    """Return the prompt of a conversation as text and as token ids, of any length."""

    def show(rendered: Rendered, body: ChatCompletionRequest) -> RenderedPrompt:
        spec = chat_spec(body, request_id=_new_id("chatcmpl"))
        sampling = _sampling(spec, state)
        ids, media = encode_rendered(rendered, state, bool(body.add_special_tokens))
        features = _features(media, rendered.illustrated.kinds) if media else None
        return _prompt(body, spec, state, sampling, rendered.text, ids, features)

    return JsonResponse(await _rendered(request, state, show))


async def render_texts(request: Request, state: needs.Tokenizing) -> Response:
    """Return the prompts of a text completion as text and as token ids, of any length."""

    def work(body: CompletionRequest) -> list[RenderedPrompt]:
        state.require_ready()
        require_model(caller(request), body.model, state)
        spec = completion_spec(body, request_id=_new_id("cmpl"))
        special, sampling = spec.add_special_tokens is not False, _sampling(spec, state)
        return [
            _prompt(body, spec, state, sampling, None, one)
            if isinstance(one, list)
            else _prompt(body, spec, state, sampling, one, state.tokenizer.encode(one, special))
            for one in spec.prompts
        ]

    return JsonResponse(await use_body(request, CompletionRequest, state, work))


def _new_id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"


def _prompt(
    body: ChatCompletionRequest | CompletionRequest,
    spec: GenerationSpec,
    state: needs.Tokenizing,
    sampling: RenderedSampling | None,
    text: str | None,
    ids: list[int],
    features: Features | None = None,
) -> RenderedPrompt:
    room = max(state.model.max_model_len - len(ids), 0)  # max_tokens that fit into the context
    if sampling is not None:
        sampling = msgspec.structs.replace(sampling, max_tokens=min(sampling.max_tokens, room))
    return RenderedPrompt(
        request_id=spec.request_id,
        model=body.model,
        prompt=text,
        token_ids=ids,
        prompt_token_ids=ids,
        count=len(ids),
        max_model_len=state.model.max_model_len,
        features=features,
        sampling_params=sampling,
        stream=bool(body.stream),
        stream_options=body.stream_options,
        cache_salt=body.cache_salt,
        priority=body.priority or 0,
        kv_transfer_params=body.kv_transfer_params,
    )


def _features(media: list[MediaItem], kinds: list[MediaKind]) -> Features:
    found = Features({}, {})
    for item, kind in zip(media, kinds, strict=True):
        found.mm_hashes.setdefault(kind, []).append(item.key)
        found.mm_placeholders.setdefault(kind, []).append(Place(item.offset, item.length))
    return found


def _sampling(spec: GenerationSpec, state: needs.Tokenizing) -> RenderedSampling | None:
    """Return the parameters with the defaults of the model; None for one that does not generate. Raises BadRequest."""
    if not state.model.writes:
        return None
    found = checked(spec, state)
    options = spec.options
    same = {name: getattr(found, name) for name in RenderedSampling.__struct_fields__ if hasattr(found, name)}
    stop = [options.stop] if isinstance(options.stop, str) else options.stop or []
    return RenderedSampling(**same | {"n": options.n, "seed": options.seed, "stop": stop})


async def apply_template(request: Request, state: needs.Tokenizing) -> Response:
    """Return the prompt of a conversation as text."""
    return JsonResponse(await _rendered(request, state, lambda rendered, body: AppliedTemplate(rendered.text)))


async def _rendered(
    request: Request, state: needs.Tokenizing, show: Callable[[Rendered, ChatCompletionRequest], R]
) -> R:
    """Return `show(rendered, body)`. Each run of image tokens is one token in the rendered text."""

    def work(body: ChatCompletionRequest) -> R | Deferred[R]:
        state.require_ready()
        require_model(caller(request), body.model, state)
        prompt = conversation(body)
        tenant = caller(request).tenant
        return after_images(prompt, state, tenant, lambda: show(render_conversation(prompt, state), body))

    return await use_body(request, ChatCompletionRequest, state, work)
