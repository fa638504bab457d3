"""Runs several tensor-parallel ranks in one process: each is a thread, synchronised by a barrier."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from quire.worker.parallel import Group


class ThreadGroup(Group):
    """Implements the group of rank `rank` of `size` threads that share `box` and `barrier`."""

    def __init__(self, rank: int, size: int, box: list, barrier: threading.Barrier):
        self.rank, self.size, self._box, self._barrier = rank, size, box, barrier

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.num_exchanges += 1
        self._box[self.rank] = x
        self._barrier.wait(30)
        everyone = list(self._box)
        self._barrier.wait(30)
        return everyone

    def all_reduce(self, x):
        return torch.stack(self._exchange(x)).sum(0)

    def all_gather(self, x, dim=-1):
        return torch.cat(self._exchange(x), dim)

    def broadcast(self, x, src=0):
        return self._exchange(x)[src].clone()


def thread_groups(size: int) -> list[ThreadGroup]:
    box, barrier = [None] * size, threading.Barrier(size)
    return [ThreadGroup(rank, size, box, barrier) for rank in range(size)]


def run_ranks(work: Callable[[int], object], size: int) -> list:
    """Return `[work(0), ..., work(size - 1)]`, each computed in its own thread."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, range(size)))
