"""The routes of all dialects."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from quire.server.api import needs
from quire.server.api.anthropic import models as anthropic_models
from quire.server.api.anthropic import routes as anthropic
from quire.server.api.llamacpp import adapters, infill, props, slots
from quire.server.api.ollama import routes as ollama
from quire.server.api.openai import models as openai_models
from quire.server.api.openai import routes as openai
from quire.server.api.openai.objects import ModelCard, ModelList
from quire.server.api.ops import routes as ops
from quire.server.api.pooling import routes as pooling
from quire.server.api.textgen import routes as textgen
from quire.server.errors import NotFound
from quire.server.http.by_field import by_field
from quire.server.http.caller import caller
from quire.server.http.route import ANY_OBJECT, EVENTS, Route
from quire.server.http.sse import JsonResponse
from quire.server.keys.access import names_for, require_model


async def models(request: Request, state: needs.Listing) -> Response:
    """List the names this server answers to; in Anthropic's form for its clients."""
    if "anthropic-version" in request.headers:
        return JsonResponse(anthropic_models.model_list(state, names_for(caller(request), state)))
    return JsonResponse(openai_models.model_list(state, names_for(caller(request), state)))


async def model(request: Request, state: needs.Listing) -> Response:
    """Return one of the names this server answers to."""
    name = request.path_params["model_id"]
    if not name:
        raise NotFound("There is no GET /v1/models/; the path is /v1/models.")
    require_model(caller(request), name, state)
    if name not in names_for(caller(request), state):  # an alias, which no answer shows
        name = state.display_name(name)
    if "anthropic-version" in request.headers:
        return JsonResponse(anthropic_models.model_info(state, name))
    return JsonResponse(openai_models.model_card(state, name))


_MODELS = [
    Route("GET", "/v1/models", models, answer=(ModelList, anthropic_models.ModelPage)),
    Route("GET", "/v1/models/{model_id:path}", model, answer=(ModelCard, anthropic_models.ModelInfo)),
]

_BY_FIELD = dict(zip(("messages", "prompt", "input", "inputs"), [*openai.GENERATION, textgen.ROUTES[0]], strict=True))
_INVOCATIONS = Route(
    "POST",
    "/invocations",
    by_field(
        "invocations",
        "Answer as the endpoint that the body fits: a conversation, a prompt, an input or TGI's inputs.",
        {field: route.handler for field, route in _BY_FIELD.items()},
    ),
    ANY_OBJECT,
    tuple(answer for route in _BY_FIELD.values() for answer in route.answers),
    stream=EVENTS,
)
ROUTES = [
    *openai.ROUTES,
    *_MODELS,
    *anthropic.ROUTES,
    *ollama.ROUTES,
    *textgen.ROUTES,
    *infill.ROUTES,
    *adapters.ROUTES,
    *props.ROUTES,
    *slots.ROUTES,
    *pooling.ROUTES,
    *ops.ROUTES,
    _INVOCATIONS,
]
