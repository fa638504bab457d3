"""llama-server's GET /props."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.server.api import needs
from quire.server.http.caller import caller
from quire.server.http.route import Route
from quire.server.http.sse import JsonResponse
from quire.server.keys.access import require_model


class _Server(needs.Version, needs.Engine, needs.Media, needs.Text, needs.Choice, Protocol):
    """The state needed to describe the server to clients of llama.cpp."""


class Props(msgspec.Struct, kw_only=True):
    default_generation_settings: dict[str, Any]  # n_ctx, and params: sampling where a request sets none
    total_slots: int  # requests that run at once
    model_alias: str
    model_path: str
    chat_template: str
    modalities: dict[str, bool]
    build_info: str


async def props(request: Request, state: _Server) -> Response:
    """Describe the server and its model."""
    model = state.require_ready()
    require_model(caller(request), None, state)
    return JsonResponse(
        Props(
            default_generation_settings={
                "n_ctx": model.max_model_len,
                "params": model.other_defaults | model.sampling_defaults,
            },
            total_slots=state.ready.worker.max_num_seqs if state.ready else 0,
            model_alias=state.names[0],
            model_path=state.names[0],  # no path: the name that clients use
            chat_template=state.tokenizer.chat_templates.get("default") or "",
            modalities={"vision": not state.images.why_not, "audio": False},
            build_info=f"quire {state.version}",
        )
    )


ROUTES = [
    Route("GET", "/props", props, answer=Props),
]
