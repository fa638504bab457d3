"""The routes."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from quire.configs.config import Config
from quire.server.api.anthropic import batches as message_batches
from quire.server.api.anthropic import messages
from quire.server.api.anthropic import models as message_models
from quire.server.api.anthropic.protocol import CountTokensRequest, MessageResponse, MessagesRequest, TokenCount
from quire.server.api.llamacpp import infill
from quire.server.api.ollama import routes as ollama
from quire.server.api.openai import batches, files, render
from quire.server.api.openai.chat import chat_completions
from quire.server.api.openai.completions import completions
from quire.server.api.openai.embeddings import EmbeddingList, EmbeddingRequest, embeddings
from quire.server.api.openai.protocol import (
    ChatCompletion,
    ChatCompletionRequest,
    Completion,
    CompletionRequest,
    DetokenizeRequest,
    DetokenizeResponse,
    ErrorResponse,
    ModelCard,
    ModelList,
    TokenizeRequest,
    TokenizeResponse,
)
from quire.server.api.openai.responses import conversations
from quire.server.api.openai.responses import create as responses
from quire.server.api.openai.responses import objects as response_objects
from quire.server.api.openai.responses import protocol as response_protocol
from quire.server.api.openai.responses import routes as stored_responses
from quire.server.api.openai.translate import conversation
from quire.server.api.ops import sagemaker
from quire.server.api.ops.tokenizer_info import tokenizer_info
from quire.server.api.pooling import protocol as pooling
from quire.server.api.pooling.classify import classify, pool
from quire.server.api.pooling.score import rerank, score
from quire.server.api.textgen import routes as textgen
from quire.server.error_shapes import body_of, internal_body, shaped
from quire.server.errors import (
    ApiError,
    BadRequest,
    EngineError,
    NotFound,
    Unavailable,
)
from quire.server.generate.prepare import encode_conversation, encode_texts
from quire.server.http.middleware import ApiKeys, Hosts, is_loopback, note_refusal
from quire.server.http.read_body import require_deliberate, take
from quire.server.http.sse import ClientGone, JsonResponse
from quire.server.state import ServerState
from quire.server.structured.schema import structured_output
from quire.server.web.pages import add_pages

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
CLIENT_CLOSED = 499  # nginx's code, for the log: the client has disconnected


def create_routes(state: ServerState) -> FastAPI:
    """The routes over `state`."""
    app = FastAPI(title="quire", version=state.version, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.server = state
    for path, handler, methods, body, answer in ROUTES:
        for method in methods:
            app.add_api_route(
                path,
                handler,
                methods=[method],
                response_class=Response,
                openapi_extra=_documented(body, answer),
                include_in_schema=method != "HEAD",
            )
    add_pages(app)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(ClientGone, _client_gone)
    app.add_exception_handler(Exception, _unexpected)
    app.openapi = lambda: _openapi(app)
    return app


def protected(app: ASGIApp, state: ServerState) -> ASGIApp:
    """The routes wrapped in the configured middleware. `RequestBoundary` is added around it."""
    layers = app
    server = state.config.server
    if server.api_key:
        layers = ApiKeys(layers, server.api_key, server.share_prefix_cache)
    if "*" not in server.allowed_hosts and (server.allowed_hosts or (server.uds is None and is_loopback(server.host))):
        layers = Hosts(layers, [server.host, *server.allowed_hosts])
    if state.config.server.allowed_origins:
        layers = CORSMiddleware(
            layers,
            allow_origins=state.config.server.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after", "warning"],
        )
    return layers


# ---- OpenAI


async def chat(request: Request) -> Response:
    """Answer a conversation."""
    return await chat_completions(request, request.app.state.server)


async def complete(request: Request) -> Response:
    """Continue one or several prompts."""
    return await completions(request, request.app.state.server)


async def embed(request: Request) -> Response:
    """Embeddings of one or several texts."""
    return await embeddings(request, request.app.state.server)


async def score_pairs(request: Request) -> Response:
    """Scores of pairs of texts."""
    return await score(request, request.app.state.server)


async def rerank_documents(request: Request) -> Response:
    """Documents in the order of their relevance to a query."""
    return await rerank(request, request.app.state.server)


async def classify_texts(request: Request) -> Response:
    """The probabilities of a classifier's labels."""
    return await classify(request, request.app.state.server)


async def pool_texts(request: Request) -> Response:
    """Embeddings or a classifier's outputs, as plain vectors."""
    return await pool(request, request.app.state.server)


