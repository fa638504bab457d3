"""Ollama's routes about models: /api/tags, /api/ps, /api/show, /api/version."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from quire.checkpoints.library import modelfile
from quire.server.api import needs
from quire.server.api.abilities import abilities
from quire.server.api.ollama.protocol import ShowRequest
from quire.server.errors import BadRequest, EngineError
from quire.server.generate.pooling import text_limit
from quire.server.http import sse
from quire.server.http.caller import caller
from quire.server.http.read_body import use_body
from quire.server.keys.access import names_for, require_model
from quire.server.model_info import ModelInfo
from quire.server.startup.model_details import ModelDetails, in_words

API_VERSION = "0.12.11"  # the release of Ollama whose API is implemented; clients refuse older ones
FAR_AWAY = "2318-12-31T00:00:00Z"  # a served model stays


class _Reading(needs.Details, needs.Readiness, Protocol):
    """The state needed to read the details of the model's files."""


class _Listing(needs.Settings, _Reading, needs.Names, Protocol):
    """The state needed to list the model."""


class _Running(_Listing, needs.Engine, needs.Model, Protocol):
    """The state needed to list the loaded model."""


class _Loaded(needs.Engine, needs.Model, Protocol):
    """A loaded model."""


class _Showing(_Listing, needs.Tokenizing, Protocol):
    """The state needed to show the model."""


def served_name(name: str, state: needs.Names) -> str:
    """Return a model's name without the tag that Ollama's clients add."""
    plain = name.removesuffix(":latest")
    known = (*state.all_names, *state.aliases)
    return plain if name not in known and plain in known else name


def display_name(name: str, state: needs.Names) -> str:
    """Return the name for the answer to a request for `name`."""
    return name if served_name(name, state) in state.all_names else state.names[0]


async def _read(state: _Reading) -> ModelDetails:
    state.require_ready()
    try:
        return await state.details.get()
    except (ValueError, OSError) as error:
        raise EngineError("The files of the model cannot be read.") from error


def details(found: ModelDetails, state: needs.Settings) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": found.format,
        "family": found.family,
        "families": [found.family] if found.family else [],
        "parameter_size": in_words(found.num_parameters),
        "quantization_level": state.config.model.quantization or found.quantization,
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def listed(name: str, found: ModelDetails, state: needs.Settings) -> dict[str, Any]:
    return {
        "name": name,
        "model": name,
        "modified_at": _time(found.modified_at),
        "size": found.size,
        "digest": found.digest,
        "details": details(found, state),
    }


async def tags(request: Request, state: _Listing) -> Response:
    """List the models there are."""
    found = await _read(state)
    return sse.JsonResponse({"models": [listed(name, found, state) for name in names_for(caller(request), state)]})


def loaded_facts(state: _Loaded, found: ModelDetails) -> dict[str, Any]:
    """Return Ollama's facts about a loaded model, in addition to those of its files."""
    plan = state.ready.worker.plan if state.ready else None
    return {
        "expires_at": FAR_AWAY,
        "size": plan.weights + plan.activations + plan.kv_cache if plan else found.size,
        "size_vram": plan.weights + plan.activations + plan.kv_cache if plan and not plan.shares_ram else 0,
        "context_length": state.model.max_model_len,
    }


async def running(request: Request, state: _Running) -> Response:
    """List the models that are loaded."""
    found = await _read(state)
    more = loaded_facts(state, found)
    names = names_for(caller(request), state)
    return sse.JsonResponse({"models": [listed(name, found, state) | more for name in names]})


async def show(request: Request, state: _Showing) -> Response:
    """Return the metadata of the model."""
    body = await use_body(request, ShowRequest, state, lambda body: body)
    name = body.model or body.name
    if not name:
        raise BadRequest("Missing required parameter: model.", param="model")
    model = state.require_ready()
    require_model(caller(request), served_name(name, state), state)
    found = await _read(state)
    # clients size prompts by this value: the served length may be below the trained length
    embeds = model.pooling is not None and "embed" in model.pooling.tasks
    served = {f"{found.family}.context_length": text_limit(model) if embeds else model.max_model_len}
    if embeds:
        served[f"{found.family}.embedding_length"] = model.pooling.num_dimensions
    entry = model.preset.entry
    texts = {"system": entry.system, "license": "\n".join(entry.licenses), "messages": list(entry.messages)}
    return sse.JsonResponse(
        {name: value for name, value in texts.items() if value}
        | {
            "modelfile": modelfile.render(replace(entry, base=state.names[0])),
            "parameters": "\n".join(modelfile.parameter_lines(_ollama_names(model))),
            "template": next(iter(state.tokenizer.chat_templates.values()), ""),
            "details": details(found, state),
            "model_info": found.metadata | served,
            "capabilities": abilities(state),
            "modified_at": _time(found.modified_at),
        }
    )


def _ollama_names(model: ModelInfo) -> dict[str, Any]:
    """Return the defaults of requests, under Ollama's names."""
    names = {"repetition_penalty": "repeat_penalty", "max_tokens": "num_predict"}
    found = model.sampling_defaults | model.preset.options
    return {names.get(name, name): value for name, value in found.items()} | {
        name: value for name, value in model.preset.entry.parameters.items() if name == "num_ctx"
    }


async def version(request: Request, state: needs.Version) -> Response:
    """Return the version of Ollama's API, and of this server."""
    return sse.JsonResponse({"version": API_VERSION, "quire": state.version})
