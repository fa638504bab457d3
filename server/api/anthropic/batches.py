"""Anthropic's /v1/messages/batches over the same store and runner as OpenAI's batches."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Annotated, Any, BinaryIO, ClassVar, Literal, Protocol

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from quire.server.api import needs
from quire.server.api.anthropic.models import timestamp
from quire.server.batches.store import OPEN, Batch, Store
from quire.server.errors import ApiError, BadRequest, NotFound
from quire.server.http.caller import caller
from quire.server.http.paging import owner, page_size
from quire.server.http.read_body import require_deliberate, use_body
from quire.server.http.sse import JsonResponse, one_line

ENDPOINT = "/v1/messages"
MAX_REQUESTS = 50_000
WINDOW, WINDOW_SECONDS = "24h", 86400
_ENDED = {"cancelled": "canceled", "expired": "expired"}


class _Posting(needs.Body, needs.Batches, Protocol):
    """The state needed to begin a batch."""


class Item(msgspec.Struct, kw_only=True):
    custom_id: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$(?![\s\S])")]
    params: msgspec.Raw

    harmless: ClassVar = frozenset()
    unsupported: ClassVar[dict[str, tuple]] = {}


class MessageBatchRequest(msgspec.Struct, kw_only=True):
    """POST /v1/messages/batches"""

    requests: Annotated[list[Item], Meta(min_length=1, max_length=MAX_REQUESTS)]

    harmless: ClassVar = frozenset()
    unsupported: ClassVar[dict[str, tuple]] = {}


class MessageBatchCounts(msgspec.Struct, kw_only=True):
    processing: int = 0
    succeeded: int = 0
    errored: int = 0
    canceled: int = 0
    expired: int = 0


class MessageBatch(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["message_batch"] = "message_batch"
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: MessageBatchCounts
    created_at: str
    expires_at: str
    ended_at: str | None
    cancel_initiated_at: str | None
    archived_at: None = None
    results_url: str | None


class MessageBatchList(msgspec.Struct, kw_only=True):
    data: list[MessageBatch]
    has_more: bool
    first_id: str | None
    last_id: str | None


class Deleted(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["message_batch_deleted"] = "message_batch_deleted"


async def create_batch(request: Request, state: _Posting) -> Response:
    """Begin a batch of messages."""
    content = await use_body(request, MessageBatchRequest, state, _lines)
    batches = state.require_batches()
    who = owner(request)

    file = await batches.add_file(content, caller(request), "batch", "messages.jsonl", None)
    try:
        tenant = caller(request).tenant
        batch = await batches.run(batches.store.add_batch, who, tenant, ENDPOINT, file.id, WINDOW, WINDOW_SECONDS, None)
    except ApiError:
        await batches.run(batches.store.delete_file, file.id, who)
        raise
    batches.notify()
    return JsonResponse(_message_batch(batch, request))


def _lines(body: MessageBatchRequest) -> io.BytesIO:
    """Return the input file of the batch."""
    out, seen = io.BytesIO(), set()
    for i, item in enumerate(body.requests):
        if item.custom_id in seen:
            raise BadRequest(f"requests.{i}.custom_id is used by an earlier request.", param=f"requests.{i}.custom_id")
        if not bytes(item.params).startswith(b"{"):
            raise BadRequest(f"requests.{i}.params must be an object.", param=f"requests.{i}.params")
        seen.add(item.custom_id)
        line = {"custom_id": item.custom_id, "method": "POST", "url": ENDPOINT, "body": item.params}
        out.write(msgspec.json.encode(line).replace(b"\n", b" ") + b"\n")
    return out


async def list_batches(request: Request, state: needs.Batches) -> Response:
    """List the caller's batches, newest first."""
    batches = state.require_batches()
    limit, after = page_size(request, 100), request.query_params.get("after_id")
    found = await batches.run(batches.store.batches, owner(request), after and _inner_id(after), limit + 1, ENDPOINT)
    shown = [_message_batch(batch, request) for batch in found[:limit]]
    return JsonResponse(
        MessageBatchList(
            data=shown,
            has_more=len(found) > limit,
            first_id=shown[0].id if shown else None,
            last_id=shown[-1].id if shown else None,
        )
    )