async def models(request: Request) -> Response:
    """The names this server answers to; in Anthropic's form for its clients."""
    state = request.app.state.server
    if "anthropic-version" in request.headers:
        return JsonResponse(message_models.model_list(state))
    return JsonResponse(ModelList(data=[_card(state, name) for name in state.names]))


async def model(request: Request) -> Response:
    """One of them."""
    state = request.app.state.server
    name = request.path_params["model_id"]
    if name not in state.names:
        raise NotFound(f"The model '{name[:200]}' does not exist.", param="model", code="model_not_found")
    if "anthropic-version" in request.headers:
        return JsonResponse(message_models.model_info(state, name))
    return JsonResponse(_card(state, name))


def _card(state: ServerState, name: str) -> ModelCard:
    model = state.config.model.model
    # do not reveal the operator's paths
    root = os.path.basename(os.path.normpath(model)) if os.path.isabs(model) else model
    return ModelCard(id=name, created=state.created, root=root, max_model_len=state.model and state.model.max_model_len)


# ---- tokens


async def tokenize(request: Request) -> Response:
    """Token ids of a prompt or a conversation."""
    state = request.app.state.server
    return JsonResponse(await take(request, TokenizeRequest, state, lambda body: _tokenized(body, state)))


def _tokenized(body: TokenizeRequest, state: ServerState) -> bytes:
    model = state.require_ready()
    state.require_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise BadRequest("Give exactly one of prompt and messages.", param="prompt")
    if body.messages is not None:
        ids = encode_conversation(conversation(body), state, bool(body.add_special_tokens))
    else:
        ids = encode_texts([body.prompt], state, body.add_special_tokens is not False, "prompt", may_truncate=True)[0]
    strings = [state.tokenizer.vocabulary_entry(token_id) for token_id in ids] if body.return_token_strs else None
    return msgspec.json.encode(TokenizeResponse(len(ids), model.max_model_len, ids, strings))


async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    state = request.app.state.server
    return JsonResponse(await take(request, DetokenizeRequest, state, lambda body: _detokenized(body, state)))


def _detokenized(body: DetokenizeRequest, state: ServerState) -> bytes:
    model = state.require_ready()
    state.require_model(body.model)
    if body.tokens and max(body.tokens) >= model.vocab_size:
        raise BadRequest(f"tokens: ids must be below the vocabulary size of {model.vocab_size}.", param="tokens")
    return msgspec.json.encode(DetokenizeResponse(state.tokenizer.decode(body.tokens, skip_special_tokens=False)))


# ---- operations


async def live(request: Request) -> Response:
    """The process answers; nothing is asked of the engine."""
    return JsonResponse({"status": "live"})


async def ready(request: Request) -> Response:
    """200 once the engine has completed a step; 503 with phase and percentage before, and while shutting down."""
    state = request.app.state.server
    up = state.status == "ready"
    return JsonResponse(state.health(), status_code=200 if up else 503, headers=None if up else {"Retry-After": "2"})


async def version(request: Request) -> Response:
    """Of quire."""
    return JsonResponse({"version": request.app.state.server.version})


async def metrics(request: Request) -> Response:
    """Prometheus text, of all frontends."""
    state = request.app.state.server
    if state.metrics is None:
        state.require_ready()
    try:
        page = state.metrics.render() if state.scrape is None else await state.scrape()
    except TimeoutError:
        raise Unavailable("The other frontends did not report their metrics in time.") from None
    return Response(page, media_type=METRICS_TYPE)


async def server_info(request: Request) -> Response:
    """The effective configuration, what was chosen automatically, and the memory plan."""
    state = request.app.state.server
    return JsonResponse(
        {
            "version": state.version,
            "system_fingerprint": state.system_fingerprint,
            "models": state.names,
            "health": state.health(),
            "config": _shown(state.config),
            "engine": state.ready and {"steps_in_flight": state.ready.depth} | msgspec.to_builtins(state.ready.worker),
            "formats": state.formats and state.formats.describe(),
            "sampling_defaults": state.model and state.model.sampling_defaults,
            "structured_output": structured_output(),
            "num_requests_in_flight": state.num_in_flight + state.num_in_flight_elsewhere,
        }
    )


