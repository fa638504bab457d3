"""The routes of Anthropic's API; /v1/models is shared with OpenAI's."""

from __future__ import annotations

from quire.server.api.anthropic import batches, messages
from quire.server.api.anthropic.protocol import CountTokensRequest, MessageResponse, MessagesRequest, TokenCount
from quire.server.http.route import EVENTS, Route, page

JSON_LINES = "application/x-jsonl"
_BATCH = "/v1/messages/batches/{batch_id}"
ROUTES = [
    Route("POST", "/v1/messages", messages.create_message, MessagesRequest, MessageResponse, stream=EVENTS),
    Route("POST", "/v1/messages/count_tokens", messages.count_tokens, CountTokensRequest, TokenCount),
    Route("POST", "/v1/messages/batches", batches.create_batch, batches.MessageBatchRequest, batches.MessageBatch),
    Route(
        "GET",
        "/v1/messages/batches",
        batches.list_batches,
        answer=batches.MessageBatchList,
        query=page(100, after="after_id"),
    ),
    Route("GET", _BATCH, batches.retrieve_batch, answer=batches.MessageBatch),
    Route("DELETE", _BATCH, batches.delete_batch, answer=batches.Deleted),
    Route("POST", f"{_BATCH}/cancel", batches.cancel_batch, answer=batches.MessageBatch),
    Route("GET", f"{_BATCH}/results", batches.results, answer=JSON_LINES),
]
