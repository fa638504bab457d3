"""The routes of /v1/responses and /v1/conversations."""

from __future__ import annotations

from quire.server.api.openai.responses import conversations, create, objects, protocol, routes
from quire.server.http.route import EVENTS, Route, page

_STORED = "/v1/responses/{response_id}"
_STREAM = {"stream": {"type": "boolean"}, "starting_after": {"type": "integer", "minimum": 0}}
RESPONSES = [
    Route(
        "POST",
        "/v1/responses",
        create.create_response,
        protocol.ResponsesRequest,
        objects.ResponseObject,
        stream=EVENTS,
    ),
    Route(
        "POST",
        "/v1/responses/input_tokens",
        create.count_input_tokens,
        protocol.InputTokensRequest,
        objects.InputTokens,
    ),
    Route("POST", "/v1/responses/compact", routes.no_compaction),
    Route("GET", _STORED, routes.retrieve_response, answer=objects.ResponseObject, stream=EVENTS, query=_STREAM),
    Route("DELETE", _STORED, routes.delete_response, answer=objects.DeletedObject),
    Route("POST", f"{_STORED}/cancel", routes.cancel_response, answer=objects.ResponseObject),
    Route(
        "GET",
        f"{_STORED}/input_items",
        routes.list_input_items,
        answer=objects.ItemList,
        query=page(100, order=True),
    ),
]
_CONVERSATION = "/v1/conversations/{conversation_id}"
_ITEM = f"{_CONVERSATION}/items/{{item_id}}"
CONVERSATIONS = [
    Route(
        "POST",
        "/v1/conversations",
        conversations.create_conversation,
        protocol.ConversationRequest,
        objects.ConversationObject,
    ),
    Route("GET", _CONVERSATION, conversations.retrieve_conversation, answer=objects.ConversationObject),
    Route(
        "POST",
        _CONVERSATION,
        conversations.update_conversation,
        protocol.ConversationUpdate,
        objects.ConversationObject,
    ),
    Route("DELETE", _CONVERSATION, conversations.delete_conversation, answer=objects.DeletedObject),
    Route("POST", f"{_CONVERSATION}/items", conversations.create_items, protocol.NewItems, objects.ItemList),
    Route(
        "GET",
        f"{_CONVERSATION}/items",
        conversations.list_items,
        answer=objects.ItemList,
        query=page(100, order=True),
    ),
    Route("GET", _ITEM, conversations.retrieve_item, answer=dict),
    Route("DELETE", _ITEM, conversations.delete_item, answer=objects.ConversationObject),
]