def _shown(config: Config) -> dict[str, Any]:
    """All settings but the secrets."""
    return {
        section.name: {
            f.name: "***"
            if f.metadata.get("secret") and getattr(getattr(config, section.name), f.name)
            else getattr(getattr(config, section.name), f.name)
            for f in dataclasses.fields(getattr(config, section.name))
        }
        for section in dataclasses.fields(config)
    }


async def reset_prefix_cache(request: Request) -> Response:
    """Forget cached prefixes; `success` is false when running requests hold them."""
    require_deliberate(request)
    state = request.app.state.server
    state.require_ready()
    try:
        return JsonResponse({"success": bool(await state.client.call("reset_prefix_cache"))})
    except TimeoutError:
        raise Unavailable("The engine did not answer in time.", code="engine_busy") from None
    except RuntimeError as error:
        raise EngineError(f"The engine could not reset its cache: {error}") from error


# ---- errors


async def _api_error(request: Request, error: ApiError) -> Response:
    # clients should retry on another server
    if isinstance(error, EngineError) and request.app.state.server.status in ("draining", "failed"):
        error = Unavailable(error.message, code="shutting_down", retry_after=5)
    note_refusal(request.scope, error)
    return JsonResponse(body_of(error, request.scope["path"]), status_code=error.status, headers=error.headers)


_ELSEWHERE = ("/v1/audio", "/v1/images", "/v1/moderations", "/v1/videos", "/v1/realtime", "/v1/fine_tuning")


async def _http_exception(request: Request, error: HTTPException) -> Response:
    """Starlette's own: no such route, wrong method."""
    message, path = error.detail, request.scope["path"]
    if error.status_code == 404 and path.startswith(_ELSEWHERE):
        message = f"{path[:200]} is not available: this server serves text, by /v1/chat/completions and others (/docs)."
    elif error.status_code == 404:
        message = f"There is no {request.method} {path[:200]}{_hint(path)}."
    elif error.status_code == 405:
        message = f"{path[:200]} does not take {request.method}."
    answer = BadRequest(message) if error.status_code < 500 else EngineError(message)
    note_refusal(request.scope, answer)
    body = shaped(path, error.status_code, message, answer.type)
    return JsonResponse(body, status_code=error.status_code, headers=error.headers)


def _hint(path: str) -> str:
    """The path that was probably meant: under /v1, or without duplicate slashes."""
    plain = "/" + "/".join(part for part in path.split("/") if part)
    known = {route[0] for route in ROUTES}
    meant = next((candidate for candidate in (plain, f"/v1{plain}") if candidate in known and candidate != path), None)
    return f"; the path is {meant}" if meant else ""


async def _client_gone(request: Request, error: ClientGone) -> Response:
    return Response(status_code=CLIENT_CLOSED)


async def _unexpected(request: Request, error: Exception) -> Response:
    return JsonResponse(internal_body(request.scope["path"]), status_code=500)


# ---- the OpenAPI document: bodies and answers are msgspec types, which FastAPI does not know


def _with_state(function: Callable[[Request, ServerState], Awaitable[Response]]) -> Callable:
    """A handler of FastAPI's kind."""

    async def handler(request: Request) -> Response:
        return await function(request, request.app.state.server)

    handler.__name__, handler.__doc__ = function.__name__, function.__doc__
    return handler


