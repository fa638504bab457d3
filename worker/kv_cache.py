"""The paged KV cache's memory: one K and one V tensor per layer, bound as views to the attention layers, which are the only ones to write them."""

from __future__ import annotations

import os
import sys
import threading

import torch
from torch import nn

from worker import huge_pages
from worker.layers.attention import Attention
from worker.messages import StepInput

RESIDENT_BYTES = 2 << 30  # of the cache, behind the highest block used so far, that are made resident before they are needed


def attention_layers(model: nn.Module) -> list[Attention]:
    """The model's attention layers on this rank, in order."""
    return sorted((module for module in model.modules() if isinstance(module, Attention)), key=lambda layer: layer.layer_index)


def bytes_per_block(layers: list[Attention], block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes over all `layers`."""
    return sum(2 * block_size * layer.num_kv_heads * layer.head_dim * dtype.itemsize for layer in layers)


def allocate(layers: list[Attention], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Give every layer its `k_cache` and `v_cache` of `[num_blocks, block_size, num_kv_heads, head_dim]`.

    On CPU the memory is only reserved: a page, of 2 MiB where the system gives such, becomes resident when a block in it is first written. The null block is
    zeroed, since padding reads it.
    """
    for layer in layers:
        shape = 2, num_blocks, block_size, layer.num_kv_heads, layer.head_dim
        if device.type == "cpu":
            cache = huge_pages.zeros(*shape, dtype=dtype)
        else:
            cache = torch.empty(shape, dtype=dtype, device=device)
            cache[:, 0].zero_()
        layer.k_cache, layer.v_cache = cache[0], cache[1]


class Warmer:
    """Makes blocks of a cache on CPU resident before they are needed: the first write of a page costs as much as computing the tokens in it.

    Blocks are handed out in order, so `num_bytes` from the first one on are those that a server needs soon; later as many behind the highest block that was used.
    A thread that runs when nothing else wants the core, and ends by itself where all is resident.
    """

    def __init__(self, layers: list[Attention], num_bytes: int = RESIDENT_BYTES):
        self._tensors = [tensor for layer in layers for tensor in (layer.k_cache, layer.v_cache)]
        self._size, self._block_size = self._tensors[0].nbytes, self._tensors[0][0].nbytes  # of each tensor, in bytes, as all below
        self._ahead = num_bytes // len(self._tensors)
        self._goal, self._resident = min(self._ahead, self._size), 0
        self._wake, self._stopped = threading.Event(), False
        self._thread = threading.Thread(target=self._work, name="kv-cache-warmer", daemon=True)
        self._thread.start()

    def follow(self, step: StepInput) -> None:
        """Stay ahead of the blocks that enter with `step`."""
        highest = max((block for blocks in (*step.new_blocks, *(new.block_ids for new in step.new)) for block in blocks), default=0)
        self._goal = max(self._goal, min((highest + 1) * self._block_size + self._ahead, self._size))
        if self._goal > self._resident:
            self._wake.set()

    def stop(self) -> None:
        """Returns when the memory is not looked at any more."""
        self._stopped = True
        self._wake.set()
        self._thread.join()
        self._tensors = []

    def _work(self) -> None:
        if sys.platform == "linux":  # not by `nice`: whatever wakes up would still wait for the rest of this thread's slice of milliseconds
            os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))
        while self._resident < self._size:
            while self._resident >= self._goal and not self._stopped:
                self._wake.wait()
                self._wake.clear()  # and only then look at the goal again
            size = min(huge_pages.PAGE, self._size - self._resident)
            for tensor in self._tensors:
                if self._stopped or not huge_pages.make_resident(tensor.data_ptr() + self._resident, size):
                    return
            self._resident += size
