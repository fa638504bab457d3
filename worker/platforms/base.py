"""The device of a worker: everything that differs between CPU and CUDA.

A platform provides the device that this rank drives, its memory and cores, default limits, and asynchronous copies
between host and device.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property

import numpy as np
import torch
from torch import nn

from quire.configs.config import Config
from quire.worker.host import resources as host
from quire.worker.parallel import ProcessGroup
from quire.worker.platforms.ops import Ops
from quire.worker.platforms.promises import Promises
from quire.worker.spec.model import ModelSpec

logger = logging.getLogger(__name__)

TORCH = Ops()
_OUT_OF_MEMORY = (
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",  # also for pinned memory
    "DefaultCPUAllocator: can't allocate memory",
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Platform(ABC):
    """One rank's device. Create it with `get_platform`."""

    name: str
    device: torch.device
    dist_backend: str
    attention_order: tuple[str, ...]  # names of attention backends, best first
    fixed_attention: str  # the one whose sums have one order
    default_depth: int  # steps in flight
    encoder_budget: int | None = None  # embeddings of images that a step computes at most; None: as many as tokens
    overlaps = True  # a step runs on after `execute` has returned, while the host prepares the next one
    has_graphs = False  # can record a forward pass and replay it
    compiles_at_use = False  # kernels are compiled or loaded when a step first needs them
    ops: Ops = TORCH  # plain torch, unless the platform has faster operations
    measures_memory: bool  # whether `memory_in_use` reports the peak
    shares_ram = False  # the device's memory is the machine's RAM, which other programs use, too
    sums_by_row = False  # sums over several rows at once have other bits than those over one
    sampled_at_once = 1 << 24  # logits that the sampler handles at once: a bounded share of the memory

    @abstractmethod
    def memory(self, world_size: int = 1) -> tuple[int, int]:
        """Return the current (total, available) bytes for one of `world_size` ranks on this host. On a GPU, memory held
        by this process counts as available.
        """

    @abstractmethod
    def default_limits(self, world_size: int) -> tuple[int, int, str]:
        """Return (max_num_seqs, max_num_batched_tokens, reason) for this device."""

    def resolve_dtype(self, requested: str, model_dtype: str) -> tuple[torch.dtype, str]:
        """Return the dtype to run in, and the reason. `requested` is a key of DTYPES or auto. Raises ValueError for
        another name.
        """
        name = model_dtype if requested == "auto" else requested
        if name not in DTYPES:
            raise ValueError(f"dtype {name!r} is not supported: set --dtype to one of auto, {', '.join(DTYPES)}")
        return DTYPES[name], "dtype of the checkpoint" if requested == "auto" else "as requested"

    def prefers_bfloat16(self) -> bool:
        """Return whether encoders in float32 are better computed in bfloat16, where their embeddings allow it."""
        return False

    @abstractmethod
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
        """Initialize the device for this process. Returns (setting, value, reason) of automatic choices.

        `world_size` ranks and `num_frontends` frontend processes share the machine. `wait_for_kernels` compiles missing
        native kernels first, instead of in the background. `cpu_level` is their instruction set, `cpu_activation_bits`
        the precision of activations in their products with quantized weights. A `preview` compiles nothing. Raises
        ValueError if the compilation fails, or if the CPU lacks the instruction set.
        """

    def one_thread(self) -> AbstractContextManager[None]:
        """Return a context in which operations on the host use the calling thread alone."""
        return nullcontext()

    def batch_invariance(self, config: Config, spec: ModelSpec, dtype: torch.dtype) -> tuple[bool, str]:
        """Return (whether a request's bits are independent of the other requests of a step, reason and cost).

        Raises ValueError if `--deterministic` is set and this model or device does not support it.
        """
        if config.device.deterministic:
            raise ValueError(f"--deterministic is not supported on {self.name} yet: omit it, or set --device cpu")
        return (
            False,
            f"not supported on {self.name} yet: seeded and greedy tokens may depend on the other requests of a step",
        )

    def fix_order(self, model: nn.Module) -> None:
        """Make the rows of each linear layer of `model` independent of each other. Weights must be loaded and packed.
        Called only where `batch_invariance` holds.
        """
        raise NotImplementedError(f"{self.name} has no products in a fixed order")

    def poll_ops(self) -> bool:
        """Return True exactly once after faster operations became available while serving."""
        return False

    def awaits_ops(self) -> bool:
        """Return whether faster operations may still become available."""
        return False

    def give_up_ops(self, reason: str) -> None:  # noqa: B027
        """Use plain torch in this process from now on, for `reason`.

        A no-op on platforms where all ranks always have the same operations.
        """

    @cached_property
    def _promises(self) -> Promises:
        return Promises()

    def free_ram(self) -> int:
        """Return bytes of RAM that are free and that no other server on this machine has planned for."""
        return max(host.memory()[1] - self._promises.unfilled(), 0)

    def promise_ram(self, size: int) -> None:
        """Let servers that start on this machine know that this process will use `size` bytes of RAM in total."""
        try:
            self._promises.make(size)
        except OSError as error:
            logger.warning("servers started on this machine will not know our memory plan: %s", error)

    def wants_memory_back(self, idle: float) -> bool:
        """Return whether the KV cache's memory should be given back, after `idle` seconds without a request."""
        return False

    def memory_short(self) -> int:
        """Return the bytes that this process should release to the machine; if negative, those that it may still take.
        """
        return 0

    def share_memory(self, group: ProcessGroup) -> str | None:
        """Let the ranks of `group` sum small tensors by reading each other's memory. Returns why they do not, "" where
        a platform never does. All ranks of the group call it together.
        """
        return ""

    def ops_warning(self) -> str:
        """Return why faster operations will never be available, with the slowdown and the remedy, or ""."""
        return ""

    def ops_since(self) -> float | None:
        """Return when the faster operations were loaded, by time.time()."""
        return None

    def ops_status(self) -> str:
        """Return the state of the faster operations, for the log."""
        return self.ops.name

    @abstractmethod
    def to_device(self, array: np.ndarray) -> torch.Tensor:
        """Copy to the device, ordered before later work. The host does not wait for the device."""

    @abstractmethod
    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Start a copy to the host. The result may be read after an `event()` created later has passed."""

    @abstractmethod
    def event(self) -> Event:
        """Return an event that passes when all copies started so far by `to_host` have arrived, or, if none was started
        since the last event, when all work so far is done.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for the device."""

    @abstractmethod
    def release_memory(self) -> None:
        """Return cached memory to the device; waits for the device."""


class Event:
    """An event that has passed already, with the two methods of CUDA events."""

    def synchronize(self) -> None:
        """Wait until it has passed."""

    def query(self) -> bool:
        """Return whether it has passed."""
        return True


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether an error means only that the device ran out of memory, so that a retry with less may succeed.

    NCCL's out-of-memory errors do not count: after them its communicator is unusable.
    """
    return isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in _OUT_OF_MEMORY)
