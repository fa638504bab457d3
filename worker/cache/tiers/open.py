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
from quire.worker.cache.tiers.store import TierStore
from quire.worker.messages import WorkerReady
from quire.worker.platforms import host

GIB = 1 << 30


def offload_bytes(config: Config, device: str) -> int:
    """RAM of all ranks of an engine for blocks that leave its pool: as asked, or on CUDA a quarter of what is free."""
    asked = config.cache.kv_offload_gib
    if asked is not None:
        return int(asked * GIB)
    return host.memory()[1] // 4 // config.parallel.data_parallel_size if device == "cuda" else 0


def disk_bytes(config: Config) -> int:
    """The limit of the files, 0 without a folder for them."""
    return max(int(config.cache.kv_disk_gib * GIB), 1) if config.cache.kv_disk else 0


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
    blocks = BlockBytes(allocation.attention_layers(model), allocation.state_layers(model), ready.num_blocks)
    ram = RamTier(ready.offload_bytes // place[1]) if ready.offload_bytes else None
    disk = None
    if ready.disk_bytes:
        facts = (ready.block_size, ready.groups, storage, place, blocks.layout, _weights_dtype(model))
        facts += (config.model.load_format, config.model.seed, config.model.quantization)
        mark = fingerprint(model_identity(config.model.model), facts)
        disk = DiskTier(Path(config.cache.kv_disk).expanduser(), ready.disk_bytes, mark)
    return TierStore(blocks.gather, blocks.scatter, ram, disk, agree) if ram or disk else None


def _weights_dtype(model: nn.Module) -> str:
    """The type of the activations, as the first parameter in floating point shows it."""
    return next((str(p.dtype) for p in model.parameters() if p.is_floating_point()), str(torch.float32))
