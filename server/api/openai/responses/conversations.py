"""/v1/conversations: items that responses read and continue."""

from __future__ import annotations

import time
import uuid
from typing import Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.server.api.openai.responses import needs
from quire.server.api.openai.responses.foreign_items import called_as
from quire.server.api.openai.responses.items import check_items, stored
from quire.server.api.openai.responses.objects import ConversationObject, DeletedObject, ItemList
from quire.server.api.openai.responses.protocol import (
    ConversationRequest,
    ConversationUpdate,
    InputItem,
    NewItems,
)
from quire.server.api.openai.responses.routes import item_ids, page_of
from quire.server.api.openai.responses.service import Responses
from quire.server.api.openai.responses.store import Stored
from quire.server.errors import NotFound
from quire.server.http.paging import owner
from quire.server.http.read_body import use_body
from quire.server.http.sse import JsonResponse

PARAM = "conversation_id"
_raw_items = msgspec.json.Decoder(list[msgspec.Raw]).decode


class _Posting(needs.Body, needs.Responses, Protocol):
    """The state needed to change a conversation."""


class _Call(msgspec.Struct):
    """The type of an item, and its names if it is a call."""

    type: str
    call_id: str | None = None
    id: str | None = None


_calls = msgspec.json.Decoder(list[_Call]).decode
_conversation = msgspec.json.Decoder(ConversationObject).decode


def _joined(items: bytes, more: bytes) -> bytes:
    """Return two lists in JSON as one."""
    if b"[]" in (items, more):
        return more if items == b"[]" else items
    return items[:-1] + b"," + more[1:]


async def append(responses: Responses, conversation_id: str, who: str, items: bytes) -> None:
    """Add items, JSON of a list, to a conversation. Raises NotFound, BadRequest if it gets too large."""

    def edit(conversation: Stored) -> None:
        conversation.items = _joined(conversation.items, items)

    await responses.run(responses.store.change, conversation_id, who, "conversation", edit)


async def create_conversation(request: Request, state: _Posting) -> Response:
    """Create a conversation, with items or empty."""
    state.responses.require_kept()

    def work(body: ConversationRequest) -> Stored:
        check_items(body.items or [], set(), "items")
        key = uuid.uuid4().hex
        shown = ConversationObject(id=f"conv_{key}", created_at=int(time.time()), metadata=body.metadata or {})
        items = msgspec.json.encode(stored(body.items or [], key))
        return Stored(shown.id, owner(request), None, "conversation", msgspec.json.encode(shown), items)

    new = await use_body(request, ConversationRequest, state, work)
    await state.responses.run(state.responses.store.add, new)
    return JsonResponse(new.body)


async def retrieve_conversation(request: Request, state: needs.Responses) -> Response:
    """Return the metadata of a conversation."""
    return JsonResponse((await _get(request, state)).body)


async def update_conversation(request: Request, state: _Posting) -> Response:
    """Replace the metadata of a conversation."""
    state.responses.require_kept()
    body = await use_body(request, ConversationUpdate, state, lambda body: body)

    def edit(conversation: Stored) -> None:
        shown = _conversation(conversation.body)
        conversation.body = msgspec.json.encode(msgspec.structs.replace(shown, metadata=body.metadata))

    return JsonResponse((await _change(request, state, edit)).body)


async def delete_conversation(request: Request, state: needs.Responses) -> Response:
    """Forget a conversation with its items; its responses stay."""
    responses, conversation_id = state.responses, request.path_params[PARAM]
    responses.require_kept()
    await responses.run(responses.store.delete, conversation_id, owner(request), PARAM)
    return JsonResponse(DeletedObject(id=conversation_id, object="conversation.deleted"))


async def create_items(request: Request, state: _Posting) -> Response:
    """Add items at the end of a conversation."""
    state.responses.require_kept()
    items = await use_body(request, NewItems, state, lambda body: stored(body.items, uuid.uuid4().hex))
    encoded = msgspec.json.encode(items)

    def edit(conversation: Stored) -> None:
        known = _calls(conversation.items)
        called = {name for one in known for name in called_as(one.type, one.call_id, one.id)}
        check_items(items, called, "items")
        conversation.items = _joined(conversation.items, encoded)

    await _change(request, state, edit)
    return JsonResponse(_whole(items, encoded))


def _whole(items: list[InputItem], encoded: bytes) -> ItemList:
    return ItemList(data=_raw_items(encoded), first_id=items[0].id, last_id=items[-1].id, has_more=False)


async def list_items(request: Request, state: needs.Responses) -> Response:
    """List the items of a conversation, the last first."""
    return JsonResponse(page_of(request, (await _get(request, state)).items, "desc"))


async def retrieve_item(request: Request, state: needs.Responses) -> Response:
    """Return one item of a conversation."""
    items = (await _get(request, state)).items
    return JsonResponse(bytes(_raw_items(items)[_place(request, items)]))


async def delete_item(request: Request, state: needs.Responses) -> Response:
    """Forget one item. Answers with the conversation."""
    state.responses.require_kept()

    def edit(conversation: Stored) -> None:
        raw = _raw_items(conversation.items)
        del raw[_place(request, conversation.items)]
        conversation.items = msgspec.json.encode(raw)

    return JsonResponse((await _change(request, state, edit)).body)


def _place(request: Request, items: bytes) -> int:
    """Return the index of the item that the path names. Raises NotFound."""
    item_id = request.path_params["item_id"]
    places = [i for i, known in enumerate(item_ids(items)) if known == item_id]
    if not places:
        raise NotFound(f"The conversation has no item with id '{item_id[:100]}'.", param="item_id")
    return places[0]


async def _get(request: Request, state: needs.Responses) -> Stored:
    return await _change(request, state, None)


async def _change(request: Request, state: needs.Responses, edit) -> Stored:
    """Return the conversation of the path after `edit`. Raises NotFound."""
    responses = state.responses
    responses.require_kept()
    return await responses.run(responses.store.change, request.path_params[PARAM], owner(request), PARAM, edit)
