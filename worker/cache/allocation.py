"""Memory of the paged KV cache: one K and one V tensor for the nth layers of all groups, bound to the attention layers,
which alone write to it. A latent cache is one tensor, whose first columns are the values.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from math import lcm

import torch
from torch import nn

from quire.configs import platforms
from quire.worker.attention.scaled import SCALE, KVCache, ScaledCache, ScaledLatents, tensors_of
from quire.worker.cache.storage import KVStorage
from quire.worker.host import huge_pages
from quire.worker.layers.attention import Attention
from quire.worker.layers.state import RecurrentState
from quire.worker.messages import StepInput
from quire.worker.platforms.base import Platform
from quire.worker.spec.cache import CachePlan, CacheSpec, Compressed, Latent

IDLE_BYTES = 4 << 30  # bytes after the highest block used so far that are made resident while no step runs
IDLE_TOKENS = 2048  # maximum tokens in IDLE_BYTES: a large step of a small model
BUSY_BYTES = 512 << 20  # the same while steps run: more than one step can fill
IDLE_PAUSE, BUSY_PAUSE = 1.0, 4.0  # after making 2 MiB resident, as a multiple of the time taken
LONG_PIECE = 0.01  # seconds: a piece takes longer if others have the cores
IDLE_SECONDS = 0.25  # seconds without a step after which the worker counts as idle


def attention_layers(model: nn.Module) -> list[Attention]:
    """Return the model's attention layers on this rank, by layer index."""
    return sorted(
        (module for module in model.modules() if isinstance(module, Attention)), key=lambda layer: layer.layer_index
    )


def state_layers(model: nn.Module) -> list[RecurrentState]:
    """Return the recurrent states of the model's layers on this rank."""
    return [module for module in model.modules() if isinstance(module, RecurrentState)]


def allocate_states(layers: list[RecurrentState], plan: CachePlan, num_states: int, platform: Platform) -> None:
    """Bind `pages` for `num_states` states after a null page, and the cache group, to every layer of this rank. On CPU
    the memory is only reserved.
    """
    for layer in layers:
        assert layer.cache_spec == plan.states[layer.layer_index]
        layer.cache_group = len(plan.groups) - 1
        layer.pages = [_zeros(num_states + 1, *shape, platform=platform) for shape in layer.shapes]


