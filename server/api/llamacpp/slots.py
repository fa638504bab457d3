"""llama-server's GET /slots, and POST /slots/{id}: saves a slot's cache to a file, restores or erases it."""

from __future__ import annotations

import re
import time
from typing import Any, Literal, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.messages import EngineCalls
from quire.server.api import needs
from quire.server.errors import ApiError, BadRequest, EngineError, InsufficientStorage, Unavailable
from quire.server.http.read_body import read_body, require_deliberate
from quire.server.http.route import Route
from quire.server.http.sse import JsonResponse

MAX_NAME_BYTES = 200
TIMEOUT = 600.0  # seconds, for copying and disk access
_RANK = re.compile(r".*\.rank\d+")


class _Server(needs.Engine, needs.Settings, needs.Threads, Protocol):
    """The state needed to read a body, and to call the engine."""


class Slot(msgspec.Struct, kw_only=True):
    id: int
    n_ctx: int
    is_processing: bool


class SlotFile(msgspec.Struct, kw_only=True):
    filename: str | None = None


class Done(msgspec.Struct, kw_only=True):
    """`n_saved`, `n_restored` and `n_erased` are tokens, the others bytes."""

    id_slot: int
    filename: str | msgspec.UnsetType = msgspec.UNSET
    n_saved: int | msgspec.UnsetType = msgspec.UNSET
    n_written: int | msgspec.UnsetType = msgspec.UNSET
    n_restored: int | msgspec.UnsetType = msgspec.UNSET
    n_read: int | msgspec.UnsetType = msgspec.UNSET
    n_erased: int | msgspec.UnsetType = msgspec.UNSET
    timings: dict[str, float] | msgspec.UnsetType = msgspec.UNSET


class NoSlotFiles(ApiError):
    status = 501
    type = "not_supported_error"
    code = "not_supported"


async def slots(request: Request, state: needs.Engine) -> Response:
    """List the slots, one for each request that can run at once; the first ones are those that do."""
    model = state.require_ready()
    total = state.ready.worker.max_num_seqs if state.ready else 0
    return JsonResponse(
        [Slot(id=i, n_ctx=model.max_model_len, is_processing=i < state.stats.num_running) for i in range(total)]
    )


async def act(request: Request, state: _Server) -> Response:
    """Save, restore or erase a slot, as `action` of the query says. Raises NoSlotFiles, BadRequest."""
    if not state.config.cache.slot_save_path:
        raise NoSlotFiles("This server does not support slots action. Start it with `--slot-save-path`")
    if "origin" in request.headers:  # sent by a web page
        require_deliberate(request)
    number = request.path_params["id"]
    if not re.fullmatch(r"[0-9]{1,9}", number):
        raise BadRequest("Invalid slot ID", param="id")
    action = request.query_params.get("action", "")
    if action not in ("save", "restore", "erase"):
        raise BadRequest("Invalid action", param="action")
    name = "" if action == "erase" else file_name(await read_body(request, state))
    state.require_ready()
    started = time.monotonic()
    found = await _done(state, action, int(number), name)
    timings = {f"{action}_ms": (time.monotonic() - started) * 1000}
    named: dict[str, Any] = {"filename": name, "timings": timings} if name else {}
    return JsonResponse(Done(id_slot=int(number), **found, **named))


async def _done(
    state: needs.Engine, action: Literal["save", "restore", "erase"], number: int, name: str
) -> dict[str, int]:
    try:
        if action == "erase":
            answers = await state.client.call_each(EngineCalls.erase_slot, number, timeout=TIMEOUT)
        else:
            method = EngineCalls.save_slot if action == "save" else EngineCalls.restore_slot
            answers = await state.client.call_each(method, number, name, timeout=TIMEOUT)
    except TimeoutError:
        raise Unavailable("The engine did not answer in time.", code="engine_busy") from None
    except RuntimeError as error:
        raise EngineError(f"The engine could not {action} the slot: {error}") from error
    found = next((one for one in answers if one is not None), None)  # among several engines, one has the slot
    if found is None:
        raise BadRequest("Invalid slot ID", param="id")
    if not found and action == "save":
        raise InsufficientStorage("The slot could not be written.")
    if not found:
        raise BadRequest("Unable to restore slot, no available space in KV cache or invalid slot save file")
    return found


def file_name(body: bytes) -> str:
    """Return the name in a body. Raises BadRequest unless it is a plain file name."""
    try:
        name = msgspec.json.decode(body, type=SlotFile).filename
    except (msgspec.DecodeError, UnicodeError):
        raise BadRequest("The body must be a JSON object with filename, a string.", param="filename") from None
    plain = name and name.isprintable() and name not in (".", "..") and not set(name) & set('/\\:*?"<>|')
    if not plain or name != name.strip(" ") or name.startswith(".") or name.endswith(".") or _RANK.fullmatch(name):
        raise BadRequest("Invalid filename", param="filename")
    if len(name.encode("utf-8", "surrogatepass")) > MAX_NAME_BYTES:
        raise BadRequest("Invalid filename", param="filename")
    return name


ROUTES = [
    Route("GET", "/slots", slots, answer=list[Slot], admin=True),
    Route(
        "POST",
        "/slots/{id}",
        act,
        {"required": False, "content": {"application/json": {"schema": {"type": "object"}}}},
        Done,
        query={"action": {"type": "string", "enum": ["save", "restore", "erase"]}},
        admin=True,
    ),
]
