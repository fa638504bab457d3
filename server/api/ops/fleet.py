"""Routes at which routers and operators of fleets ask a server about itself, as vLLM and SGLang have them."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, ClassVar, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.messages import EngineCalls, Ready
from quire.server.api import needs
from quire.server.errors import BadRequest, Unavailable
from quire.server.generate import deltas
from quire.server.generate.prepare import prepare
from quire.server.http import admission
from quire.server.http.read_body import use_body
from quire.server.http.sse import JsonResponse
from quire.server.request.request import GenerationOptions, GenerationSpec
from quire.server.startup.model_names import default_name

PROBE_TIMEOUT = 20.0  # seconds for one token


class Instance(msgspec.Struct, kw_only=True):
    """Routes that routers read of vLLM's and SGLang's answers."""

    model_id: str
    instance_id: str
    kv_block_size: int | None
    model_path: str
    served_model_name: str
    version: str
    tp_size: int
    pp_size: int
    dp_size: int
    max_model_len: int | None
    max_running_requests: int | None
    status: str


class Scaling(msgspec.Struct):
    is_scaling_elastic_ep: bool = False


class Sleeping(msgspec.Struct):
    is_sleeping: bool = False


class ScaleBody(msgspec.Struct):
    new_data_parallel_size: int
    drain_timeout: int | None = None

    harmless: ClassVar = frozenset()
    unsupported: ClassVar[dict[str, tuple]] = {}


class Scaled(msgspec.Struct):
    message: str


class _Described(needs.Health, needs.Listing, needs.Version, Protocol):
    """The model, its names, and the engine's `Ready` message."""

    ready: Ready | None


class _Configured(needs.Body, needs.Settings, Protocol):
    """The settings, and the parts that read a body."""


async def server_info(request: Request, state: _Described) -> Response:
    """Return what a router needs to know about this server: model, sizes and an id of the instance."""
    config, ready = state.config, state.ready
    worker = ready and ready.worker
    return JsonResponse(
        Instance(
            model_id=state.names[0],
            instance_id=f"{socket.gethostname()}:{config.server.port}",
            kv_block_size=worker and worker.block_size,
            model_path=default_name(config.model.model),
            served_model_name=state.names[0],
            version=state.version,
            tp_size=config.parallel.tensor_parallel_size,
            pp_size=config.parallel.pipeline_parallel_size,
            dp_size=config.parallel.data_parallel_size,
            max_model_len=worker and worker.max_model_len,
            max_running_requests=worker and worker.max_num_seqs,
            status=state.status,
        )
    )


async def kv_event_sources(request: Request, state: needs.Engine) -> Response:
    """Return where each engine publishes KV events, by its number; nothing if they are off."""
    state.require_ready()
    sources: list[dict[str, Any] | None] = await state.client.call_each(EngineCalls.kv_event_source)
    return JsonResponse({str(i): source for i, source in enumerate(sources) if source is not None})


async def health_generate(request: Request, state: needs.Completion) -> Response:
    """Generate one token, and answer 200 when it is there. Raises Unavailable if it does not come in time."""
    state.require_ready()
    identity = admission.admit(request, state, "health-", model=None, priority=None, request_id=None)
    spec = GenerationSpec(prompts=[[0]], options=GenerationOptions(max_tokens=1, temperature=0.0), **identity)
    requests = prepare(spec, state)
    stream = await admission.generate(request, state, requests, "prompt")
    try:
        await asyncio.wait_for(deltas.collect(stream, 1), PROBE_TIMEOUT)
    except TimeoutError:
        raise Unavailable(f"No token came within {PROBE_TIMEOUT:.0f} s.") from None
    return Response(status_code=200)


async def scale_elastic_ep(request: Request, state: _Configured) -> Response:
    """Answer that the number of engines stays as it is. Raises BadRequest for another number."""
    body = await use_body(request, ScaleBody, state, lambda body: body)
    size = state.config.parallel.data_parallel_size
    if body.new_data_parallel_size != size:
        raise BadRequest(
            f"new_data_parallel_size: this server has {size} engine{'s' if size > 1 else ''} until it is started again "
            "with another --data-parallel-size.",
            param="new_data_parallel_size",
        )
    return JsonResponse(Scaled(f"Scaled to {size} data parallel engines"))


async def is_scaling_elastic_ep(request: Request, state: object) -> Response:
    """Answer that the number of engines is not changing; it never does."""
    return JsonResponse(Scaling())


async def is_sleeping(request: Request, state: object) -> Response:
    """Answer that the model is loaded; a server of several models answers for each."""
    return JsonResponse(Sleeping())
