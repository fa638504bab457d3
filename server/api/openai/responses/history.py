"""Stored objects that a request refers to: previous responses, its conversation, and items by id."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
from starlette.requests import Request

from quire.server.api import needs
from quire.server.api.openai.responses.objects import ConversationId
from quire.server.api.openai.responses.protocol import InputItem, ResponsePrompt
from quire.server.api.openai.responses.service import Responses
from quire.server.api.openai.responses.store import Stored
from quire.server.errors import BadRequest, NotFound
from quire.server.http.paging import owner
from quire.server.http.read_body import max_body_bytes

MAX_REFERENCES = 1_000
REFERENCE = "item_reference"
_KEY = 32  # characters of an item's id that come from its response's id
_items = msgspec.json.Decoder(list[InputItem]).decode


class _Past(msgspec.Struct):
    output: list[InputItem] = []
    conversation: ConversationId | None = None


_past = msgspec.json.Decoder(_Past).decode


@dataclass(slots=True)
class History:
    """The stored objects of one request. `chain` are responses, oldest first."""

    chain: list[Stored] = field(default_factory=list)
    conversation: Stored | None = None
    referenced: list[Stored] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Return the size in bytes of JSON."""
        whole = [*self.chain, *self.referenced, *([self.conversation] if self.conversation else [])]
        return sum(len(one.body) + len(one.items) for one in whole)

    @property
    def name(self) -> str | None:
        """Return the id of the conversation, or of the first response of the chain."""
        first = self.conversation or (self.chain[0] if self.chain else None)
        return first and first.id


def conversation_id(body: ResponsePrompt) -> str | None:
    given = body.conversation
    return given if given is None or isinstance(given, str) else given.id


def is_needed(body: ResponsePrompt) -> bool:
    return (
        body.previous_response_id is not None or body.conversation is not None or any(True for _ in _references(body))
    )


def _references(body: ResponsePrompt):
    if isinstance(body.input, list):
        for i, item in enumerate(body.input):
            if item.type == REFERENCE:
                yield i, item


async def fetch(request: Request, body: ResponsePrompt, responses: Responses, state: needs.BodyLimit) -> History:
    """Return the history of a request. Raises NotFound for an id that is not stored, BadRequest."""
    responses.require_kept()
    if body.previous_response_id is not None and body.conversation is not None:
        raise BadRequest("previous_response_id and conversation exclude each other.", param="conversation")
    return await responses.run(_fetch, responses, body, owner(request), max_body_bytes(state))


def _fetch(responses: Responses, body: ResponsePrompt, who: str, max_bytes: int) -> History:
    store, out = responses.store, History()
    if body.previous_response_id is not None:
        out.chain = store.chain(body.previous_response_id, who, max_bytes, body.truncation == "auto")
    if (conversation := conversation_id(body)) is not None:
        out.conversation = store.get(conversation, who, "conversation")
        if out.size > max_bytes:
            raise BadRequest(f"conversation: its items have more than {max_bytes} bytes.", param="conversation")
    keys: dict[str, tuple[int, InputItem]] = {}
    for i, item in _references(body):
        keys.setdefault((item.id or "").partition("_")[2][:_KEY], (i, item))
        if len(keys) > MAX_REFERENCES:
            raise BadRequest(f"input: more than {MAX_REFERENCES} responses are referred to.", param="input")
    for key, (i, item) in keys.items():
        try:
            out.referenced.append(store.get(f"resp_{key}", who, f"input.{i}.id"))
        except NotFound:
            raise _no_item(i, item) from None
        if out.size > max_bytes:
            raise BadRequest(f"input: what is referred to has more than {max_bytes} bytes.", param="input")
    return out


def _no_item(i: int, item: InputItem) -> NotFound:
    return NotFound(f"input.{i}: no item with id '{(item.id or '')[:100]}' is stored.", param=f"input.{i}.id")


def resolve(body: ResponsePrompt, history: History) -> list[InputItem]:
    """Return the items before the request's own; references in those are replaced. Raises NotFound, BadRequest."""
    out: list[InputItem] = _items(history.conversation.items) if history.conversation is not None else []
    for stored in history.chain:
        past = _past(stored.body)
        if past.conversation is not None:
            raise BadRequest(
                f"previous_response_id: '{stored.id}' is part of a conversation; continue it with conversation.",
                param="previous_response_id",
            )
        out += _items(stored.items)
        out += past.output
    known: dict[str | None, InputItem] = {}
    for stored in history.referenced:
        known |= {item.id: item for item in (*_items(stored.items), *_past(stored.body).output)}
    for i, item in _references(body):
        if item.id not in known:
            raise _no_item(i, item)
        body.input[i] = known[item.id]
    return out
