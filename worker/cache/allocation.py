"""The paged KV cache's memory: one K and one V tensor per layer, bound as views to the attention layers, which are the only ones to write them."""

from __future__ import annotations

import os
import sys
import threading
import time

import torch
from torch import nn

from quire.worker.layers.attention import Attention
from quire.worker.messages import StepInput
from quire.worker.platforms import huge_pages

IDLE_BYTES = 4 << 30  # of the cache, behind the highest block used so far, that are made resident while no step runs
BUSY_BYTES = 512 << 20  # the same beside steps: more than one of them can fill
IDLE_SECONDS = 0.25  # without a step, after which none is expected at once


def attention_layers(model: nn.Module) -> list[Attention]:
    """The model's attention layers on this rank, in order."""
    return sorted((module for module in model.modules() if isinstance(module, Attention)), key=lambda layer: layer.layer_index)


def bytes_per_block(layers: list[Attention], block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes over all `layers`."""
    return sum(2 * block_size * layer.num_kv_heads * layer.head_dim * dtype.itemsize for layer in layers)


def allocate(layers: list[Attention], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Give every layer its `k_cache` and `v_cache` of `[num_blocks, block_size, num_kv_heads, head_dim]`.

    On CPU the memory is only reserved: a page, of 2 MiB where the system gives such, becomes resident when a block in
    it is first written. And there what a block has of one head lies together, as it is read: with a page of 4 KiB for
    each the hardware fetches ahead. All of it is zero: padding reads the null block, and a kernel that loads whole
    pages multiplies what lies behind a request's last token by 0, which makes NaN of the NaN that memory used before
    may hold.
    """
    for layer in layers:
        heads, dim = layer.num_kv_heads, layer.head_dim
        if device.type == "cpu":
            cache = huge_pages.zeros(2, num_blocks, heads, block_size, dim, dtype=dtype).transpose(2, 3)
        else:
            cache = torch.zeros(2, num_blocks, block_size, heads, dim, dtype=dtype, device=device)
        layer.k_cache, layer.v_cache = cache[0], cache[1]


class Warmer:
    """Makes blocks of a cache on CPU resident before they are needed: the first write of a page costs as much as computing the tokens in it.

    Blocks are handed out in order, so those behind the highest one used are needed next. While no step runs, `idle_bytes` of them are made resident; beside steps,
    which that slows down by a tenth, only the next `busy_bytes`. A thread that runs when nothing else wants the core, and ends by itself where all is resident.
    """

    def __init__(self, layers: list[Attention], idle_bytes: int = IDLE_BYTES, busy_bytes: int = BUSY_BYTES):
        self._tensors = [tensor for layer in layers for tensor in (layer.k_cache, layer.v_cache)]
        self._size, self._block_size = self._tensors[0].nbytes, self._tensors[0][0].nbytes  # of each tensor, in bytes, as all below
        self._idle_bytes, self._busy_bytes = idle_bytes // len(self._tensors), busy_bytes // len(self._tensors)
        self._used = self._resident = 0
        self._idle_since: float | None = 0.0  # time.monotonic(); None during a step
        self._wake, self._stopped, self._complete = threading.Event(), False, False
        self._thread = threading.Thread(target=self._work, name="kv-cache-warmer", daemon=True)
        self._thread.start()

    def follow(self, step: StepInput) -> None:
        """A step begins: stay ahead of the blocks that enter with it."""
        self._idle_since = None
        highest = max((block for blocks in (*step.new_blocks, *(new.block_ids for new in step.new)) for block in blocks), default=0)
        self._used = max(self._used, (highest + 1) * self._block_size)
        if self._complete or self._resident < self._used + self._busy_bytes:  # otherwise the thread looks by itself, in a while
            self._wake.set()

    def rest(self) -> None:
        """The step is over."""
        self._idle_since = time.monotonic()

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
            size = min(huge_pages.PAGE, self._size - self._resident)
            for tensor in self._tensors:
                self._wait()
                if self._stopped or not huge_pages.make_resident(tensor.data_ptr() + self._resident, size):
                    return
            self._resident += size

    def _wait(self) -> None:
        """Until the next pages are wanted."""
        while not self._stopped and self._resident >= self._used + self._busy_bytes:
            idle_since, self._complete = self._idle_since, self._resident >= self._used + self._idle_bytes
            if not self._complete and idle_since is not None and time.monotonic() - idle_since >= IDLE_SECONDS:
                return
            self._wake.wait(None if self._complete else IDLE_SECONDS)
            self._wake.clear()  # and only then look again
