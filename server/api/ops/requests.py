"""The running requests, which an administrator can see and end, and the load."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Protocol, TypeVar, TypeVarTuple

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.messages import EngineCalls
from quire.server.api import needs
from quire.server.errors import EngineError, Unavailable
from quire.server.http.read_body import use_body
from quire.server.http.sse import JsonResponse

T = TypeVar("T")
Args = TypeVarTuple("Args")

MAX_IDS = 10_000


class _Posting(needs.Body, needs.Engine, Protocol):
    """The state needed to end requests in the engines."""


class RunningRequest(msgspec.Struct, kw_only=True):
    """One choice of a request in the engine. `age` is in seconds since it came there."""

    request_id: str  # the id of its answer
    engine_request_id: str  # for this choice
    key: str  # the name of its API key; without keys, the client's address
    phase: str  # waiting, prefill or decode
    age: float
    priority: int
    background: bool
    num_prompt_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_preemptions: int


class RequestList(msgspec.Struct):
    requests: list[RunningRequest]


class AbortBody(msgspec.Struct, kw_only=True):
    """POST /abort_requests: ids of answers (chatcmpl-...), of requests (X-Request-Id) or of choices in the engine."""

    unsupported: ClassVar[dict[str, tuple]] = {}
    harmless: ClassVar[frozenset[str]] = frozenset()

    request_ids: Annotated[list[Annotated[str, Meta(max_length=512)]], Meta(max_length=MAX_IDS)]


class Aborted(msgspec.Struct):
    aborted: list[str]  # those of the ids that named a running request


class Load(msgspec.Struct, kw_only=True):
    server_load: int  # HTTP requests being answered, of all frontends
    num_requests_running: int
    num_requests_waiting: int
    kv_cache_usage: float  # 0 to 1


async def list_requests(request: Request, state: needs.Engine) -> Response:
    """List the requests in the engines, oldest first."""
    found = [_running_request(one) for one in await _in_engines(state, EngineCalls.requests)]
    return JsonResponse(RequestList(sorted(found, key=lambda one: -one.age)))


async def abort_requests(request: Request, state: _Posting) -> Response:
    """End requests: their answers end with finish_reason abort."""
    asked = set(await use_body(request, AbortBody, state, lambda body: body.request_ids))
    named = {one["id"]: asked.intersection(_names(one["id"])) for one in await _in_engines(state, EngineCalls.requests)}
    ended = await _in_engines(state, EngineCalls.abort, [engine_id for engine_id, names in named.items() if names])
    return JsonResponse(Aborted(sorted(set().union(*(named[engine_id] for engine_id in ended)))))


async def load(request: Request, state: needs.Load) -> Response:
    """Return the numbers of requests being answered, running and waiting."""
    stats = state.stats
    return JsonResponse(
        Load(
            server_load=state.num_in_flight + state.num_in_flight_elsewhere,
            num_requests_running=stats.num_running,
            num_requests_waiting=stats.num_waiting,
            kv_cache_usage=stats.kv_cache_usage,
        )
    )


async def _in_engines(state: needs.Engine, method: Callable[[EngineCalls, *Args], list[T]], *args: *Args) -> list[T]:
    """Return the concatenated lists that a method returns from all engines. Raises Unavailable, EngineError."""
    state.require_ready()
    try:
        found = await state.client.call_each(method, *args)
    except TimeoutError:
        raise Unavailable("The engine did not answer in time.", code="engine_busy") from None
    except RuntimeError as error:
        raise EngineError(f"The engine did not answer: {error}") from error
    return [item for part in found for item in part]


def _names(engine_id: str) -> tuple[str, str, str]:
    """Return the ids by which clients know the request of a choice: its own, that of the answer, and the latter
    without its prefix. Engine ids end with `-` and a serial number, followed by `/` and the number of the choice if
    there are several.
    """
    answer = re.sub(r"-\d+(/\d+)?$", "", engine_id)
    return engine_id, answer, answer.partition("-")[2]


def _running_request(one: dict[str, Any]) -> RunningRequest:
    engine_id = one.pop("id")
    return RunningRequest(request_id=_names(engine_id)[1], engine_request_id=engine_id, key=one.pop("tenant"), **one)
