"""/start_profile and /stop_profile, as in vLLM: time profiles of the workers' steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.messages import EngineCalls
from quire.server.api import needs
from quire.server.errors import Conflict, EngineError, NotFound, Unavailable
from quire.server.http.read_body import require_deliberate
from quire.server.http.sse import JsonResponse

T = TypeVar("T")

_WRITE_SECONDS = 300.0  # writing a long profile takes a while


class Profile(msgspec.Struct):
    status: str  # started or stopped
    files: list[str] = []  # the traces of the first rank of each engine, in --torch-profiler-dir


async def start_profile(request: Request, state: needs.ConfiguredEngine) -> Response:
    """Begin a profile of all workers. It takes 2,000 steps or two minutes at most."""
    for reason in await _in_engines(request, state, EngineCalls.start_profile):
        _refuse(reason)
    return JsonResponse(Profile("started"))


async def stop_profile(request: Request, state: needs.ConfiguredEngine) -> Response:
    """End the profile and write its traces, during which no tokens are generated."""
    files = []
    for reason, name in await _in_engines(request, state, EngineCalls.stop_profile):
        _refuse(reason)
        files.append(name)
    return JsonResponse(Profile("stopped", files))


def _refuse(reason: str) -> None:
    """Raise Conflict unless the reason is empty."""
    if reason:
        raise Conflict(f"{reason[:1].upper()}{reason[1:]}.")


async def _in_engines(request: Request, state: needs.ConfiguredEngine, method: Callable[[EngineCalls], T]) -> list[T]:
    """Return the answer of each engine. Raises NotFound without a folder for profiles, Unavailable, EngineError."""
    if state.config.device.torch_profiler_dir is None:
        raise NotFound("This server takes no profiles: start it with --torch-profiler-dir DIR.")
    if any(name in request.headers for name in ("origin", "sec-fetch-site")):  # sent by a web page
        require_deliberate(request)
    state.require_ready()
    try:
        return await state.client.call_each(method, timeout=_WRITE_SECONDS)
    except TimeoutError:
        raise Unavailable("The engine did not answer in time.", code="engine_busy") from None
    except RuntimeError as error:
        raise EngineError(f"The engine did not answer: {error}") from error
