"""All-reduces of few bytes in one launch: every rank reads the others' numbers over NVLink from symmetric memory and
sums them in the order of the ranks, so that all have the same bits (`torch.distributed._symmetric_memory`).

NCCL is faster for many bytes, of which every rank would read all. Multicast is not needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

_MOST = 2 << 20  # bytes that all ranks together read from one rank
_TYPES = (torch.bfloat16, torch.float32)  # dtypes that torch sums
_ALIGNED = 16


class Library(Protocol):
    """The part of torch that `OneShot` uses; tests replace it."""

    def empty(self, num_bytes: int, device: torch.device) -> torch.Tensor: ...

    def rendezvous(self, buffer: torch.Tensor, group: Any) -> None: ...

    def all_reduce(self, buffer: torch.Tensor, x: torch.Tensor, group: Any) -> torch.Tensor: ...


class TorchLibrary:
    """Symmetric memory of torch. Raises ImportError or AttributeError where this torch has none."""

    def __init__(self) -> None:
        from torch.distributed import _symmetric_memory

        self._memory, self._sum = _symmetric_memory, torch.ops.symm_mem.one_shot_all_reduce_copy

    def empty(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        return self._memory.empty(num_bytes, dtype=torch.uint8, device=device)

    def rendezvous(self, buffer: torch.Tensor, group: Any) -> None:
        self._memory.rendezvous(buffer, group.group_name)

    def all_reduce(self, buffer: torch.Tensor, x: torch.Tensor, group: Any) -> torch.Tensor:
        return self._sum(buffer, x, "sum", group.group_name)


def obstacle(ranks: Sequence[int], device: torch.device) -> str | None:
    """Return why the devices of `ranks`, of which `device` is one, share no memory, or None. Asked before any rank
    waits for another.
    """
    if device.type != "cuda" or torch.version.cuda is None:
        return "needs NVIDIA GPUs"
    if max(ranks) >= torch.cuda.device_count():
        return "the ranks are on several hosts"
    others = [rank for rank in ranks if rank != device.index]
    if not all(torch.cuda.can_device_access_peer(device.index, other) for other in others):
        return "the GPUs cannot read each other's memory"
    return None


class OneShot:
    """The all-reduces of a group of `size` ranks whose tensors are small. Raises whatever torch raises where the ranks
    cannot share memory.
    """

    def __init__(self, group: Any, size: int, device: torch.device, library: Library | None = None) -> None:
        self._library, self._group, self.most = library or TorchLibrary(), group, _MOST // size
        self._buffer = self._library.empty(self.most, device)
        self._library.rendezvous(self._buffer, group)

    def takes(self, x: torch.Tensor) -> bool:
        """Return whether to sum x here: the same on all ranks, whose tensors agree in shape and dtype."""
        fits = 0 < x.nbytes <= self.most and x.nbytes % _ALIGNED == 0
        return fits and x.dtype in _TYPES and x.is_contiguous()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks, a new tensor."""
        return self._library.all_reduce(self._buffer.view(x.dtype)[: x.numel()], x.view(-1), self._group).view(x.shape)
