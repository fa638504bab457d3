"""The host CPU as a device."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from quire.configs.config import Config
from quire.worker.cpu import batch_invariance
from quire.worker.cpu import install as native
from quire.worker.cpu.fixed_order_linear import fix_order
from quire.worker.host import resources as host
from quire.worker.platforms.base import TORCH, Event, Platform
from quire.worker.platforms.ops import Ops
from quire.worker.spec.model import ModelSpec

logger = logging.getLogger(__name__)

LONG_IDLE = 1800.0  # seconds without a request after which the KV cache's memory is given back
_SAMPLED_PER_THREAD = 1 << 18  # logits: they stay in a core's cache
SCARCE = 0.1  # share of the machine's memory; if less is available, engines give theirs back at once


class CpuPlatform(Platform):
    """The host CPU. Copies are immediate: results are available when `execute` returns."""

    name = "cpu"
    device = torch.device("cpu")
    dist_backend = "gloo"
    attention_order = ("cpu_native", "cpu_paged")
    fixed_attention = "cpu_fixed"
    default_depth = 1
    overlaps = False
    encoder_budget = 256  # some tenths of a second to some seconds of encoding, for which other requests wait
    measures_memory = False
    shares_ram = True
    sums_by_row = True  # torch splits a sum over its threads differently for one row and for several

    def memory(self, world_size: int = 1) -> tuple[int, int]:
        return host.memory()[0] // world_size, self.free_ram() // world_size

    def wants_memory_back(self, idle: float) -> bool:
        return idle >= LONG_IDLE or self.memory_short() > 0

    def memory_short(self) -> int:
        total, available = host.memory()
        return int(SCARCE * total) - available

    def default_limits(self, world_size: int) -> tuple[int, int, str]:
        return 128 * world_size, 2048 * world_size, "default on CPU"

    def resolve_dtype(self, requested: str, model_dtype: str) -> tuple[torch.dtype, str]:
        dtype, reason = super().resolve_dtype(requested, model_dtype)
        if dtype == torch.float16:
            return (
                torch.bfloat16,
                "float16 is slow and overflows easily on CPU; bfloat16 has its size and float32's range",
            )
        return dtype, reason

    def prefers_bfloat16(self) -> bool:
        return native.level()[0] != "none" and not native.warning()

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
        threads, reason = _num_threads(num_threads, world_size, num_frontends)
        native.set_threads(threads)
        native.load(not wait_for_kernels, cpu_level, cpu_activation_bits, preview)
        return [
            ("num_threads", str(threads), reason),
            ("cpu_level", *native.level()),
            ("cpu_activation_bits", *native.activation_bits()),
            ("kernels", self.ops.name, native.status()),
        ]

    @contextmanager
    def one_thread(self) -> Iterator[None]:
        threads = torch.get_num_threads()
        native.set_threads(1)
        try:
            yield
        finally:
            native.set_threads(threads)

    @property
    def ops(self) -> Ops:
        """Return the native kernels once they are loaded, plain torch until then."""
        return native.native_ops() or TORCH

    def batch_invariance(self, config: Config, spec: ModelSpec, dtype: torch.dtype) -> tuple[bool, str]:
        return batch_invariance.resolve(config, spec, dtype)

    def fix_order(self, model: nn.Module) -> None:
        fix_order(model)

    @property
    def sampled_at_once(self) -> int:
        return _SAMPLED_PER_THREAD * torch.get_num_threads()

    def poll_ops(self) -> bool:
        return native.building() and native.poll()

    def awaits_ops(self) -> bool:
        return native.building()

    def give_up_ops(self, reason: str) -> None:
        native.give_up(reason)

    def ops_status(self) -> str:
        return native.status()

    def ops_warning(self) -> str:
        return native.warning()

    def ops_since(self) -> float | None:
        return native.loaded_at()

    def to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def event(self) -> Event:
        return _PASSED

    def synchronize(self) -> None:
        pass

    def release_memory(self) -> None:
        pass


_PASSED = Event()


def _num_threads(requested: int | None, world_size: int, num_frontends: int = 1) -> tuple[int, str]:
    """Return (number of threads per rank, reason). Several frontends are busy and get one core each; a single frontend
    works while the ranks are idle between steps.
    """
    if requested:
        return requested, "as requested"
    if (variable := os.environ.get("OMP_NUM_THREADS", "")).isdigit():
        return max(int(variable), 1), "OMP_NUM_THREADS"
    reserved = num_frontends if num_frontends > 1 else 0
    shared = (f", minus {reserved} for the frontends" if reserved else "") + (
        f", shared by {world_size} ranks" if world_size > 1 else ""
    )
    return max((host.num_cores() - reserved) // world_size, 1), "cores available to this process" + shared
