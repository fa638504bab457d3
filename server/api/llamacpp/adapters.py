"""llama.cpp's /lora-adapters: the adapters by id, and which of them requests for the base model use by default."""

from __future__ import annotations

from typing import Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.server.api import needs
from quire.server.errors import BadRequest
from quire.server.http.caller import caller
from quire.server.http.read_body import read_body, require_deliberate
from quire.server.http.route import Route
from quire.server.http.sse import JsonResponse
from quire.server.keys.access import names_for
from quire.server.lora.fields import LoraScales


class _Listing(needs.Adapters, needs.Choice, Protocol):
    """The state needed to list the adapters that a key may see."""


class _Posting(needs.Body, needs.Readiness, needs.Adapters, Protocol):
    """The state needed to set the adapters' scales."""


class ListedAdapter(msgspec.Struct, kw_only=True):
    id: int
    path: str  # the name of its folder
    scale: float
    name: str


class Done(msgspec.Struct):
    success: bool


async def list_adapters(request: Request, state: _Listing) -> Response:
    """List the LoRA adapters that the request's key may see, and their default scales."""
    adapters, visible = state.adapters, names_for(caller(request), state)
    return JsonResponse(
        [
            ListedAdapter(
                id=one.id, path=one.source.name, name=one.name, scale=adapters.default_scales.get(one.name, 0.0)
            )
            for one in sorted(adapters.loaded.values(), key=lambda one: one.id)
            if one.name in visible
        ]
    )


async def set_scales(request: Request, state: _Posting) -> Response:
    """Set the scales of requests that name the base model and have no `lora`; adapters left out have scale 0."""
    require_deliberate(request)
    state.require_ready()
    state.adapters.require_dynamic()
    raw = await read_body(request, state)
    try:
        scales = msgspec.json.decode(raw, type=LoraScales)
    except msgspec.DecodeError as error:
        raise BadRequest(f"The body must be a list of objects with id and scale: {error}.", param="lora") from None
    await state.adapters.set_default_scales(scales)
    return JsonResponse(Done(success=True))


ROUTES = [
    Route("GET", "/lora-adapters", list_adapters, answer=list[ListedAdapter]),
    Route(
        "POST",
        "/lora-adapters",
        set_scales,
        {"required": True, "content": {"application/json": {"schema": {"type": "array", "items": {"type": "object"}}}}},
        Done,
        admin=True,
    ),
]