_INVOCATIONS = {"messages": chat_completions, "prompt": completions, "input": embeddings, "inputs": textgen.generate}
_ANY_OBJECT = {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}}
ROUTES = [
    ("/v1/chat/completions", chat, ["POST"], ChatCompletionRequest, ChatCompletion),
    ("/v1/completions", complete, ["POST"], CompletionRequest, Completion),
    (
        "/v1/responses",
        _with_state(responses.create_response),
        ["POST"],
        response_protocol.ResponsesRequest,
        response_objects.ResponseObject,
    ),
    (
        "/v1/responses/input_tokens",
        _with_state(responses.count_input_tokens),
        ["POST"],
        response_protocol.InputTokensRequest,
        response_objects.InputTokens,
    ),
    (
        "/v1/responses/{response_id}",
        _with_state(stored_responses.retrieve_response),
        ["GET"],
        None,
        response_objects.ResponseObject,
    ),
    (
        "/v1/responses/{response_id}",
        _with_state(stored_responses.delete_response),
        ["DELETE"],
        None,
        response_objects.DeletedObject,
    ),
    (
        "/v1/responses/{response_id}/cancel",
        _with_state(stored_responses.cancel_response),
        ["POST"],
        None,
        response_objects.ResponseObject,
    ),
    (
        "/v1/responses/{response_id}/input_items",
        _with_state(stored_responses.list_input_items),
        ["GET"],
        None,
        response_objects.ItemList,
    ),
    (
        "/v1/conversations",
        _with_state(conversations.create_conversation),
        ["POST"],
        response_protocol.ConversationRequest,
        response_objects.ConversationObject,
    ),
    (
        "/v1/conversations/{conversation_id}",
        _with_state(conversations.retrieve_conversation),
        ["GET"],
        None,
        response_objects.ConversationObject,
    ),
    (
        "/v1/conversations/{conversation_id}",
        _with_state(conversations.update_conversation),
        ["POST"],
        response_protocol.ConversationUpdate,
        response_objects.ConversationObject,
    ),
    (
        "/v1/conversations/{conversation_id}",
        _with_state(conversations.delete_conversation),
        ["DELETE"],
        None,
        response_objects.DeletedObject,
    ),
    (
        "/v1/conversations/{conversation_id}/items",
        _with_state(conversations.create_items),
        ["POST"],
        response_protocol.NewItems,
        response_objects.ItemList,
    ),
    (
        "/v1/conversations/{conversation_id}/items",
        _with_state(conversations.list_items),
        ["GET"],
        None,
        response_objects.ItemList,
    ),
    (
        "/v1/conversations/{conversation_id}/items/{item_id}",
        _with_state(conversations.retrieve_item),
        ["GET"],
        None,
        None,
    ),
    (
        "/v1/conversations/{conversation_id}/items/{item_id}",
        _with_state(conversations.delete_item),
        ["DELETE"],
        None,
        response_objects.ConversationObject,
    ),
    ("/v1/embeddings", embed, ["POST"], EmbeddingRequest, EmbeddingList),
    ("/v1/score", score_pairs, ["POST"], pooling.ScoreRequest, pooling.ScoreList),
    ("/score", score_pairs, ["POST"], pooling.ScoreRequest, pooling.ScoreList),
    ("/v1/rerank", rerank_documents, ["POST"], pooling.RerankRequest, pooling.RerankList),
    ("/v2/rerank", rerank_documents, ["POST"], pooling.RerankRequest, pooling.RerankList),
    ("/rerank", rerank_documents, ["POST"], pooling.RerankRequest, pooling.RerankList),
    ("/classify", classify_texts, ["POST"], pooling.ClassifyRequest, pooling.ClassificationList),
    ("/pooling", pool_texts, ["POST"], pooling.PoolingRequest, pooling.PoolingList),
    ("/v1/models", models, ["GET", "HEAD"], None, ModelList),
    ("/v1/models/{model_id:path}", model, ["GET", "HEAD"], None, ModelCard),
    ("/v1/files", _with_state(files.create_file), ["POST"], files.UPLOAD, files.FileObject),
    ("/v1/files", _with_state(files.list_files), ["GET"], None, files.FileList),
    ("/v1/files/{file_id}", _with_state(files.retrieve_file), ["GET"], None, files.FileObject),
    ("/v1/files/{file_id}", _with_state(files.delete_file), ["DELETE"], None, files.FileDeleted),
    ("/v1/files/{file_id}/content", _with_state(files.file_content), ["GET"], None, None),
    ("/v1/messages", _with_state(messages.create_message), ["POST"], MessagesRequest, MessageResponse),
    ("/v1/messages/count_tokens", _with_state(messages.count_tokens), ["POST"], CountTokensRequest, TokenCount),
    (
        "/v1/messages/batches",
        _with_state(message_batches.create_batch),
        ["POST"],
        message_batches.MessageBatchRequest,
        message_batches.MessageBatch,
    ),
    (
        "/v1/messages/batches",
        _with_state(message_batches.list_batches),
        ["GET"],
        None,
        message_batches.MessageBatchList,
    ),
    (
        "/v1/messages/batches/{batch_id}",
        _with_state(message_batches.retrieve_batch),
        ["GET"],
        None,
        message_batches.MessageBatch,
    ),
    (
        "/v1/messages/batches/{batch_id}",
        _with_state(message_batches.delete_batch),
        ["DELETE"],
        None,
        message_batches.Deleted,
    ),
    (
        "/v1/messages/batches/{batch_id}/cancel",
        _with_state(message_batches.cancel_batch),
        ["POST"],
        None,
        message_batches.MessageBatch,
    ),
    ("/v1/messages/batches/{batch_id}/results", _with_state(message_batches.results), ["GET"], None, None),
    ("/v1/chat/completions/render", _with_state(render.render), ["POST"], ChatCompletionRequest, render.RenderedPrompt),
    ("/apply-template", _with_state(render.apply_template), ["POST"], ChatCompletionRequest, None),
    ("/infill", _with_state(infill.infill), ["POST"], infill.InfillRequest, None),
    ("/generate", _with_state(textgen.generate), ["POST"], textgen.TextRequest, None),
    ("/generate_stream", _with_state(textgen.generate_stream), ["POST"], textgen.TextRequest, None),
    ("/tokenizer_info", _with_state(tokenizer_info), ["GET"], None, None),
    ("/ping", _with_state(sagemaker.ping), ["GET", "HEAD"], None, None),
    ("/invocations", _with_state(sagemaker.invocations(_INVOCATIONS)), ["POST"], _ANY_OBJECT, None),
    ("/api/chat", _with_state(ollama.chat), ["POST"], ollama.ChatRequest, None),
    ("/api/generate", _with_state(ollama.generate), ["POST"], ollama.GenerateRequest, None),
    ("/api/embed", _with_state(ollama.embed), ["POST"], ollama.EmbedRequest, None),
    ("/api/embeddings", _with_state(ollama.embeddings), ["POST"], ollama.EmbeddingsRequest, None),
    ("/api/show", _with_state(ollama.show), ["POST"], ollama.ShowRequest, None),
    ("/api/tags", _with_state(ollama.tags), ["GET"], None, None),
    ("/api/ps", _with_state(ollama.running), ["GET"], None, None),
    ("/api/version", _with_state(ollama.version), ["GET"], None, None),
    ("/api/pull", _with_state(ollama.no_such_action), ["POST"], None, None),
    ("/api/push", _with_state(ollama.no_such_action), ["POST"], None, None),
    ("/api/create", _with_state(ollama.no_such_action), ["POST"], None, None),
    ("/api/copy", _with_state(ollama.no_such_action), ["POST"], None, None),
    ("/api/delete", _with_state(ollama.no_such_action), ["DELETE"], None, None),
    ("/v1/batches", _with_state(batches.create_batch), ["POST"], batches.BatchRequest, batches.BatchObject),
    ("/v1/batches", _with_state(batches.list_batches), ["GET"], None, batches.BatchList),
    ("/v1/batches/{batch_id}", _with_state(batches.retrieve_batch), ["GET"], None, batches.BatchObject),
    ("/v1/batches/{batch_id}/cancel", _with_state(batches.cancel_batch), ["POST"], None, batches.BatchObject),
    ("/tokenize", tokenize, ["POST"], TokenizeRequest, TokenizeResponse),
    ("/detokenize", detokenize, ["POST"], DetokenizeRequest, DetokenizeResponse),
    ("/live", live, ["GET", "HEAD"], None, None),
    ("/ready", ready, ["GET", "HEAD"], None, None),
    ("/health", ready, ["GET", "HEAD"], None, None),
    ("/version", version, ["GET"], None, None),
    ("/metrics", metrics, ["GET"], None, None),
    ("/server_info", server_info, ["GET"], None, None),
    ("/reset_prefix_cache", reset_prefix_cache, ["POST"], None, None),
]
_REF = "#/components/schemas/{name}"


def _ref(cls: type) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": {"$ref": _REF.format(name=cls.__name__)}}}}


def _documented(body: type | dict[str, Any] | None, answer: type | None) -> dict[str, Any]:
    extra: dict[str, Any] = {"responses": {"default": {"description": "Error"} | _ref(ErrorResponse)}}
    if isinstance(body, dict):
        extra["requestBody"] = body
    elif body is not None:
        extra["requestBody"] = {"required": True} | _ref(body)
    if answer is not None:
        extra["responses"]["200"] = {"description": "OK"} | _ref(answer)
    return extra


def _openapi(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        types = [cls for route in ROUTES for cls in route[3:] if isinstance(cls, type)]
        _, schemas = msgspec.json.schema_components([*types, ErrorResponse], ref_template=_REF)
        components = document.setdefault("components", {})
        components.setdefault("schemas", {}).update(schemas)
        if app.state.server.config.server.api_key:
            components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
            document["security"] = [{"bearer": []}]
        app.openapi_schema = document
    return app.openapi_schema
