"""Ollama's /api."""

from __future__ import annotations

import time
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.server.api import needs
from quire.server.api.ollama import library, protocol
from quire.server.api.ollama.answer import Answer, now
from quire.server.api.ollama.keep_alive import asks_to_unload, keep_alive_seconds
from quire.server.api.ollama.models import display_name, running, served_name, show, tags, version
from quire.server.api.ollama.protocol import ChatRequest, EmbeddingsRequest, EmbedRequest, GenerateRequest, ShowRequest
from quire.server.api.ollama.translate import chat_spec, generate_spec
from quire.server.errors import ApiError, NotFound
from quire.server.generate.pooling import Vector, embed_params
from quire.server.generate.prepare import prepare
from quire.server.http import admission, sse
from quire.server.http.cache_hint import with_retention
from quire.server.http.read_body import use_body
from quire.server.http.route import NDJSON, Route
from quire.server.http.vectors import VectorFields, to_requests, vectors
from quire.server.prompt.images import after_images
from quire.server.request.delta import Delta
from quire.server.request.generation_request import GenerationRequest
from quire.server.request.progress import check_progress, report_progress
from quire.server.request.request import GenerationSpec
from quire.server.turns.threads import Deferred

ID_PREFIX = "ollama-"
HEADERS = [(b"content-type", NDJSON.encode()), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]

B = TypeVar("B", ChatRequest, GenerateRequest)
Work = tuple[B, GenerationRequest | None] | Deferred[tuple[B, GenerationRequest | None]]


async def chat(request: Request, state: needs.Completion) -> Response:
    """Answer a conversation."""

    def work(body: ChatRequest) -> Work[ChatRequest]:
        identity = _admit(request, state, body)
        return _prepare(body, chat_spec(body, **identity) if body.messages else None, state)

    return await _respond(request, state, *await use_body(request, ChatRequest, state, work))


async def generate(request: Request, state: needs.Completion) -> Response:
    """Answer or continue a text."""

    def work(body: GenerateRequest) -> Work[GenerateRequest]:
        identity = _admit(request, state, body)
        return _prepare(body, generate_spec(body, **identity) if body.prompt or body.images else None, state)

    return await _respond(request, state, *await use_body(request, GenerateRequest, state, work))


def _prepare(body: B, spec: GenerationSpec | None, state: needs.Prompting) -> Work[B]:
    """Prepare a request; `spec` is None for one that only loads the model."""
    if spec is None:
        return body, None

    def finish() -> tuple[B, GenerationRequest]:
        (one,) = prepare(spec, state)
        spec.prompts, spec.media = [], []  # freed here, in the thread: it takes long
        if isinstance(body, ChatRequest):
            body.messages = None
        else:
            body.images = None
        return body, one

    return after_images(spec, state, spec.tenant, finish)


def _admit(request: Request, state: needs.Admission, body: ChatRequest | GenerateRequest) -> dict[str, Any]:
    identity = admission.admit(request, state, ID_PREFIX, model=served_name(body.model, state))
    check_progress(body.return_progress, body.stream is not False)
    return with_retention(identity, keep_alive_seconds(body.keep_alive))


async def _respond(
    request: Request, state: needs.Completion, body: ChatRequest | GenerateRequest, one: GenerationRequest | None
) -> Response:
    answer_to_chat = isinstance(body, ChatRequest)
    if one is None:  # a request to load the model, which it is, or to unload it
        reason = "unload" if asks_to_unload(body.keep_alive) else "load"
        return sse.JsonResponse(empty_answer(display_name(body.model, state), answer_to_chat, reason))
    tokenizer = state.tokenizer if body.logprobs else None
    answer = Answer(display_name(body.model, state), one, answer_to_chat, tokenizer)
    progress = report_progress(body.return_progress, [one], answer.progress)
    stream = await admission.generate(request, state, [one], "messages" if answer_to_chat else "prompt")
    if body.stream is not False:
        lines = sse.to_the_end(answer.lines(stream), one.request_id, _error_line, b"")
        response = sse.EventStream(lines, 0, progress)  # without comments, which are no JSON
        response.raw_headers = list(HEADERS)
        return response

    async def collect() -> list[Delta]:
        out = []
        try:
            async for delta in stream:
                answer.observe(delta)
                out.append(delta)
        finally:
            await stream.aclose()
        return out

    found = await sse.unless_disconnected(request, collect())
    return sse.JsonResponse(answer.whole(found))


