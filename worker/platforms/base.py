"""The device behind the worker: what differs between CPU and CUDA, and nothing else does.

A platform says which device this rank drives, how much memory and how many cores there are, which defaults fit it, and
how bytes cross between host and device without making either wait.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch

from quire.configs.config import Config
from quire.worker.models.config import ModelSpec
from quire.worker.platforms.ops import Ops

TORCH = Ops()
_OUT_OF_MEMORY = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDA error: out of memory")  # the latter of pinned memory, too

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Platform(ABC):
    """One rank's device. Create it with `get_platform`."""

    name: str
    device: torch.device
    dist_backend: str
    attention_order: tuple[str, ...]  # names in worker/attention, the best first
    default_depth: int  # steps in flight
    has_graphs = False  # can record a forward pass and replay it
    ops: Ops = TORCH  # plain torch, unless the platform has faster ones
    measures_memory: bool  # whether `memory_in_use` knows the largest amount so far

    @abstractmethod
    def memory(self, world_size: int = 1) -> tuple[int, int]:
        """(total, available) bytes now for one of `world_size` ranks on this host; on a GPU what this process has taken
        already counts as available to it.
        """

    @abstractmethod
    def default_limits(self, world_size: int) -> tuple[int, int, str]:
        """(max_num_seqs, max_num_batched_tokens, why) for this device."""

    def resolve_dtype(self, requested: str, model_dtype: str) -> tuple[torch.dtype, str]:
        """The dtype to run in, and why. `requested` is a name of DTYPES or auto. Raises ValueError for another name."""
        name = model_dtype if requested == "auto" else requested
        if name not in DTYPES:
            raise ValueError(f"dtype {name!r} is not supported: set --dtype to one of auto, {', '.join(DTYPES)}")
        return DTYPES[name], "the checkpoint's own" if requested == "auto" else "as asked"

    @abstractmethod
    def start(
        self,
        num_threads: int | None,
        world_size: int,
        wait_for_kernels: bool = False,
        num_frontends: int = 1,
        cpu_level: str = "auto",
    ) -> list[tuple[str, str, str]]:
        """Make the device ready for this process. Returns (setting, value, reason) of what was chosen.

        `world_size` ranks and `num_frontends` frontend processes share the machine. `wait_for_kernels` compiles missing
        native kernels first, instead of in the background. `cpu_level` is their instruction set. Raises ValueError if
        that fails, or if the CPU lacks it.
        """

    def batch_invariance(self, config: Config, spec: ModelSpec, dtype: torch.dtype) -> tuple[bool, str]:
        """(whether a request's bits are independent of the other requests of a step, why and at what cost).

        Raises ValueError where `--deterministic` is given and this model or device has no such way.
        """
        if config.device.deterministic:
            raise ValueError(f"--deterministic is not supported on {self.name} yet: leave it off, or set --device cpu")
        return (
            False,
            f"not supported on {self.name} yet: seeded and greedy tokens may depend on what runs in the same step",
        )

    def poll_ops(self) -> bool:
        """True exactly once after faster operations have become available while serving."""
        return False

    def awaits_ops(self) -> bool:
        """Whether faster operations may still become available."""
        return False

    def give_up_ops(self, reason: str) -> None:  # noqa: B027
        """Stay with plain torch in this process, for `reason`.

        Does nothing where all ranks have the same operations anyway.
        """

    def ops_status(self) -> str:
        """Where the faster operations stand, for the log."""
        return self.ops.name

    @abstractmethod
    def to_device(self, array: np.ndarray) -> torch.Tensor:
        """Copy to the device, ordered before the work enqueued next; the host does not wait for the device."""

    @abstractmethod
    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Start copying to the host. The result may be read once an `event()` taken later has passed."""

    @abstractmethod
    def event(self) -> Event:
        """Passes when everything started so far by `to_host` has arrived; if that is nothing since the last one, when
        all work so far is done.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for the device."""

    @abstractmethod
    def release_memory(self) -> None:
        """Give back to the device what is kept for reuse; waits for it."""


class Event:
    """What has passed already. CUDA's events have the same two methods."""

    def synchronize(self) -> None:
        """Wait until it has passed."""

    def query(self) -> bool:
        """Whether it has passed."""
        return True


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an error means that the device had no memory left, and nothing else is wrong: what failed may be tried
    again with less.

    Not so NCCL's errors of this kind, after which its communicator is of no use.
    """
    return isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in _OUT_OF_MEMORY)
