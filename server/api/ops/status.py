"""Probes, metrics, the effective configuration, and the one action on a running server."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from quire.configs.config import Config
from quire.configs.log_ring import Line, kept_lines
from quire.engine.messages import EngineCalls, Ready
from quire.server.api import needs
from quire.server.api.ops import vllm_info
from quire.server.errors import EngineError, Unavailable
from quire.server.http.caller import caller
from quire.server.http.read_body import require_deliberate
from quire.server.http.sse import JsonResponse
from quire.server.incidents import Failure, Incidents, Restarts
from quire.server.metrics.history import PERIOD, History, Reading
from quire.server.metrics.view import view_for
from quire.server.startup.model_names import without_folders
from quire.server.structured.schema.schema import structured_output
from quire.server.turns.threads import LARGE
from quire.server.values import Json

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class _Server(needs.Prompting, needs.Version, needs.Load, needs.Health, needs.Engine, needs.Names, Protocol):
    """The state needed to describe the whole server."""

    system_fingerprint: str
    incidents: Incidents
    history: History


class Health(msgspec.Struct, kw_only=True):
    status: str  # see `needs.Health`
    phase: str | UnsetType = UNSET  # while loading
    percent: int | UnsetType = UNSET
    reason: str | UnsetType = UNSET  # after a failure, and while the engine stalls


class Live(msgspec.Struct):
    status: str


class Version(msgspec.Struct):
    version: str


class ServerInfo(msgspec.Struct, kw_only=True):
    version: str
    system_fingerprint: str
    models: list[str]
    health: Health
    config: dict[str, dict[str, Any]]
    engine: dict[str, Any] | None
    kv_tiers: Json  # null without tiers below the KV cache; a list if engines differ
    kernels: Json
    formats: dict[str, Any] | None
    images: dict[str, Any]
    sampling_defaults: dict[str, Any] | None
    structured_output: dict[str, str | list[str]]
    num_requests_in_flight: int
    restarts: Restarts
    recent_errors: list[Failure]  # for this process
    # vLLM's fields
    vllm_config: str | dict[str, Any] = ""  # an object with ?config_format=json
    vllm_env: dict[str, str] = {}
    system_env: dict[str, str | None] = {}
    log_lines: list[Line] = []  # warnings and worse, of this process and the engines


class MetricsHistory(msgspec.Struct):
    period: float  # seconds between readings
    readings: list[Reading]


class CacheReset(msgspec.Struct):
    success: bool


async def live(request: Request, state: object) -> Response:
    """Answer that the process is alive, without asking the engine."""
    return JsonResponse({"status": "live"})


async def ready(request: Request, state: needs.Health) -> Response:
    """Answer 200 once the engine has completed a step, and 503 with phase and percentage before, and at the end."""
    up = state.status == "ready"
    return JsonResponse(state.health(), status_code=200 if up else 503, headers=None if up else {"Retry-After": "2"})


async def version(request: Request, state: needs.Version) -> Response:
    """Return the version of quire."""
    return JsonResponse({"version": state.version})


class _Scraped(needs.Scrape, needs.Accounts, needs.Threads, Protocol):
    """The metrics, who may see which, and threads that write them."""


async def metrics(request: Request, state: _Scraped) -> Response:
    """Return the metrics of all frontends in the text format of Prometheus, those that the key may see."""
    if state.metrics is None:
        state.require_ready()
    view = view_for(caller(request).key, state.keys is not None, caller(request).owner is None)
    try:
        if state.scrape is not None:
            page = await state.scrape(view)
        else:  # a key has four series: those of ten thousand take a second
            render = functools.partial(state.metrics.render, view)
            page = await state.threads.run(LARGE, render, caller(request).turn)
    except TimeoutError:
        raise Unavailable("The other frontends did not report their metrics in time.") from None
    return Response(page, media_type=METRICS_TYPE)


async def server_info(request: Request, state: _Server) -> Response:
    """Return the effective configuration, values chosen automatically, and the memory plan; vLLM's fields, too.

    Raises BadRequest for an unknown `config_format`.
    """
    form = vllm_info.check_format(request.query_params.get("config_format"))
    return JsonResponse(
        {
            "version": state.version,
            "system_fingerprint": state.system_fingerprint,
            "models": state.all_names,
            "health": state.health(),
            "config": _public_settings(state.config),
            "engine": state.ready and _engine(state.ready),
            "kv_tiers": await _asked(state, EngineCalls.describe_tiers),
            "kernels": await _asked(state, EngineCalls.describe_ops),
            "formats": state.formats and state.formats.describe(),
            "images": state.images.describe(),
            "sampling_defaults": state.model and state.model.other_defaults | state.model.sampling_defaults,
            "structured_output": structured_output(),
            "num_requests_in_flight": state.num_in_flight + state.num_in_flight_elsewhere,
            "restarts": state.incidents.restarts(),
            "recent_errors": state.incidents.recent_errors(),
            **vllm_info.vllm_parts(_public_settings(state.config), form),
            "log_lines": await _log_lines(state),
        }
    )


async def metrics_history(request: Request, state: _Server) -> Response:
    """Return readings of the last hour of the metrics that the page draws, the oldest first."""
    return JsonResponse(MetricsHistory(PERIOD, state.history.readings()))


async def _log_lines(state: needs.Engine) -> list[Line]:
    """Return the newest lines of the log, the oldest first; without those of engines that do not answer."""
    try:
        of_engines = await state.client.call_each(EngineCalls.log_lines, timeout=2.0)
    except (RuntimeError, TimeoutError):  # not ready, or in a long step
        of_engines = []
    return sorted([*kept_lines(), *(line for lines in of_engines for line in lines)], key=lambda line: line["time"])


async def _asked(state: needs.Engine, method: Callable[[EngineCalls], object]) -> object:
    """Return the engines' reports: kernels in use, since when, and compilation progress; or the contents of the tiers
    below the KV cache. None if no engine reports.
    """
    try:
        return await state.client.call(method, timeout=2.0)
    except (RuntimeError, TimeoutError):  # not ready, or in a long step
        return None


def _engine(ready: Ready) -> dict[str, Any]:
    worker = ready.worker
    media = worker.media and {name: getattr(worker.media, name) for name in worker.media.__struct_fields__}
    return {"steps_in_flight": ready.depth} | msgspec.to_builtins(worker) | {"media": media}


def _public_settings(config: Config) -> dict[str, Any]:
    """Return all settings without secrets; of paths, only the last part."""
    sections = {section.name: getattr(config, section.name) for section in dataclasses.fields(config)}
    return {
        name: {
            f.name: "***"
            if f.metadata.get("secret") and getattr(section, f.name)
            else without_folders(getattr(section, f.name))
            for f in dataclasses.fields(section)
        }
        for name, section in sections.items()
    }


async def reset_prefix_cache(request: Request, state: needs.Engine) -> Response:
    """Forget cached prefixes; `success` is false when running requests hold them."""
    require_deliberate(request)
    state.require_ready()
    try:
        return JsonResponse({"success": all(await state.client.call_each(EngineCalls.reset_prefix_cache))})
    except TimeoutError:
        raise Unavailable("The engine did not answer in time.", code="engine_busy") from None
    except RuntimeError as error:
        raise EngineError(f"The engine could not reset its cache: {error}") from error
