"""The LoRA adapters of one of several frontends. Their parent owns the list: a frontend asks it for changes, and takes
over each list that it sends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quire.configs.config import Config
from quire.server.errors import ApiError, BadRequest, Conflict, Forbidden, NotFound, Unavailable
from quire.server.lora.fields import LoraScale
from quire.server.lora.served import Adapter, LoadChange, Part, Served

if TYPE_CHECKING:
    from quire.server.engines.handle import EngineHandle
    from quire.server.lora.adapters import Adapters

_REFUSALS = {one.__name__: one for one in (BadRequest, Conflict, Forbidden, NotFound)}


class UnloadChange(Part):
    name: str


class ScalesChange(Part):
    scales: list[LoraScale]


Change = LoadChange | UnloadChange | ScalesChange


class Listed(Part):
    """An `Adapter`. `folder` has the parent's copy of its files, which stays until every frontend has its own."""

    name: str
    id: int
    source: str
    folder: str
    parent: str | None
    created: int


class Listing(Part):
    """All adapters in order, and the scales of requests for the base model."""

    adapters: list[Listed]
    default_scales: dict[str, float]


class Refusal(Part):
    """The reason why a change was refused, as an `ApiError`."""

    kind: str
    message: str
    param: str | None
    code: str | None

    @classmethod
    def from_error(cls, error: ApiError) -> Refusal:
        return cls(type(error).__name__, error.message, error.param, error.code)

    def error(self) -> ApiError:
        if self.kind == Unavailable.__name__:
            return Unavailable(self.message, retry_after=2)
        return _REFUSALS.get(self.kind, ApiError)(self.message, param=self.param, code=self.code)


def listing(adapters: Adapters) -> Listing:
    """Return the adapters as the parent sends them."""
    listed = [
        Listed(one.name, one.id, str(one.source), one.snapshot.folder, one.parent, one.created)
        for one in adapters.loaded.values()
    ]
    return Listing(listed, dict(adapters.default_scales))


async def make(change: Change, adapters: Adapters, client: EngineHandle, names: Sequence[str]) -> None:
    """Make a change that a frontend asked for. Raises ApiError."""
    match change:
        case LoadChange():
            await adapters.load(client, names, change)
        case UnloadChange():
            await adapters.unload(client, change.name)
        case ScalesChange():
            await adapters.set_default_scales(change.scales)


class SharedAdapters(Served):
    """The adapters of one frontend. `ask` requests a change of all frontends; set it before the first request."""

    ask: Callable[[Change], Awaitable[None]]

    def __init__(self, config: Config):
        super().__init__(config)
        self._copies: dict[str, Adapter] = {}  # by the folder of the parent's copy
        self._known = asyncio.Event()

    async def open(self, client: EngineHandle) -> None:
        """Wait for the first list."""
        if self.enabled:
            await self._known.wait()

    async def adopt(self, listing: Listing) -> None:
        """Take over a list. Lists must be given one after the other. Raises ValueError if files cannot be copied."""
        copies = {one.folder: self._copies.get(one.folder) or await self._copy(one) for one in listing.adapters}
        self._copies = copies
        self.loaded = {one.name: one for one in copies.values()}
        self.default_scales = listing.default_scales
        self._known.set()

    async def _copy(self, one: Listed) -> Adapter:
        """Return an own copy, so that running requests keep their files when the parent removes its copy."""
        take = self._snapshots.take
        snapshot = await asyncio.get_running_loop().run_in_executor(None, lambda: take(Path(one.folder), link=True))
        return Adapter(one.name, one.id, Path(one.source), snapshot, one.parent, one.created)

    # ---- at run time: as the methods of `Adapters`

    async def load(self, client: EngineHandle, names: Sequence[str], change: LoadChange) -> None:
        self.require_dynamic()
        await self.ask(change)

    async def unload(self, client: EngineHandle, name: str) -> None:
        self.require_dynamic()
        await self.ask(UnloadChange(name))

    async def set_default_scales(self, scales: Sequence[LoraScale]) -> None:
        await self.ask(ScalesChange(list(scales)))
