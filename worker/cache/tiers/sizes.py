"""The sizes of the tiers below the pool that the settings ask for."""

from __future__ import annotations

from quire.checkpoints.sizes import format_each
from quire.configs.config import Config
from quire.worker.platforms.base import Platform

GIB = 1 << 30


def offload_bytes(config: Config, platform: Platform) -> int:
    """RAM of all ranks of an engine for blocks that leave its pool: as asked, or on CUDA a quarter of what is free.
    Raises ValueError if less is free.
    """
    asked, engines = config.cache.kv_offload_gib, config.parallel.data_parallel_size
    if not config.cache.enable_prefix_caching or asked == 0 or (asked is None and platform.device.type != "cuda"):
        return 0
    free = platform.free_ram()
    if asked is None:
        return free // 4 // engines
    if asked * GIB * engines > free:
        wanted, found = format_each(int(asked * GIB * engines), free)
        most = free * 1000 // (GIB * engines) / 1000  # rounded down: a value that is accepted
        raise ValueError(
            f"--kv-offload-gib {asked:g}{f' for each of {engines} engines' if engines > 1 else ''}: {wanted} are more "
            f"than the {found} of RAM that are free, less what other servers on this machine planned: set it to at "
            f"most {most:g}"
        )
    return int(asked * GIB)


def disk_bytes(config: Config) -> int:
    """The limit of the files, 0 without a folder for them."""
    return max(int(config.cache.kv_disk_gib * GIB), 1) if config.cache.kv_disk else 0
