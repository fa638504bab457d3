"""The LoRA adapters that requests choose from, by the names that they pass as their model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from quire.checkpoints.lora import ELSEWHERE
from quire.configs.config import Config
from quire.engine.messages import LoraUse
from quire.server.errors import BadRequest
from quire.server.lora.fields import LoraScale
from quire.server.lora.snapshots import Snapshot, Snapshots

if TYPE_CHECKING:
    from quire.server.engines.handle import EngineHandle


class Part(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A message, or a part of one, between frontends and their parent."""


class LoadChange(Part):
    """Load the adapter in the folder `path` as `name`; `in_place` replaces one of that name."""

    name: str
    path: str
    in_place: bool
    parent: str | None


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """An adapter under a name. Requests refer to it, and keep its files until they have ended."""

    name: str
    id: int  # for llama.cpp's API: the position on the command line, then the order of loading
    source: Path
    snapshot: Snapshot
    parent: str | None  # the base model's name, if it was given
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass(frozen=True, slots=True)
class Chosen:
    """An adapter of a request, and its scale."""

    adapter: Adapter
    scale: float = 1.0

    @property
    def use(self) -> LoraUse:
        adapter = self.adapter
        return LoraUse(adapter.snapshot.key, adapter.snapshot.folder, self.scale, adapter.name)


class Served:
    """The served adapters. Changed only on the event loop; methods for requests are thread-safe."""

    def __init__(self, config: Config):
        self.enabled = config.lora.enabled
        self._names_machines = config.parallel.names_machines
        self.loaded: dict[str, Adapter] = {}
        self.default_scales: dict[str, float] = {}  # for requests for the base model, set by /lora-adapters
        self._snapshots = Snapshots()

    def close(self) -> None:
        """Remove the copies of files. Idempotent."""
        self.loaded.clear()
        self._snapshots.close()

    def require_dynamic(self) -> None:
        """Raise BadRequest if adapters cannot be loaded and unloaded."""
        if self._names_machines:
            raise BadRequest(f"{ELSEWHERE}.")
        if not self.enabled:
            raise BadRequest(
                "This server has no LoRA adapters: start it with --enable-lora, --lora-modules or --lora-dir."
            )

    def choose(self, name: str | None, scales: Sequence[LoraScale] | None = None) -> list[Chosen]:
        """Return the adapters of a request for the model `name`: that of the name, else those of `scales` by id, of a
        request's `lora`. Raises BadRequest for an unknown id.
        """
        if name is not None and (adapter := self.loaded.get(name)) is not None:
            return [Chosen(adapter)]
        if scales is None:
            found = [(self.loaded.get(other), scale) for other, scale in self.default_scales.items()]
        else:
            by_id = {adapter.id: adapter for adapter in self.loaded.values()}
            found = [(self._find_by_id(one.id, by_id), one.scale) for one in scales]
            if len({one.id for one in scales}) < len(scales):
                raise BadRequest("lora: an id is given twice.", param="lora")
        chosen = [Chosen(adapter, scale) for adapter, scale in found if adapter is not None and scale]
        return _summed(chosen)

    @staticmethod
    def _find_by_id(number: int, by_id: dict[int, Adapter]) -> Adapter:
        if number not in by_id:
            raise BadRequest(f"lora: there is no adapter with the id {number}; see /lora-adapters.", param="lora")
        return by_id[number]


class ChangeableAdapters(Protocol):
    """Adapters that a frontend serves and can change: its own, or those that all frontends share."""

    enabled: bool
    loaded: dict[str, Adapter]
    default_scales: dict[str, float]

    def require_dynamic(self) -> None: ...
    def choose(self, name: str | None, scales: Sequence[LoraScale] | None = None) -> list[Chosen]: ...
    def close(self) -> None: ...
    async def open(self, client: EngineHandle) -> None: ...
    async def load(self, client: EngineHandle, names: Sequence[str], change: LoadChange) -> None: ...
    async def unload(self, client: EngineHandle, name: str) -> None: ...
    async def set_default_scales(self, scales: Sequence[LoraScale]) -> None: ...


def _summed(chosen: list[Chosen]) -> list[Chosen]:
    """Return adapters with equal contents as one."""
    by_key: dict[str, Chosen] = {}
    for one in chosen:
        known = by_key.get(one.adapter.snapshot.key)
        by_key[one.adapter.snapshot.key] = one if known is None else Chosen(known.adapter, known.scale + one.scale)
    return list(by_key.values())
