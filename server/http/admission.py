"""The steps of every dialect between a request's body and its answer: check whether the server can take the request,
and start its generation.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.requests import Request

from quire.server.generate import deltas
from quire.server.generate.deadlines import prepared
from quire.server.generate.generation import Generation
from quire.server.generate.prepare import check_priority
from quire.server.generate.structures import constrain
from quire.server.http import needs, request_options
from quire.server.http.caller import caller
from quire.server.http.sse import unless_disconnected
from quire.server.keys.access import allowed_priority, check_model, require_model
from quire.server.keys.account import key_of
from quire.server.lora.fields import LoraScale
from quire.server.request.delta import Delta
from quire.server.request.generation_request import GenerationRequest


def admit(
    request: Request,
    state: needs.Admission,
    prefix: str,
    *,
    model: str | None = None,
    priority: int | None = None,
    request_id: str | None = None,
    lora: Sequence[LoraScale] | None = None,
) -> dict[str, Any]:
    """Check that the server can take a request now. `model`, `priority`, `request_id` and `lora` are the
    body's. Returns what identifies the request in its `GenerationSpec`.

    Raises Unavailable, NotFound and Forbidden for the model, BadRequest.
    """
    info = state.require_ready()
    require_model(caller(request), model, state)
    adapters = state.adapters.choose(model, lora)
    priority = request_options.priority(request, priority)
    if (key := key_of(caller(request), state)) is not None:
        for one in adapters if lora else ():
            check_model(key, one.adapter.name, state)
        priority = allowed_priority(key, priority, info.priorities)
    priority = caller(request).priority = priority or 0
    check_priority(priority, info)
    background = caller(request).background
    if not background:
        state.require_room()
    return {
        "request_id": prefix + request_options.request_id(request, request_id),
        "priority": priority,
        "tenant": caller(request).tenant,
        "background": background,
        "adapters": adapters,
        **cache_hint(request),
    }


def cache_hint(request: Request) -> dict[str, Any]:
    """Return the spec fields for the request's conversation, if it names one."""
    who = caller(request)
    hint = who.hint
    return {} if hint is None else {"cache_key": who.engine_key(hint.key), "cache_seconds": hint.seconds}


async def generate(
    request: Request,
    state: needs.Generation,
    requests: Sequence[GenerationRequest],
    param: str,
    predict: float | None = None,
) -> AsyncGenerator[Delta, None]:
    """Return the deltas of all choices, parsed as the requests say; the generation begins with the first one read.
    `param` is the field that holds the prompt. `predict` is the time limit from the first token on, in seconds.

    Raises Unavailable, RequestTimeout, BadRequest for a structure that cannot be compiled, ClientGone.
    """
    limits = request_options.deadlines(request, state, predict)
    if any(one.structure is not None for one in requests):
        work = constrain(requests, state, caller(request).turn)
        limits = await unless_disconnected(request, prepared(work, limits))
    request_options.reserve_room(request, state, requests, param)
    generations = [Generation(state.client, state.tokenizer, one, state.metrics) for one in requests]
    found = deltas.run(generations, limits, requests[0].parsing or deltas.identity)
    account = caller(request).account
    return found if account is None else account.observed(found)
