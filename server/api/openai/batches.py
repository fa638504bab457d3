"""/v1/batches: many requests from a file, run when the engine has no urgent work."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal, Protocol

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from quire.server.api import needs
from quire.server.api.openai.protocol import Name
from quire.server.batches.store import Batch
from quire.server.errors import BadRequest
from quire.server.http.caller import caller
from quire.server.http.paging import ends, owner, page_size
from quire.server.http.read_body import require_deliberate, use_body
from quire.server.http.sse import JsonResponse

ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/score",
    "/score",
    "/v1/rerank",
    "/v2/rerank",
    "/rerank",
)
MAX_WINDOW = 30 * 86400  # seconds
_UNITS = {"m": 60, "h": 3600, "d": 86400}


class _Reading(needs.Batches, needs.Names, Protocol):
    """The state needed to show batches."""


class _Posting(_Reading, needs.Body, Protocol):
    """The state needed to begin a batch."""


class BatchRequest(msgspec.Struct, kw_only=True):
    """POST /v1/batches"""

    input_file_id: Name
    endpoint: Annotated[str, Meta(max_length=256, extra_json_schema={"enum": list(ENDPOINTS)})]
    completion_window: Annotated[str, Meta(pattern=r"^[1-9][0-9]{0,5}[mhd]$", description="24h, 30m, 7d")]
    metadata: Annotated[dict[Name, Annotated[str, Meta(max_length=512)]], Meta(max_length=16)] | None = None

    harmless: ClassVar = frozenset()
    unsupported: ClassVar[dict[str, tuple]] = {"output_expires_after": ()}


class BatchError(msgspec.Struct):
    code: str
    line: int | None
    message: str
    param: str | None


class BatchErrors(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[BatchError]


class RequestCounts(msgspec.Struct):
    total: int
    completed: int
    failed: int


class BatchObject(msgspec.Struct, kw_only=True):
    id: str
    object: str = "batch"
    endpoint: str
    model: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating",
        "failed",
        "in_progress",
        "finalizing",
        "completed",
        "expired",
        "cancelling",
        "cancelled",
    ]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class BatchList(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


async def create_batch(request: Request, state: _Posting) -> Response:
    """Begin a batch of the requests in a file. Raises NotFound for its file, BadRequest."""
    body = await use_body(request, BatchRequest, state, lambda body: body)
    batches = state.require_batches()
    if body.endpoint not in ENDPOINTS:
        raise BadRequest(f"endpoint must be one of {', '.join(ENDPOINTS)}.", param="endpoint")
    batch = await batches.run(
        batches.store.add_batch,
        owner(request),
        caller(request).tenant,
        body.endpoint,
        body.input_file_id,
        body.completion_window,
        _seconds(body.completion_window),
        body.metadata,
    )
    batches.notify()
    return _answer(batch, state)


def _seconds(window: str) -> int:
    number, unit = re.fullmatch(r"(\d+)([mhd])", window).groups()
    seconds = int(number) * _UNITS[unit]
    if seconds > MAX_WINDOW:
        raise BadRequest(f"completion_window must be at most {MAX_WINDOW // 86400}d.", param="completion_window")
    return seconds


async def list_batches(request: Request, state: _Reading) -> Response:
    """List the caller's batches, newest first."""
    batches = state.require_batches()
    limit = page_size(request, 100)
    after = request.query_params.get("after")
    found = await batches.run(batches.store.batches, owner(request), after, limit + 1)
    shown = [_batch_object(batch, state) for batch in found[:limit]]
    return JsonResponse(BatchList(data=shown, has_more=len(found) > limit, **ends(shown)))


async def retrieve_batch(request: Request, state: _Reading) -> Response:
    """Return the status and progress of a batch."""
    batches = state.require_batches()
    return _answer(await batches.run(batches.store.batch, request.path_params["batch_id"], owner(request)), state)


async def cancel_batch(request: Request, state: _Reading) -> Response:
    """End a batch; the results so far remain."""
    require_deliberate(request)
    batches = state.require_batches()
    batch = await batches.run(batches.store.cancel, request.path_params["batch_id"], owner(request))
    batches.notify()
    return _answer(batch, state)


def _answer(batch: Batch, state: needs.Names) -> Response:
    return JsonResponse(_batch_object(batch, state))


def _batch_object(batch: Batch, state: needs.Names) -> BatchObject:
    same: dict[str, Any] = {
        name: getattr(batch, name) for name in BatchObject.__struct_fields__ if hasattr(batch, name)
    }
    errors = (
        None if batch.errors is None else BatchErrors(data=msgspec.json.decode(batch.errors, type=list[BatchError]))
    )
    return BatchObject(
        **same
        | {
            "errors": errors,
            "metadata": None if batch.metadata is None else msgspec.json.decode(batch.metadata),
            "model": state.names[0],
            "request_counts": RequestCounts(batch.total, batch.completed, batch.failed),
        }
    )
