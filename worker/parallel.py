"""Process groups. A layer gets its group from `tp()` when it is built and keeps it. The default is one rank, so that
layers build in a bare Python prompt.

Ranks are numbered `pp_rank * tp_size + tp_rank`: the ranks of one tensor-parallel group are consecutive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist

from quire.checkpoints.ranks import share

Exchange = tuple[tuple[int, ...], torch.dtype | None]  # shape and dtype of an all-reduce; None for the model's dtype

# name since torch 2.13, then the older one; None in a build without distributed
_all_gather = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)


class Group:
    """`size` ranks that communicate. This class is a group of one rank, which needs no communication, and the base of
    the others.
    """

    rank = 0
    size = 1
    num_exchanges = 0  # number of all-reduces and all-gathers of this rank

    def fix_order(self) -> None:
        """Add the ranks' parts in rank order in later all-reduces, whatever their size."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks, of the same shape. May overwrite x."""
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Return the ranks' tensors, all of the same shape, concatenated along `dim` in rank order."""
        return x

    def broadcast(self, x: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Return rank `src`'s tensor, written into x on the other ranks."""
        return x

    def send(self, x: torch.Tensor, dst: int) -> Any:
        """Start sending a contiguous x. x must not change until the returned handle's `wait()` returns. Messages arrive
        in order.
        """
        raise AssertionError("a group of one rank cannot send")

    def receive(self, x: torch.Tensor, src: int) -> torch.Tensor:
        """Receive the next tensor from rank `src`, of x's shape and dtype, into x."""
        raise AssertionError("a group of one rank cannot receive")

    def twin(self) -> Group:
        """Return a group of the same ranks over separate connections, for messages that must not queue behind this
        group's.

        All ranks of the group must call it together.
        """
        return self


class SmallSums(Protocol):
    """A faster all-reduce of small tensors."""

    def takes(self, x: torch.Tensor) -> bool:
        """Return whether `all_reduce` takes x. Depends only on shape and dtype, so that all ranks decide alike."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks."""


class ProcessGroup(Group):
    """A group of processes over torch.distributed. `ranks` are global ranks, in group order."""

    def __init__(self, ranks: list[int], backend: str):
        self.ranks, self.size, self._backend = ranks, len(ranks), backend
        self.rank = ranks.index(dist.get_rank())
        self._group = dist.new_group(ranks, backend=backend, use_local_synchronization=True)
        self._small: SmallSums | None = None
        self._fixed_order = False

    def use_small_sums(
        self, device: torch.device, obstacle: str | None, make: Callable[[Any], SmallSums]
    ) -> str | None:
        """Sum small tensors with the result of `make` for the process group. Returns None, or why not: `obstacle`, or
        an error, of this or another rank. All ranks of the group must call it together.

        The ranks vote before `make`, in which they wait for each other, and after it: a rank that sums in another way
        than the others would wait forever.
        """
        if not self._all_say(obstacle is None, device):
            return obstacle or "another rank cannot"
        small, error = None, None
        try:
            small = make(self._group)
        except Exception as failed:  # raised by torch, its extensions or the driver: sum as before
            error = f"{type(failed).__name__}: {failed}"
        if not self._all_say(error is None, device):
            return error or "another rank cannot"
        self._small = small
        return None

    def _all_say(self, yes: bool, device: torch.device) -> bool:
        votes = torch.tensor([int(yes)], device=device)
        dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=self._group)
        return bool(votes.item())

    def fix_order(self) -> None:
        self._fixed_order = True

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.num_exchanges += 1
        if self._fixed_order and x.is_floating_point():
            return self._sum_in_order(x)
        if self._small is not None and self._small.takes(x):
            return self._small.all_reduce(x)
        dist.all_reduce(x, group=self._group)
        return x

    def _sum_in_order(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum, added in rank order: a library would choose the order by the size of x."""
        gathered = torch.empty(self.size, x.numel(), dtype=x.dtype, device=x.device)
        _all_gather(gathered.view(-1), x.reshape(-1), group=self._group)
        total = gathered[0].float()
        for part in gathered[1:]:
            total = total + part.float()
        return total.to(x.dtype).view(x.shape)

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        gathered = torch.empty(self.size, *x.shape, dtype=x.dtype, device=x.device)
        _all_gather(gathered.view(self.size * x.shape[0], *x.shape[1:]), x.contiguous(), group=self._group)
        self.num_exchanges += 1
        return torch.cat(gathered.unbind(0), dim)

    def broadcast(self, x: torch.Tensor, src: int = 0) -> torch.Tensor:
        dist.broadcast(x, src=self.ranks[src], group=self._group)
        return x

    def send(self, x: torch.Tensor, dst: int) -> Any:
        return dist.isend(x, self.ranks[dst], group=self._group)

    def receive(self, x: torch.Tensor, src: int) -> torch.Tensor:
        dist.recv(x, self.ranks[src], group=self._group)
        return x

    def twin(self) -> Group:
        return ProcessGroup(self.ranks, self._backend)


_tp: Group = Group()
_pp: Group = Group()
_ep: Group = Group()


def tp() -> Group:
    """Return the tensor-parallel group of this rank: the ranks that share every layer."""
    return _tp


def pp() -> Group:
    """Return the pipeline group of this rank: one rank per stage."""
    return _pp


def ep() -> Group:
    """Return the ranks over which the experts of a layer are divided: those of `tp()`, or this rank alone if every
    expert is split over them.
    """
    return _ep


def init_distributed(
    rank: int,
    world_size: int,
    init_method: str,
    *,
    tp_size: int,
    pp_size: int = 1,
    backend: str = "gloo",
    expert_parallel: bool = False,
) -> None:
    """Join `world_size` processes (e.g. `init_method="tcp://127.0.0.1:PORT"` or `"file:///PATH"`) and set the groups
    that `tp()`, `pp()` and `ep()` return.

    Raises:
        ValueError: the product of the sizes is not `world_size`.
    """
    global _tp, _pp, _ep
    if tp_size * pp_size != world_size:
        raise ValueError(
            f"tensor_parallel_size {tp_size} x pipeline_parallel_size {pp_size} is not the number of processes, "
            f"{world_size}"
        )
    if world_size == 1:
        return
    dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world_size)
    pp_rank, tp_rank = divmod(rank, tp_size)
    if tp_size > 1:
        _tp = ProcessGroup([pp_rank * tp_size + r for r in range(tp_size)], backend)
        _ep = _tp if expert_parallel else _ep
    if pp_size > 1:
        _pp = ProcessGroup([r * tp_size + tp_rank for r in range(pp_size)], backend)


def shutdown_distributed() -> None:
    """Destroy the groups. Does nothing if there are none."""
    global _tp, _pp, _ep
    _tp, _pp, _ep = Group(), Group(), Group()
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def use_groups(tp: Group | None = None, pp: Group | None = None, ep: Group | None = None) -> Iterator[None]:
    """Build layers for the given groups: a draft model in one stage, and in tests several ranks in one process."""
    global _tp, _pp, _ep
    saved = _tp, _pp, _ep
    _tp, _pp, _ep = tp or _tp, pp or _pp, ep or _ep
    try:
        yield
    finally:
        _tp, _pp, _ep = saved


def split_size(name: str, size: int, group: Group) -> int:
    """Return a rank's share of `size`. Raises ValueError naming the size and the numbers of ranks that divide it."""
    return share(name, size, group.size)
