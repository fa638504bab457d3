"""The tiers that the settings ask for, over a rank's cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from quire.configs.config import Config
from quire.worker.cache import allocation
from quire.worker.cache.tiers.blocks import BlockBytes
from quire.worker.cache.tiers.disk import DiskTier
from quire.worker.cache.tiers.fingerprint import fingerprint, model_identity
from quire.worker.cache.tiers.ram import RamTier
from quire.worker.cache.tiers.slots import SlotFiles
from quire.worker.cache.tiers.store import TierStore
from quire.worker.messages import WorkerReady


def open_tiers(
    config: Config,
    model: nn.Module,
    ready: WorkerReady,
    storage: str,
    place: tuple[int, int, int],
    agree: Callable[[list[int]], list[int]],
) -> TierStore | None:
    """The tiers of the rank at `place` (rank, ranks, tensor-parallel ranks), whose keys and values have the type and
    scales `storage`; None if there are none.
    """
    blocks = block_bytes(model, ready)
    ram = RamTier(ready.offload_bytes // place[1]) if ready.offload_bytes else None
    disk = None
    if ready.disk_bytes:
        mark = _mark(config, model, ready, storage, place, blocks)
        disk = DiskTier(Path(config.cache.kv_disk).expanduser(), ready.disk_bytes, mark)
    return TierStore(blocks.gather, blocks.scatter, ram, disk, agree) if ram or disk else None


def open_slots(
    config: Config,
    model: nn.Module,
    ready: WorkerReady,
    storage: str,
    place: tuple[int, int, int],
    agree: Callable[[list[int]], list[int]],
) -> SlotFiles | None:
    """The slot files of a rank, as `open_tiers`; None if the settings name no folder. Raises ValueError for one that
    cannot be made.
    """
    if not config.cache.slot_save_path:
        return None
    blocks, folder = block_bytes(model, ready), Path(config.cache.slot_save_path).expanduser()
    mark = _mark(config, model, ready, storage, place, blocks)
    try:
        return SlotFiles(folder, mark, blocks.gather, blocks.scatter, place[0], agree)
    except OSError as error:
        raise ValueError(f"--slot-save-path {folder}: {error.strerror}") from None


def block_bytes(model: nn.Module, ready: WorkerReady) -> BlockBytes:
    return BlockBytes(allocation.attention_layers(model), allocation.state_layers(model), ready.num_blocks)


def _mark(
    config: Config, model: nn.Module, ready: WorkerReady, storage: str, place: tuple[int, int, int], blocks: BlockBytes
) -> bytes:
    """The fingerprint of a rank's blocks."""
    facts = (ready.block_size, ready.groups, storage, place, blocks.layout, _weights_dtype(model))
    facts += (config.model.load_format, config.model.seed, config.model.quantization)
    return fingerprint(model_identity(config.model.model), facts)


def _weights_dtype(model: nn.Module) -> str:
    """The type of the activations, as the first parameter in floating point shows it."""
    return next((str(p.dtype) for p in model.parameters() if p.is_floating_point()), str(torch.float32))
