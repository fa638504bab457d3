"""The LoRA adapters of the server, by the names that requests use as their model."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from quire.checkpoints.hub import adapter_folder
from quire.checkpoints.library.names import is_hub_adapter
from quire.checkpoints.lora import default_scales, folders_at_start, parse_module
from quire.configs.config import Config
from quire.engine.messages import EngineCalls
from quire.server.errors import BadRequest, Conflict, Forbidden, NotFound, Unavailable
from quire.server.lora.fields import LoraScale
from quire.server.lora.served import Adapter, LoadChange, Served
from quire.server.lora.snapshots import Snapshot

if TYPE_CHECKING:
    from quire.server.engines.handle import EngineHandle

logger = logging.getLogger("quire")

MAX_ADAPTERS = 4096  # at once
_POLL = 0.02  # seconds
_LOAD_TIMEOUT = 600.0  # seconds


class Adapters(Served):
    """The adapters, read from their files and loaded into the engines."""

    def __init__(self, config: Config):
        """Read the settings. Raises ValueError for wrong ones."""
        lora = config.lora
        super().__init__(config)
        self._download_dir = config.model.download_dir
        self._ids = itertools.count()
        self._loading: set[str] = set()  # names
        self._at_start = folders_at_start(lora.lora_modules, lora.lora_dir) if lora.enabled else []
        self._scales_at_start = default_scales(lora.lora_modules)
        self._parents = {name: base for name, _, base in map(parse_module, lora.lora_modules)}
        roots = [Path(lora.lora_dir).expanduser()] if lora.lora_dir else []
        given = [path for _, path, is_given in self._at_start if is_given]
        self._allowed = [Path(os.path.realpath(path)) for path in (*roots, *given)]
        # path -> Hub id, for ids that could be paths
        self._on_hub = {Path(os.path.realpath(path)): path for path in given if is_hub_adapter(str(path))}

    # ---- start

    async def open(self, client: EngineHandle) -> None:
        """Load the adapters of the command line and of --lora-dir, once an engine is ready.

        Raises ValueError if one of --lora-modules cannot be loaded; one of --lora-dir is left out.
        """
        for name, path, is_given in self._at_start:
            try:
                if not is_given and not self._is_inside(Path(os.path.realpath(path))):
                    raise ValueError("a link leads out of the folder; name its target with --lora-modules")
                adapter = await self._read(name, path, self._parents.get(name))
                await self._load_when_ready(client, adapter)
            except ValueError as error:
                if is_given:
                    raise ValueError(f"--lora-modules {name}: {error}") from None
                logger.warning("--lora-dir: leaving out %s: %s", name, error)
                continue
            self.loaded[name] = replace(adapter, id=next(self._ids))
        self.default_scales = dict(self._scales_at_start)
        if self.loaded:
            logger.info("LoRA adapters: %s", ", ".join(self.loaded))

    async def _load_when_ready(self, client: EngineHandle, adapter: Adapter) -> None:
        while True:
            while client.ready is None:
                await asyncio.sleep(_POLL)
            try:
                return await _load_into(client, adapter)
            except Unavailable:  # the engine died: its supervisor restarts it or ends the server
                await asyncio.sleep(_POLL)

    async def _read(self, name: str, path: Path, parent: str | None) -> Adapter:
        def take() -> Snapshot:
            return self._snapshots.take(Path(adapter_folder(str(path), self._download_dir)))

        snapshot = await asyncio.get_running_loop().run_in_executor(None, take)
        return Adapter(name, -1, path, snapshot, parent)  # a new one gets its number when it is loaded

    # ---- at run time

    async def load(self, client: EngineHandle, names: Sequence[str], change: LoadChange) -> None:
        """Load an adapter. `names` are the model's.

        Raises Forbidden for a path outside the allowed folders, Conflict for a name in use, BadRequest for an adapter
        that cannot be used, Unavailable if no engine is ready.
        """
        self.require_dynamic()
        name = change.name
        folder = self._allowed_folder(change.path)
        folder = self._on_hub.get(folder, folder)
        known = self.loaded.get(name)
        if name in names:
            raise Conflict(f"'{name}' is the name of the model itself.", param="lora_name")
        if name in self._loading or (known is not None and not change.in_place):
            raise Conflict(
                f"The LoRA adapter '{name}' is loaded already: unload it first, or set load_inplace.", param="lora_name"
            )
        if len(self.loaded) + len(self._loading) >= MAX_ADAPTERS:
            raise BadRequest(f"lora_name: {MAX_ADAPTERS} adapters are loaded, and there can be no more.")
        self._loading.add(name)
        try:
            adapter = await self._read(name, folder, change.parent)
            await _load_into(client, adapter)
            number = next(self._ids) if known is None else known.id
            self.loaded[name] = replace(adapter, id=number)
        except ValueError as error:
            raise BadRequest(f"lora_path: {error}.", param="lora_path") from None
        finally:
            self._loading.discard(name)

    async def offline(self, client: EngineHandle, name: str, path: Path) -> Adapter:
        """Return the adapter in the folder `path`, loaded if it is not known under this name. Raises BadRequest."""
        self.require_dynamic()
        known = self.loaded.get(name)
        if known is not None and known.source == path:
            return known
        try:
            adapter = await self._read(name, path.expanduser(), None)
            await _load_into(client, adapter)
        except ValueError as error:
            raise BadRequest(f"lora_request {name}: {error}") from None
        adapter = self.loaded[name] = replace(adapter, id=next(self._ids))
        return adapter

    def _is_inside(self, folder: Path) -> bool:
        """Return whether a resolved folder is in an allowed one, with all files read from it."""
        inside = any(folder == root or folder.is_relative_to(root) for root in self._allowed)
        return inside and _stays_inside(folder, self._allowed)

    def _allowed_folder(self, path: str) -> Path:
        """Return the folder of a path, with links resolved. Raises Forbidden, without telling whether it exists, unless
        it is one of the command line or below --lora-dir.
        """
        try:
            folder = Path(os.path.realpath(os.path.expanduser(path)))
            is_allowed = ".." not in Path(path).parts and self._is_inside(folder)
        except ValueError:  # a null character
            is_allowed = False
        if not is_allowed:
            raise Forbidden(
                "lora_path: adapters may be loaded from below --lora-dir and from the paths of --lora-modules only.",
                param="lora_path",
            )
        return folder

    async def unload(self, client: EngineHandle, name: str) -> None:
        """Remove an adapter: later requests for it are refused, running ones finish. Raises NotFound."""
        self.require_dynamic()
        adapter = self.loaded.pop(name, None)
        if adapter is None:
            raise NotFound(f"There is no LoRA adapter '{name[:200]}'.", param="lora_name", code="model_not_found")
        self.default_scales.pop(name, None)
        if client.ready is not None and all(
            other.snapshot.key != adapter.snapshot.key for other in self.loaded.values()
        ):
            try:
                await client.call(EngineCalls.unload_lora, adapter.snapshot.key)
            except (RuntimeError, TimeoutError) as error:  # the engine drops it when others are loaded
                logger.info("the engine did not unload %s: %s", name, error)

    async def set_default_scales(self, scales: Sequence[LoraScale]) -> None:
        """Set the adapters of requests for the base model that name none. Raises BadRequest for an unknown id."""
        by_id = {adapter.id: adapter for adapter in self.loaded.values()}
        self.default_scales = {self._find_by_id(one.id, by_id).name: one.scale for one in scales if one.scale}


async def _load_into(client: EngineHandle, adapter: Adapter) -> None:
    """Have all engines read an adapter. Raises ValueError if it does not fit the model, Unavailable."""
    try:
        found = await client.call_each(
            EngineCalls.load_lora, adapter.snapshot.key, adapter.snapshot.folder, timeout=_LOAD_TIMEOUT
        )
    except (RuntimeError, TimeoutError) as error:
        raise Unavailable(f"The engine did not load the adapter: {error}.", retry_after=2) from None
    for reason in found:
        if reason:
            raise ValueError(reason)


def _stays_inside(folder: Path, allowed: Sequence[Path]) -> bool:
    """Return whether the files of an adapter are also within the allowed folders: a link may lead out."""
    try:
        names = [entry.name for entry in os.scandir(folder)] if folder.is_dir() else []
    except OSError:
        return True  # reported when it is read
    read = (name for name in names if name.startswith("adapter_") or name.endswith(".gguf"))
    files = (Path(os.path.realpath(folder / name)) for name in read)
    return all(any(file.is_relative_to(root) for root in allowed) for file in files)
