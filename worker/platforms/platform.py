"""The device behind the worker: what differs between CPU and CUDA, and nothing else does.

A platform says which device this rank drives, how much memory and how many cores there are, which defaults fit it, and how bytes cross
between host and device without making either wait.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod

import numpy as np
import torch

from quire.worker.cpu.build import BuildError
from quire.worker.cpu.native import KERNELS
from quire.worker.platforms import host

_OUT_OF_MEMORY = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDA error: out of memory")  # the latter of pinned memory, too
_CORES_PER_RANK = 4  # below, a core that spins while it waits for the device is missed elsewhere

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Platform(ABC):
    """One rank's device. Create it with `get_platform`."""

    name: str
    device: torch.device
    dist_backend: str
    attention_order: tuple[str, ...]  # names in worker/attention, the best first
    default_depth: int  # steps in flight
    has_graphs = False  # can record a forward pass and replay it
    measures_memory: bool  # whether `memory_in_use` knows the largest amount so far

    @abstractmethod
    def memory(self, world_size: int = 1) -> tuple[int, int]:
        """(total, available) bytes now for one of `world_size` ranks on this host; on a GPU what this process has taken already counts as available to it."""

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
    def start(self, num_threads: int | None, world_size: int, wait_for_kernels: bool = False, num_frontends: int = 1) -> list[tuple[str, str, str]]:
        """Make the device ready for this process. Returns (setting, value, reason) of what was chosen.

        `world_size` ranks and `num_frontends` frontend processes share the machine. `wait_for_kernels` compiles missing native kernels first, instead of in the background. Raises ValueError when that fails.
        """

    @abstractmethod
    def to_device(self, array: np.ndarray) -> torch.Tensor:
        """Copy to the device, ordered before the work enqueued next; the host does not wait for the device."""

    @abstractmethod
    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Start copying to the host. The result may be read once an `event()` taken later has passed."""

    @abstractmethod
    def event(self) -> Event:
        """Passes when everything started so far by `to_host` has arrived; if that is nothing since the last one, when all work so far is done."""

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


class CpuPlatform(Platform):
    """The host itself: every copy is immediate, so results are there when `execute` returns."""

    name = "cpu"
    device = torch.device("cpu")
    dist_backend = "gloo"
    attention_order = ("cpu_native", "cpu_paged")
    default_depth = 1
    measures_memory = False

    def memory(self, world_size: int = 1) -> tuple[int, int]:
        total, available = host.memory()
        return total // world_size, available // world_size

    def default_limits(self, world_size: int) -> tuple[int, int, str]:
        return 128 * world_size, 2048 * world_size, "default on CPU"

    def resolve_dtype(self, requested: str, model_dtype: str) -> tuple[torch.dtype, str]:
        dtype, reason = super().resolve_dtype(requested, model_dtype)
        if dtype == torch.float16:
            return torch.bfloat16, "float16 is slow and overflows easily on CPU; bfloat16 has its size and float32's range"
        return dtype, reason

    def start(self, num_threads: int | None, world_size: int, wait_for_kernels: bool = False, num_frontends: int = 1) -> list[tuple[str, str, str]]:
        threads, reason = _num_threads(num_threads, world_size, num_frontends)
        torch.set_num_threads(threads)
        try:
            KERNELS.load(background=not wait_for_kernels)
        except BuildError as error:
            raise ValueError(f"the native CPU kernels are needed and cannot be compiled: {error}") from error
        return [("num_threads", str(threads), reason), ("kernels", "native" if KERNELS.lib else "torch", KERNELS.status)]

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


def _num_threads(asked: int | None, world_size: int, num_frontends: int = 1) -> tuple[int, str]:
    """Several frontends are there because they are busy, and get a core each; the only one works while the ranks rest between steps."""
    if asked:
        return asked, "as asked"
    if (variable := os.environ.get("OMP_NUM_THREADS", "")).isdigit():
        return max(int(variable), 1), "OMP_NUM_THREADS"
    reserved = num_frontends if num_frontends > 1 else 0
    shared = (f", less {reserved} for the frontends" if reserved else "") + (f", shared by {world_size} ranks" if world_size > 1 else "")
    return max((host.num_cores() - reserved) // world_size, 1), "the cores this process may use" + shared


class CudaPlatform(Platform):
    """One NVIDIA GPU. Results travel on a stream of their own, so that the next step's kernels do not queue behind them."""

    name = "cuda"
    dist_backend = "nccl"
    attention_order = ("flash_attn_3", "flash_attn_2", "torch_varlen", "triton_paged", "cpu_paged")
    default_depth = 2
    has_graphs = True
    measures_memory = True

    def __init__(self, rank: int) -> None:
        self.device = torch.device("cuda", rank)

    def memory(self, world_size: int = 1) -> tuple[int, int]:
        # What torch holds is ours; whatever else is not free belongs to other processes, or to libraries, and cannot be had.
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

    def start(self, num_threads: int | None, world_size: int, wait_for_kernels: bool = False, num_frontends: int = 1) -> list[tuple[str, str, str]]:
        torch.cuda.set_device(self.device)
        self._blocking = host.num_cores() < _CORES_PER_RANK * world_size + num_frontends
        self._copies = torch.cuda.Stream(self.device)
        self._copying = False
        return [("device", str(self.device), torch.cuda.get_device_name(self.device))]

    def memory_in_use(self) -> tuple[int, int]:
        """(bytes now, most bytes so far) that torch has taken from the device; `release_memory` starts the latter anew."""
        torch.cuda.synchronize(self.device)
        return torch.cuda.memory_allocated(self.device), torch.cuda.max_memory_reserved(self.device)

    def release_memory(self) -> None:
        """Give back to the device what torch keeps for reuse."""
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)

    def to_device(self, array: np.ndarray) -> torch.Tensor:
        # The caching host allocator takes the pinned block back only when this copy has run: it is the ring of buffers that steps in flight need.
        return torch.from_numpy(array).pin_memory().to(self.device, non_blocking=True)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        result = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._copying = True
        self._copies.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._copies):
            result.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._copies)  # its memory is not reused by the main stream before the copy has run
        return result

    def event(self) -> Event:
        event = torch.cuda.Event(blocking=self._blocking)
        event.record(self._copies if self._copying else torch.cuda.current_stream(self.device))
        self._copying = False
        return event

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an error means that the device had no memory left, and nothing else is wrong: what failed may be tried
    again with less.

    Not so NCCL's errors of this kind, after which its communicator is of no use.
    """
    return isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in _OUT_OF_MEMORY)


def get_platform(device: str, rank: int = 0) -> Platform:
    """The platform for `--device` auto, cpu or cuda. Raises ValueError when the device is not there."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        return CpuPlatform()
    if device != "cuda":
        raise ValueError(f"--device {device!r} is not supported: set it to auto, cpu or cuda")
    if not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no CUDA device; set --device cpu, or check the driver and that torch is a CUDA build")
    if rank >= torch.cuda.device_count():
        raise ValueError(f"rank {rank} has no GPU: torch sees {torch.cuda.device_count()}; lower --tensor-parallel-size")
    return CudaPlatform(rank)
