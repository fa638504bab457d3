"""Stored responses: GET, DELETE, cancel, and the items of their input."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.server.api.openai.responses import needs
from quire.server.api.openai.responses.answer import last_event, replay
from quire.server.api.openai.responses.background import unpack
from quire.server.api.openai.responses.objects import DeletedObject, ItemList, ResponseObject
from quire.server.api.openai.responses.service import Responses
from quire.server.api.openai.responses.store import RUNNING, Stored
from quire.server.errors import BadRequest, NotFound
from quire.server.http import sse
from quire.server.http.caller import caller
from quire.server.http.numbers import bounded_int
from quire.server.http.paging import owner, page_size
from quire.server.http.read_body import require_deliberate

POLL_SECONDS = 0.5  # between looks at a response that another process runs
CANCEL_SECONDS = 10.0  # that another process has to cancel one
_TRUE, _FALSE = ("true", "1"), ("false", "0", "")
_response = msgspec.json.Decoder(ResponseObject).decode


class _Reading(needs.Responses, needs.Threads, Protocol):
    """Parts of the server that send the events of a stored response."""


class _Retrieving(_Reading, needs.Settings, Protocol):
    """Parts of the server that send a stored response."""


async def no_compaction(request: Request, state: object) -> Response:
    """Refuse to compact a conversation: an item of /v1/responses asks for the same."""
    raise NotFound(
        "POST /v1/responses/compact is not available: POST /v1/responses with an item of the type compaction_trigger "
        'as the last of its input compacts a conversation. truncation: "auto" leaves out the oldest turns.'
    )


async def retrieve_response(request: Request, state: _Retrieving) -> Response:
    """Return a stored response, or its events: with `stream`, those after number `starting_after`."""
    response_id = request.path_params["response_id"]
    first = _first_event(request)
    stored = await _get(request, state.responses)
    if first is None:
        run = state.responses.runs.get(response_id)
        return sse.JsonResponse(stored.body if run is None else msgspec.json.encode(run.answer.response))
    frames = sse.to_the_end(_events(request, state, stored, first), response_id, done=b"")
    return sse.EventStream(frames, state.config.server.sse_keep_alive_interval)


def _first_event(request: Request) -> int | None:
    """Return the number of the first event that is wanted; None if the response itself is. Raises BadRequest."""
    given, after = request.query_params.get("stream", "").lower(), request.query_params.get("starting_after")
    if given not in _TRUE + _FALSE:
        raise BadRequest("stream must be true or false.", param="stream")
    if after is None:
        return 0 if given in _TRUE else None
    if given in _FALSE:
        raise BadRequest("starting_after needs stream to be true.", param="starting_after")
    return bounded_int(after, 0, 2**31, "starting_after") + 1


async def _events(request: Request, state: _Reading, stored: Stored, first: int) -> AsyncGenerator[bytes, None]:
    if (run := state.responses.runs.get(stored.id)) is not None:
        async for events in run.follow(first):
            yield events
        return
    while stored.status in RUNNING:  # in another process, which stores its events at the end
        await asyncio.sleep(POLL_SECONDS)
        stored = await _get(request, state.responses)
    size = len(stored.body) + 16 * len(stored.events or b"")
    yield b"".join((await state.threads.run(size, lambda: _recorded(stored), caller(request).turn))[first:])


def _recorded(stored: Stored) -> list[bytes]:
    if stored.events is not None:
        events = unpack(stored.events)
        return [*events, last_event(stored.status, stored.body, len(events))]
    return replay(_response(stored.body), stored.body)


async def delete_response(request: Request, state: needs.Responses) -> Response:
    """Forget a response; one that runs is cancelled."""
    responses, response_id = state.responses, request.path_params["response_id"]
    await _get(request, responses)
    if (run := responses.runs.get(response_id)) is not None:
        run.cancel()
        await run.wait()
    await responses.run(responses.store.delete, response_id, owner(request), "response_id")
    return sse.JsonResponse(DeletedObject(id=response_id, object="response"))


async def cancel_response(request: Request, state: needs.Responses) -> Response:
    """End a response that runs in the background. One that has ended stays as it is."""
    require_deliberate(request)
    responses, response_id = state.responses, request.path_params["response_id"]
    stored = await _get(request, responses)
    if not _response(stored.body).background:
        raise BadRequest("Only a response with background true can be cancelled.", param="response_id")
    if (run := responses.runs.get(response_id)) is not None:
        run.cancel()
        await run.wait()
    elif stored.status in RUNNING:
        await responses.run(responses.store.ask_to_cancel, response_id)
        await _until_ended(request, responses)
    return sse.JsonResponse((await _get(request, responses)).body)


async def _until_ended(request: Request, responses: Responses) -> None:
    clock = asyncio.get_running_loop().time
    end = clock() + CANCEL_SECONDS
    while clock() < end and (await _get(request, responses)).status in RUNNING:
        await asyncio.sleep(POLL_SECONDS)


async def list_input_items(request: Request, state: needs.Responses) -> Response:
    """List the items of the response's own input, the last first."""
    stored = await _get(request, state.responses)
    return sse.JsonResponse(page_of(request, stored.items, "desc"))


async def _get(request: Request, responses: Responses) -> Stored:
    """Return the stored response of the path. Raises NotFound."""
    responses.require_kept()
    response_id = request.path_params["response_id"]
    if not response_id.startswith("resp_"):
        raise NotFound(f"No response with id '{response_id[:100]}' is stored.", param="response_id")
    return await responses.run(responses.store.get, response_id, owner(request), "response_id")


class _Id(msgspec.Struct):
    id: str


_ids = msgspec.json.Decoder(list[_Id]).decode


def item_ids(items: bytes) -> list[str]:
    """Return the ids in a list of items."""
    return [item.id for item in _ids(items)]


def page_of(request: Request, items: bytes, order: str) -> ItemList:
    """Return the page of a list of items that the query asks for. `order`: asc or desc, unless the query has one."""
    limit = page_size(request, 100)
    wanted = request.query_params.get("order", order)
    if wanted not in ("asc", "desc"):
        raise BadRequest("order must be asc or desc.", param="order")
    found = list(zip(item_ids(items), msgspec.json.decode(items, type=list[msgspec.Raw]), strict=True))
    if wanted == "desc":
        found.reverse()
    if (after := request.query_params.get("after")) is not None:
        places = [i for i, (item_id, _) in enumerate(found) if item_id == after]
        if not places:
            raise BadRequest(f"after: no item has the id '{after[:100]}'.", param="after")
        found = found[places[0] + 1 :]
    page = found[:limit]
    return ItemList(
        data=[raw for _, raw in page],
        first_id=page[0][0] if page else None,
        last_id=page[-1][0] if page else None,
        has_more=len(found) > limit,
    )