def allocate(
    layers: list[Attention], plan: CachePlan, num_blocks: int, block_size: int, storage: KVStorage, platform: Platform
) -> None:
    """Bind `k_cache` and `v_cache`, both `[num_blocks, block_size, num_kv_heads, head_dim]`, and the cache group to
    every layer of this rank.

    The nth layers of all groups share memory: a block belongs to one group at a time. On CPU the memory is only
    reserved: a page (2 MiB if the system grants huge pages) becomes resident when a block in it is first written. There
    the entries of all layers in a block are next to each other, so that a small model's first blocks need few pages.
    All memory is zero at first: padding reads the null block, and a kernel that loads whole pages multiplies the
    entries after a request's last token by 0, which would be NaN if reused memory contained NaN.
    """
    by_index = {layer.layer_index: layer for layer in layers}
    slabs: list[_Slab] = []
    for g, members in enumerate(plan.layers):
        if plan.groups[g].kind == "state":
            continue
        mine, sharing = [by_index[i] for i in members if i in by_index], plan.per_page(g)
        slabs += [[] for _ in range(-(-len(mine) // sharing) - len(slabs))]
        for i, layer in enumerate(mine):
            _bind(layer, plan, g, storage)
            start = i % sharing * plan.spec_of(layer.layer_index).page_bytes(block_size)
            slabs[i // sharing].append((layer, start))
    apart = [] if plan.draft_group is None else layers
    for layer in apart:
        if layer.layer_index < len(plan.specs) or layer.kv_from is not None:
            continue
        _bind(layer, plan, plan.draft_group, storage)
        slabs.append([(layer, 0)])
    if platform.shares_ram:
        tensors_of_slabs = _parts_in_blocks(slabs, plan, num_blocks, block_size, storage)
    else:
        device = platform.device
        tensors_of_slabs = [_parts_on_device(one, plan, num_blocks, block_size, storage, device) for one in slabs]
    for sharing, parts in zip(slabs, tensors_of_slabs):
        for (layer, _), tensors in zip(sharing, parts):
            layer.k_cache, layer.v_cache = _caches(tensors, layer, storage)
    for layer in layers:
        if layer.kv_from is not None:
            source = by_index[layer.kv_from]
            layer.k_cache, layer.v_cache, layer.cache_group = source.k_cache, source.v_cache, source.cache_group


def _bind(layer: Attention, plan: CachePlan, group: int, storage: KVStorage) -> None:
    assert layer.cache_spec(storage.dtype.itemsize, storage.scale_bytes) == plan.spec_of(layer.layer_index)
    layer.cache_group = group


_Part = tuple[int, int, torch.dtype]  # a layer's cache per token: heads, entries per head, their type
_Slab = list[tuple[Attention, int]]  # layers that share memory, and the byte of a page at which each begins


def _parts(spec: CacheSpec, storage: KVStorage) -> list[_Part]:
    """Return the tensors of a layer: keys and values, each followed by its scales if each token has some; or latents
    and their scales.
    """
    if isinstance(spec, Compressed):
        return [(1, spec.width, storage.dtype), *([(1, 2, SCALE)] if spec.scale_bytes else [])]
    if isinstance(spec, Latent):
        return [(1, spec.width, storage.dtype), *([(1, 2, SCALE)] if storage.scale_bytes else [])]
    scales = [(spec.num_kv_heads, 1, SCALE)] if storage.scale_bytes else []
    k, v = ((spec.num_kv_heads, dim, storage.dtype) for dim in (spec.k_dim, spec.v_dim))
    return [k, *scales, v, *scales]


def _caches(tensors: list[torch.Tensor], layer: Attention, storage: KVStorage) -> tuple[KVCache, KVCache]:
    """Return (k_cache, v_cache) of a layer in the tensors of its `_parts`."""
    if not storage.scaled:
        return tensors[0], tensors[-1][..., : layer.v_head_dim]
    constant = storage.constants is not None
    if constant:
        scales = storage.constants.get(layer.layer_index, (1.0, 1.0))  # the checkpoint has none for a draft model
        numbers = torch.tensor(scales, dtype=SCALE, device=tensors[0].device)
        values, scales = tensors, [number.expand(*tensors[0].shape[:3], 2) for number in numbers]
    else:
        values, scales = tensors[::2], tensors[1::2]
    if len(values) == 1:
        latents = ScaledLatents(values[0], scales[0], layer.v_head_dim, constant)
        return latents, latents.latent
    k, v = (ScaledCache(entries, scale[..., 0], constant) for entries, scale in zip(values, scales))
    return k, v


def _zeros(*shape: int, platform: Platform) -> torch.Tensor:
    """Return a tensor of float32 zeros; in the machine's RAM, its memory is not resident yet."""
    if platform.shares_ram:
        return huge_pages.zeros(*shape, dtype=torch.float32)
    return torch.zeros(*shape, dtype=torch.float32, device=platform.device)


_Tensors = list[list[torch.Tensor]]  # per layer, those of its `_parts`


def _parts_on_device(
    slab: _Slab,
    plan: CachePlan,
    num_blocks: int,
    block_size: int,
    storage: KVStorage,
    device: torch.device,
) -> _Tensors:
    """Return the tensors of layers that share memory: the same for all if their parts are equal, else views of pages
    with the size of the largest layer.
    """
    if not _have_equal_parts(slab, plan, storage):
        pages = torch.zeros(num_blocks, plan.layer_page_bytes(block_size), dtype=torch.uint8, device=device)
        return [_views(pages, plan.spec_of(one.layer_index), block_size, storage, start) for one, start in slab]
    parts = _parts(plan.spec_of(slab[0][0].layer_index), storage)
    tensors = [
        torch.zeros(num_blocks, block_size, heads, dim, dtype=dtype, device=device) for heads, dim, dtype in parts
    ]
    return [tensors] * len(slab)


def _have_equal_parts(slab: _Slab, plan: CachePlan, storage: KVStorage) -> bool:
    """Return whether the layers have equal tensors, of whole tokens, at the same offset in a page."""
    specs = [plan.spec_of(layer.layer_index) for layer, _ in slab]
    if any(isinstance(spec, Compressed) for spec in specs):
        return False
    return len({tuple(_parts(spec, storage)) for spec in specs}) == 1


def _parts_in_blocks(
    slabs: list[_Slab], plan: CachePlan, num_blocks: int, block_size: int, storage: KVStorage
) -> list[_Tensors]:
    """Return views of one piece of memory, in which a block holds the entries of all `slabs` of layers."""
    sizes = [
        plan.layer_page_bytes(block_size)
        if not _have_equal_parts(slab, plan, storage)
        else sum(heads * block_size * dim * dtype.itemsize for heads, dim, dtype in _parts(spec, storage))
        for slab in slabs
        for spec in [plan.spec_of(slab[0][0].layer_index)]
    ]
    # A whole number of rows of each part, so that backends may count in rows.
    parts = {part for slab in slabs for layer, _ in slab for part in _parts(plan.spec_of(layer.layer_index), storage)}
    rows = lcm(*(dim * dtype.itemsize for _, dim, dtype in parts))
    blocks = huge_pages.zeros(num_blocks, -(-sum(sizes) // rows) * rows, dtype=torch.uint8)
    start, found = 0, []
    for slab, size in zip(slabs, sizes):
        pages, start = blocks[:, start : start + size], start + size
        found.append([_views(pages, plan.spec_of(one.layer_index), block_size, storage, at) for one, at in slab])
    return found


def _views(
    pages: torch.Tensor, spec: CacheSpec, block_size: int, storage: KVStorage, start: int = 0
) -> list[torch.Tensor]:
    """Return the parts of a layer, one after the other in each of `pages` from byte `start`.

    The entries of one head in a block are contiguous, as they are read: with 4 KiB per head and block the hardware
    prefetches them.
    """
    tensors, slots = [], spec.slots(block_size) if isinstance(spec, Compressed) else block_size
    for heads, dim, dtype in _parts(spec, storage):
        size = heads * slots * dim * dtype.itemsize
        entries = pages[:, start : start + size].view(dtype)
        tensors.append(entries.unflatten(1, (heads, slots, dim)).transpose(1, 2))
        start += size
    return tensors


class Warmer:
    """Makes blocks of a cache on CPU resident before they are needed: the first write to a page costs as much as
    computing the tokens in it.

    Blocks are handed out in order, so those after the highest one used are needed next. While no step runs,
    `idle_bytes` of them are made resident; while steps run, which this slows down by a tenth, only the next
    `busy_bytes`. A thread does this in small pieces with pauses; it ends when all memory is resident.
    """

    def __init__(self, layers: list[Attention], idle_bytes: int = IDLE_BYTES, busy_bytes: int = BUSY_BYTES):
        caches = [cache for layer in layers for cache in (layer.k_cache, layer.v_cache)]
        tensors = [tensor for cache in caches for tensor in tensors_of(cache)]
        # blocks are consecutive in one memory of all layers (`_parts_in_blocks`)
        assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
        self._address = min(tensor.data_ptr() for tensor in tensors)
        self._block_size, self._num_blocks = tensors[0].stride(0) * tensors[0].itemsize, len(tensors[0])
        self._size = self._block_size * self._num_blocks
        most = IDLE_TOKENS * self._block_size // tensors[0].shape[1]
        self._idle_bytes, self._busy_bytes = min(idle_bytes, most), min(busy_bytes, most)
        self.most_ahead = max(self._idle_bytes, self._busy_bytes)
        self._memory = tensors  # keeps the memory alive
        self._used = self._resident = 0
        self._idle_since: float | None = 0.0  # time.monotonic(); None during a step
        self._wake, self._stopped, self._complete = threading.Event(), False, False
        self._start()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._work, name="kv-cache-warmer", daemon=True)
        self._thread.start()

    def follow(self, step: StepInput) -> None:
        """Stay ahead of the blocks that a beginning step adds."""
        self._idle_since = None
        added = (*step.new_blocks, *(new.block_ids for new in step.new))
        blocks = (block for groups in added for blocks in groups for block in blocks)
        highest = max((block for block in blocks if block < self._num_blocks), default=0)  # others hold states
        self._used = max(self._used, (highest + 1) * self._block_size)
        # otherwise the thread checks again after its timeout
        if self._complete or self._resident < self._used + self._busy_bytes:
            self._wake.set()

    def mark_idle(self) -> None:
        """Note the end of a step."""
        self._idle_since = time.monotonic()

    def give_back(self) -> None:
        """Stop and return the memory of all blocks to the system. They read as zero until they are written again."""
        self.stop()
        huge_pages.discard(self._address, self._size)

    def give_back_blocks(self, block_ids: list[int]) -> None:
        """Stop and return the memory of these blocks, and of those that were made resident ahead, to the system."""
        self._halt()
        huge_pages.discard(self._address + self._used, self._size - self._used)
        size = self._block_size
        for first, count in _runs(block_ids):
            huge_pages.discard(self._address + first * size, count * size)

    def resume(self) -> None:
        """Make memory resident ahead again, after `give_back_blocks`."""
        if self._stopped:
            self._stopped, self._complete, self._resident = False, False, self._used
            self._start()

    def stop(self) -> None:
        """Stop the thread. Returns when it no longer accesses the memory."""
        self._halt()
        self._memory = []

    def _halt(self) -> None:
        self._stopped = True
        self._wake.set()
        self._thread.join()

    def _work(self) -> None:
        # Not SCHED_IDLE: on a busy machine the thread would get no time for seconds, and would delay the exit of the
        # process, whose memory it holds.
        platforms.schedule_thread_as_batch()
        while self._resident < self._size:
            size = min(huge_pages.PAGE, self._size - self._resident)
            self._wait()
            begun = time.monotonic()
            if self._stopped or not huge_pages.make_resident(self._address + self._resident, size):
                return
            self._resident += size
            pause = BUSY_PAUSE if self._idle_since is None else IDLE_PAUSE
            time.sleep(pause * min(time.monotonic() - begun, LONG_PIECE))

    def _wait(self) -> None:
        """Wait until the next pages are needed."""
        while not self._stopped and self._resident >= self._used + self._busy_bytes:
            idle_since, self._complete = self._idle_since, self._resident >= self._used + self._idle_bytes
            if not self._complete and idle_since is not None and time.monotonic() - idle_since >= IDLE_SECONDS:
                return
            self._wake.wait(None if self._complete else IDLE_SECONDS)
            self._wake.clear()  # clear before checking again


def _runs(block_ids: list[int]) -> Iterator[tuple[int, int]]:
    """Yield (first, number) of consecutive blocks, so that memory pages that they share are whole."""
    first = count = 0
    for block_id in sorted(block_ids):
        if count and block_id == first + count:
            count += 1
            continue
        if count:
            yield first, count
        first, count = block_id, 1
    if count:
        yield first, count
