"""The ranks of an engine at its start: where they are, and the numbers on which they agree."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
import torch.distributed as dist

from quire.configs.config import Config
from quire.worker.parallel import init_distributed, tp
from quire.worker.platforms.base import Platform

logger = logging.getLogger(__name__)


class Ranks:
    """All ranks of an engine on this machine, planned by one process that starts none of them: `quire check`."""

    def __init__(self, config: Config):
        parallel = config.parallel
        self.number, self.size = 0, parallel.world_size
        self.local_size = self.size  # ranks on this machine
        # GPUs that must exist; Ray gives each rank one of its own
        self.devices: Sequence[int] = (0,) if parallel.distributed_executor_backend == "ray" else range(self.size)

    def join(self, platform: Platform) -> None:
        """Join the process groups, and agree with the other ranks on the operations to use."""

    def minimum(self, numbers: list[int]) -> list[int]:
        """Return the least of each number over all ranks, which call this in the same order."""
        return numbers


class JoinedRanks(Ranks):
    """The ranks as one of them sees them, which runs the model with the others."""

    def __init__(self, config: Config, number: int, size: int, init_method: str, device: int, local_size: int):
        super().__init__(config)
        self.number, self.size, self.local_size, self.devices = number, size, local_size, (device,)
        self._parallel, self._init_method = config.parallel, init_method
        self._device = torch.device("cpu")

    def join(self, platform: Platform) -> None:
        self._device = platform.device
        init_distributed(
            self.number,
            self.size,
            self._init_method,
            tp_size=self._parallel.tensor_parallel_size,
            pp_size=self._parallel.pipeline_parallel_size,
            backend=platform.dist_backend,
            expert_parallel=self._parallel.enable_expert_parallel,
        )
        if (group := tp()).size > 1 and (reason := platform.share_memory(group)) != "" and group.rank == 0:
            logger.info("all-reduces of small tensors: %s", f"NCCL, {reason}" if reason else "symmetric memory")
        # ranks repeat parts of each other's work and must get the same results
        if self.size > 1 and not self.minimum([int(platform.ops.name != "torch")])[0]:
            platform.give_up_ops("not all ranks had them at start")

    def minimum(self, numbers: list[int]) -> list[int]:
        if self.size == 1 or not numbers:
            return numbers
        least = torch.tensor(numbers, device=self._device)
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        return least.tolist()