async def retrieve_batch(request: Request, state: needs.Batches) -> Response:
    """Return the status and progress of a batch."""
    return JsonResponse(_message_batch(await _batch(request, state), request))


async def cancel_batch(request: Request, state: needs.Batches) -> Response:
    """End a batch; the results so far remain."""
    require_deliberate(request)
    batches, batch = state.require_batches(), await _batch(request, state)
    if batch.status in OPEN:
        batch = await batches.run(batches.store.cancel, batch.id, owner(request))
        batches.notify()
    return JsonResponse(_message_batch(batch, request))


async def delete_batch(request: Request, state: needs.Batches) -> Response:
    """Forget a batch that has ended, and its files."""
    batches, batch = state.require_batches(), await _batch(request, state)
    if batch.status in OPEN:
        raise BadRequest("The batch has not ended: cancel it first.", param="batch_id")
    await batches.run(batches.store.delete_batch, batch.id)
    return JsonResponse(Deleted(id=_outer_id(batch)))


async def results(request: Request, state: needs.Batches) -> Response:
    """Return the results of a batch, one JSON object per line, in no particular order."""
    batches, batch = state.require_batches(), await _batch(request, state)
    if batch.status in OPEN:
        raise BadRequest("The batch has not ended.", param="batch_id")
    files = await batches.run(_open, batches.store, batch)
    return StreamingResponse(_results(files), media_type="application/x-jsonl")


def _open(store: Store, batch: Batch) -> list[BinaryIO]:
    """Return the files of results. Raises NotFound for one that was deleted or has expired."""
    with ExitStack() as opened:
        try:
            ids = [file_id for file_id in (batch.output_file_id, batch.error_file_id) if file_id is not None]
            files = [opened.enter_context(store.open(file_id)) for file_id in ids]
        except NotFound:
            raise NotFound("The results of the batch have been deleted.", param="batch_id") from None
        opened.pop_all()
    return files


def _results(files: list[BinaryIO]) -> Iterator[bytes]:
    for file in files:
        with file:
            for line in file:
                yield _result(msgspec.json.decode(line)) + b"\n"


def _result(line: dict[str, Any]) -> bytes:
    response, error = line["response"], line["error"]
    if response is None:
        kinds = {"batch_expired": "expired", "batch_cancelled": "canceled"}
        kind = kinds.get(error["code"], "errored")
        body = {"type": "error", "error": {"type": "api_error", "message": error["message"]}}
        result = {"type": kind} | ({"error": body} if kind == "errored" else {})
    elif response["status_code"] == 200:
        result = {"type": "succeeded", "message": response["body"]}
    else:
        result = {"type": "errored", "error": response["body"]}
    return one_line(msgspec.json.encode({"custom_id": line["custom_id"], "result": result}))


async def _batch(request: Request, state: needs.Batches) -> Batch:
    batches = state.require_batches()
    name = request.path_params["batch_id"]
    batch = await batches.run(batches.store.batch, _inner_id(name), owner(request))
    if batch.endpoint != ENDPOINT:
        raise NotFound(f"No such batch: '{name[:100]}'.")
    return batch


def _outer_id(batch: Batch) -> str:
    return f"msg{batch.id}"


def _inner_id(name: str) -> str:
    return name.removeprefix("msg")


def _message_batch(batch: Batch, request: Request) -> MessageBatch:
    ended = batch.status not in OPEN
    ended_at = batch.completed_at or batch.failed_at or batch.expired_at or batch.cancelled_at
    counts = MessageBatchCounts(succeeded=batch.completed, errored=batch.failed)
    rest = _ENDED.get(batch.status, "errored") if ended else "processing"
    setattr(counts, rest, getattr(counts, rest) + batch.total - batch.completed - batch.failed)
    return MessageBatch(
        id=_outer_id(batch),
        processing_status="ended" if ended else "canceling" if batch.status == "cancelling" else "in_progress",
        request_counts=counts,
        created_at=timestamp(batch.created_at),
        expires_at=timestamp(batch.expires_at),
        ended_at=timestamp(ended_at) if ended else None,
        cancel_initiated_at=timestamp(batch.cancelling_at),
        results_url=f"{str(request.base_url).rstrip('/')}/v1/messages/batches/{_outer_id(batch)}/results"
        if ended
        else None,
    )
