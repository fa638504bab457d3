"""NVIDIA GPUs."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from quire.configs.config import Config
from quire.worker.cuda import fixed_order, one_shot
from quire.worker.cuda import install as triton
from quire.worker.host import resources as host
from quire.worker.host import torch_start
from quire.worker.parallel import ProcessGroup
from quire.worker.platforms.base import TORCH, Event, Platform
from quire.worker.platforms.ops import Ops
from quire.worker.spec.model import ModelSpec

_LATENT = ("flash_mla", "flash_attn_3_mla")  # attention backends of models with latent attention
_CORES_PER_RANK = 4  # with fewer cores, spinning while waiting for the device would take a core that others need


class CudaPlatform(Platform):
    """One NVIDIA GPU.

    Results are copied on a separate stream, so that they do not queue behind the next step's kernels.
    """

    name = "cuda"
    dist_backend = "nccl"
    attention_order = (
        *("flash_attn_3", "flash_attn_4", "flash_attn_2", "torch_varlen", *_LATENT),
        *("triton_paged", "cpu_paged"),
    )
    fixed_attention = fixed_order.BACKEND
    default_depth = 2
    has_graphs = compiles_at_use = True
    measures_memory = True

    def __init__(self, rank: int) -> None:
        torch_start.complete()  # Triton's and other packages' operations look for it
        self.device = torch.device("cuda", rank)

    def memory(self, world_size: int = 1) -> tuple[int, int]:
        # Memory held by torch is available to this process; other used memory belongs to other processes or to
        # libraries.
        free, total = torch.cuda.mem_get_info(self.device)
        return total, free + torch.cuda.memory_reserved(self.device)

    def default_limits(self, world_size: int) -> tuple[int, int, str]:
        total, _ = self.memory()
        gib = total / 2**30
        if gib >= 160:
            return 1024, 16384, f"default for a GPU of {gib:.0f} GiB"
        if gib >= 70:
            return 1024, 8192, f"default for a GPU of {gib:.0f} GiB"
        return 256, 2048, f"default for a GPU of {gib:.0f} GiB"

    def start(
        self,
        num_threads: int | None,
        world_size: int,
        wait_for_kernels: bool = False,
        num_frontends: int = 1,
        cpu_level: str = "auto",
        cpu_activation_bits: str = "auto",
        preview: bool = False,
    ) -> list[tuple[str, str, str]]:
        triton.keep_compiled()
        torch.cuda.set_device(self.device)
        self._blocking = host.num_cores() < _CORES_PER_RANK * world_size + num_frontends
        self._copies = torch.cuda.Stream(self.device)
        self._copying = False
        return [("device", str(self.device), torch.cuda.get_device_name(self.device))]

    @property
    def ops(self) -> Ops:
        """Return the Triton kernels if they work on this device, else plain torch."""
        return triton.triton_ops(self.device) or TORCH

    def batch_invariance(self, config: Config, spec: ModelSpec, dtype: torch.dtype) -> tuple[bool, str]:
        return fixed_order.resolve(config, spec, self.ops)

    def fix_order(self, model: nn.Module) -> None:
        fixed_order.fix_order(model)

    def share_memory(self, group: ProcessGroup) -> str | None:
        obstacle = one_shot.obstacle(group.ranks, self.device)
        return group.use_small_sums(self.device, obstacle, lambda of: one_shot.OneShot(of, group.size, self.device))

    def memory_in_use(self) -> tuple[int, int]:
        """Return (bytes now, peak bytes) that torch has allocated on the device; `release_memory` resets the peak."""
        torch.cuda.synchronize(self.device)
        return torch.cuda.memory_allocated(self.device), torch.cuda.max_memory_reserved(self.device)

    def release_memory(self) -> None:
        """Return memory that torch caches to the device, and reset the peak."""
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)

    def to_device(self, array: np.ndarray) -> torch.Tensor:
        # The caching host allocator reuses the pinned block only after this copy has run, so it serves as the ring of
        # buffers that steps in flight need.
        return torch.from_numpy(array).pin_memory().to(self.device, non_blocking=True)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        result = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._copying = True
        self._copies.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._copies):
            result.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._copies)  # the main stream must not reuse its memory before the copy has run
        return result

    def event(self) -> Event:
        event = torch.cuda.Event(blocking=self._blocking)
        event.record(self._copies if self._copying else torch.cuda.current_stream(self.device))
        self._copying = False
        return event

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)
