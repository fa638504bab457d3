"""vLLM's routes that load and unload LoRA adapters while requests run."""

from __future__ import annotations

from typing import Annotated, ClassVar, Protocol

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from quire.server.api import needs
from quire.server.http.read_body import use_body
from quire.server.lora.served import LoadChange

AdapterName = Annotated[str, Meta(min_length=1, max_length=256)]


class _Adapting(needs.Body, needs.Engine, needs.Adapters, needs.Names, Protocol):
    """The state needed to load and unload adapters."""


class LoadAdapter(msgspec.Struct, kw_only=True):
    """POST /v1/load_lora_adapter"""

    lora_name: AdapterName
    lora_path: Annotated[str, Meta(min_length=1, max_length=4096)]
    load_inplace: bool | None = None  # replace the adapter of this name: requests that run keep the old one
    base_model_name: AdapterName | None = None  # shown as its parent

    harmless: ClassVar = frozenset()
    unsupported: ClassVar[dict[str, tuple]] = {"is_3d_lora_weight": (False,)}


class UnloadAdapter(msgspec.Struct, kw_only=True):
    """POST /v1/unload_lora_adapter"""

    lora_name: AdapterName

    harmless: ClassVar = frozenset({"lora_int_id"})
    unsupported: ClassVar[dict[str, tuple]] = {}


async def load(request: Request, state: _Adapting) -> Response:
    """Load a LoRA adapter from an allowed folder; requests choose it by its name as their model."""
    body = await use_body(request, LoadAdapter, state, lambda body: body)
    state.require_ready()
    change = LoadChange(body.lora_name, body.lora_path, bool(body.load_inplace), body.base_model_name)
    await state.adapters.load(state.client, state.names, change)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def unload(request: Request, state: _Adapting) -> Response:
    """Refuse new requests for a LoRA adapter; those that run finish."""
    body = await use_body(request, UnloadAdapter, state, lambda body: body)
    state.require_ready()
    await state.adapters.unload(state.client, body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