def empty_answer(model: str, to_chat: bool, reason: str) -> dict[str, Any]:
    """Return the answer to a request that only loads or unloads a model."""
    text = {"message": {"role": "assistant", "content": ""}} if to_chat else {"response": ""}
    return {"model": model, "created_at": now(), "done": True, "done_reason": reason} | text


def _error_line(error: ApiError) -> bytes:
    return msgspec.json.encode({"error": error.message}) + b"\n"


# ---- embeddings


async def embed(request: Request, state: needs.Vectors) -> Response:
    """Return the embeddings of one or several texts."""
    started = time.monotonic_ns()

    def work(body: EmbedRequest) -> tuple[EmbedRequest, list[GenerationRequest]]:
        keep_alive_seconds(body.keep_alive)
        texts = [body.input] if isinstance(body.input, str) else body.input
        return body, _vector_requests(request, state, body.model, texts, body.dimensions, body.truncate, "input")

    body, requests = await use_body(request, EmbedRequest, state, work)
    found = await vectors(request, state, requests, "input")
    return sse.JsonResponse(
        {
            "model": display_name(body.model, state),
            "embeddings": [vector.values.tolist() for vector in found],
            "total_duration": time.monotonic_ns() - started,
            "load_duration": 0,
            "prompt_eval_count": sum(vector.num_prompt_tokens for vector in found),
        }
    )


async def embeddings(request: Request, state: needs.Vectors) -> Response:
    """Return the embedding of one text."""

    def work(body: EmbeddingsRequest) -> list[GenerationRequest]:
        keep_alive_seconds(body.keep_alive)
        return _vector_requests(request, state, body.model, [body.prompt], None, True, "prompt")

    requests = await use_body(request, EmbeddingsRequest, state, work)
    found: list[Vector] = await vectors(request, state, requests, "prompt")
    return sse.JsonResponse({"embedding": found[0].values.tolist()})


def _vector_requests(
    request: Request,
    state: needs.Preparing,
    model: str,
    texts: list[str],
    dimensions: int | None,
    truncate: bool | None,
    param: str,
) -> list[GenerationRequest]:
    identity = admission.admit(request, state, ID_PREFIX, model=served_name(model, state))
    fields = VectorFields(truncate_prompt_tokens=None if truncate is False else -1)
    params = embed_params(state.model, dimensions, None)
    refuses = truncate is False
    return to_requests(request, fields, state, identity["request_id"], texts, params, param, refuses_long=refuses)


# ---- what there is not


async def push(request: Request, state: object) -> Response:
    """Refuse to upload a model."""
    raise NotFound(f"{request.method} {request.scope['path']} is not available: this server uploads no models.")


ROUTES = [
    Route("POST", "/api/chat", chat, ChatRequest, protocol.ChatAnswer, stream=NDJSON),
    Route("POST", "/api/generate", generate, GenerateRequest, protocol.GenerateAnswer, stream=NDJSON),
    Route("POST", "/api/embed", embed, EmbedRequest, protocol.EmbedAnswer),
    Route("POST", "/api/embeddings", embeddings, EmbeddingsRequest, protocol.EmbeddingsAnswer),
    Route("POST", "/api/show", show, ShowRequest, protocol.ShowAnswer),
    Route("GET", "/api/tags", tags, answer=protocol.TagsAnswer),
    Route("GET", "/api/ps", running, answer=protocol.RunningAnswer),
    Route("GET", "/api/version", version, answer=protocol.VersionAnswer),
    Route("POST", "/api/push", push),
    *library.ROUTES,
]
