"""Reads id, priority and deadline of a generation request from HTTP headers, and reserves its room in the queue and in
the limits of its key.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from starlette.requests import Request

from quire.server.errors import BadRequest
from quire.server.generate.generation_request import GenerationRequest
from quire.server.http.numbers import bounded_int
from quire.server.keys.account import open_account
from quire.server.state import ServerState


def reserve_room(request: Request, state: ServerState, requests: Sequence[GenerationRequest], param: str) -> None:
    """Reserve room in the queue; the outermost middleware releases it after the answer. A background request needs
    none: who runs it bounds the number of them.

    Raises Unavailable if the queue is full, TooManyRequests if a limit of the caller's key is reached.
    """
    if request.scope.get("background"):
        open_account(request.scope, state, requests)
        return
    num_choices = sum(one.n for one in requests)
    state.require_room(num_choices, sum(one.n * len(one.prompt_token_ids) for one in requests), param)
    state.num_reserved += num_choices
    request.scope["num_reserved"] = num_choices
    open_account(request.scope, state, requests)


def priority(request: Request, given: int | None) -> int | None:
    """The body's priority (`given`), else that of the X-Vllm-Priority header, else None. Raises BadRequest."""
    if given is not None or (header := request.headers.get("x-vllm-priority")) is None:
        return given
    return bounded_int(header, -(2**63), 2**63 - 1, "X-Vllm-Priority")


def remaining_seconds(request: Request) -> float | None:
    """Seconds until the deadline of the X-Request-Timeout header, which counts from the request's arrival; None without
    one. Raises BadRequest.
    """
    if (header := request.headers.get("x-request-timeout")) is None:
        return None
    try:
        total = float(header)
    except ValueError:
        total = math.nan
    if not 0 < total < math.inf:
        raise BadRequest("The X-Request-Timeout header must be a number of seconds above 0.", param="X-Request-Timeout")
    now = asyncio.get_running_loop().time()
    return max(total - (now - request.scope.get("state", {}).get("arrived", now)), 0.001)


def request_id(request: Request, given: str | None) -> str:
    """The body's `request_id` (`given`), else the X-Request-Id header, else a generated id. The response repeats it."""
    if given is not None:
        request.scope["request_id"] = given
    return request.scope["request_id"]
