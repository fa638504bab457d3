"""Reads id, priority and deadline of a generation request from HTTP headers, and reserves its room in the queue and in
the limits of its key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from starlette.requests import Request

from quire.server.errors import RequestTimeout
from quire.server.generate.deadlines import Deadlines
from quire.server.http import needs
from quire.server.http.caller import caller, route_path
from quire.server.http.numbers import bounded_int
from quire.server.http.time_limit import seconds_of_header
from quire.server.keys.access import check_queue
from quire.server.keys.account import key_of, open_account
from quire.server.request.generation_request import GenerationRequest


def reserve_room(request: Request, state: needs.Running, requests: Sequence[GenerationRequest], param: str) -> None:
    """Record whose requests they are and which engine the client chose, and reserve room in the queue; the outermost
    middleware releases it after the answer. Background requests need no room: their runner bounds their number.

    Raises BadRequest for an engine that does not exist, Unavailable if the queue is full, TooManyRequests if a limit of
    the caller's key is reached.
    """
    who, chosen = caller(request), _engine(request, state)
    key = key_of(who, state)
    for one in requests:
        one.engine = chosen
        one.tenant = who.turn if key is None else key.name
        one.weight = 1.0 if key is None else key.weight
    if who.background:
        _open_account(request, state, requests)
        return
    num_choices = sum(one.n for one in requests)
    state.require_room(num_choices, sum(one.n * len(one.prompt_token_ids) for one in requests), param)
    if key is not None:
        check_queue(key, num_choices, state)
    who.reserve(state, num_choices)
    _open_account(request, state, requests)


def _open_account(request: Request, state: needs.Reservation, requests: Sequence[GenerationRequest]) -> None:
    open_account(caller(request), state, requests, route_path(request.scope), request.headers)


def priority(request: Request, given: int | None) -> int | None:
    """Return the body's priority (`given`), else that of the X-Vllm-Priority header, else None. Raises BadRequest."""
    if given is not None or (header := request.headers.get("x-vllm-priority")) is None:
        return given
    return bounded_int(header, -(2**63), 2**63 - 1, "X-Vllm-Priority")


def _engine(request: Request, state: needs.Settings) -> int | None:
    """Return the number of the engine that vLLM's X-data-parallel-rank header names, None without it. Raises
    BadRequest.
    """
    if (header := request.headers.get("x-data-parallel-rank")) is None:
        return None
    return bounded_int(header, 0, state.config.parallel.data_parallel_size - 1, "X-data-parallel-rank")


def deadlines(request: Request, state: needs.Settings, predict: float | None = None) -> Deadlines:
    """Return how long the request has from now: the shortest of the server's time for requests, the body's field
    `timeout` and the X-Request-Timeout header, all of which count from its arrival, and the server's for the queue and
    the first token. Raises BadRequest, RequestTimeout if its time has passed.
    """
    server = state.config.server
    who = caller(request)
    asked = (server.request_timeout, who.timeout, seconds_of_header(request))
    now = asyncio.get_running_loop().time()
    elapsed = 0.0 if who.arrived is None else now - who.arrived
    total = min((seconds for seconds in asked if seconds), default=None)
    if who.background:  # a batch line has the time limit of its batch
        return Deadlines(None, None, total, predict)
    if total is not None and elapsed >= total:
        raise RequestTimeout(f"The request's time of {total:g} seconds has passed before it could begin.")
    first, queue = server.first_token_timeout or None, server.queue_timeout or None
    return Deadlines(
        queue,
        None if first is None else max(first - elapsed, 0.0),
        None if total is None else total - elapsed,
        predict,
    )


def request_id(request: Request, given: str | None) -> str:
    """Return the body's `request_id` (`given`), else the X-Request-Id header, else a generated id. The response repeats
    it.
    """
    if given is not None:
        caller(request).request_id = given
    return caller(request).request_id
