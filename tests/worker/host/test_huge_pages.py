"""Memory on huge pages: zeroed, of the requested size, not resident before it is written, returned to the system."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from quire.worker.cache.allocation import Warmer
from quire.worker.host import huge_pages
from quire.worker.messages import NewRequest, SamplingParams, StepInput

MIB = 1 << 20


def _resident() -> int:
    """Resident bytes of this process."""
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_workspace_keeps_its_place():
    workspace = huge_pages.Workspace(torch.float32)
    first = workspace.take(700, 1100)
    assert first.shape == (700, 1100) and first.dtype == torch.float32 and first.is_contiguous()
    assert workspace.take(3, 5).data_ptr() == workspace.take(1 << 20).data_ptr() == first.data_ptr()
    assert workspace.take(1 << 21).numel() == 1 << 21 and first.shape == (700, 1100)  # grown; what was taken lives on


@pytest.mark.parametrize("shape", [(3, 5), (1 << 20,), (2, 700, 1031)], ids=["small", "a page", "more than one"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8], ids=str)
def test_zeros(shape, dtype):
    tensor = huge_pages.zeros(*shape, dtype=dtype)
    assert tensor.shape == shape and tensor.dtype == dtype and tensor.is_contiguous() and not tensor.any()
    if tensor.nbytes >= 2 * MIB:
        assert tensor.data_ptr() % (2 * MIB) == 0
    tensor.fill_(1)
    assert tensor.float().mean() == 1


@pytest.mark.parametrize(
    ("conflicts", "taken"),
    [([1.2, 1.0], 0), ([3.0, 1.3, 1.0], 1), ([3.0, 2.5, 2.0, 2.9, 2.1, 1.0], 2)],
    ids=["the first will do", "the second does", "none does"],
)
def test_of_several_places_the_best_is_taken(conflicts, taken):
    places = []

    def measure(address: int) -> float:
        assert address % (2 * MIB) == 0
        places.append(address)
        return conflicts[len(places) - 1]

    tensor = huge_pages.well_placed(3 * MIB, dtype=torch.uint8, conflicts=measure, enough=1.4)
    assert tensor.data_ptr() == places[taken] and tensor.shape == (3 * MIB,) and not tensor.any()
    assert len(places) == len(set(places)) == (5 if taken == 2 else taken + 1)


@pytest.mark.slow
def test_memory_is_taken_when_it_is_written_and_given_back():
    gc.collect()  # memory of other tests must not be released in between
    before = _resident()
    tensor = huge_pages.zeros(256 * MIB, dtype=torch.uint8)
    assert _resident() - before < 16 * MIB
    view = tensor[100:].fill_(1)
    assert _resident() - before > 200 * MIB
    del tensor
    gc.collect()
    assert _resident() - before > 200 * MIB and view[0] == 1  # as long as anything looks at it
    del view
    gc.collect()
    assert _resident() - before < 64 * MIB


@pytest.mark.slow
def test_memory_can_be_made_resident_without_writing_it():
    tensor = huge_pages.zeros(64 * MIB, dtype=torch.uint8)
    tensor[10 * MIB] = 7
    before = _resident()
    if not huge_pages.make_resident(tensor.data_ptr() + 5, 32 * MIB):
        pytest.skip("this kernel has no MADV_POPULATE_WRITE")
    assert 24 * MIB < _resident() - before < 48 * MIB
    assert tensor[10 * MIB] == 7 and tensor.sum() == 7


def _resident_bytes(tensor: torch.Tensor) -> int:
    """Of `tensor`, which starts with a page; by what the system says about each."""
    pages = (ctypes.c_ubyte * (tensor.nbytes // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes), pages) == 0
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


def _wait_for(tensors: list[torch.Tensor], size: int) -> None:
    """Until `size` bytes of each are resident, and then for more, which would be too many."""
    deadline = time.monotonic() + 60
    while any(_resident_bytes(tensor) < size for tensor in tensors) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    assert [_resident_bytes(tensor) for tensor in tensors] == [size] * len(tensors)


def _step(new: list[int], blocks: list[int]) -> StepInput:
    """One request enters with the blocks `new`, another one gets `blocks`."""
    return StepInput(
        1, [NewRequest(0, [1], 1, [new], SamplingParams())], [0, 1], [0, 5], [1, 1], [[], [blocks]], [0, 1]
    )


def _cache(num_blocks: int, num_layers: int, heads: int, dim: int) -> tuple[list[SimpleNamespace], torch.Tensor]:
    """(layers, their memory): in a block, the keys and values of all layers are next to each other."""
    memory = huge_pages.zeros(num_blocks, 2 * num_layers, heads, 16, dim, dtype=torch.bfloat16)
    if not huge_pages.make_resident(memory.data_ptr(), 1):
        pytest.skip("this kernel has no MADV_POPULATE_WRITE")
    parts = [memory[:, i].transpose(1, 2) for i in range(2 * num_layers)]
    return [SimpleNamespace(k_cache=k, v_cache=v) for k, v in zip(parts[::2], parts[1::2])], memory


@pytest.mark.slow
def test_blocks_of_a_cache_become_resident_ahead_of_use():
    layers, memory = _cache(64, 2, 8, 2048)  # of 128 MiB, 2 MiB a block
    warmer = Warmer(layers, idle_bytes=32 * MIB, busy_bytes=8 * MIB)
    _wait_for([memory], 32 * MIB)
    for _ in range(2):
        warmer.follow(_step([1], [11, 10]))
        _wait_for([memory], 32 * MIB)  # blocks 0 to 11 take 24 MiB, and 8 MiB
    warmer.follow(_step([12, 1], []))
    _wait_for([memory], 34 * MIB)
    warmer.mark_idle()
    _wait_for([memory], 58 * MIB)
    warmer.follow(_step([], [60]))
    warmer._thread.join(60)
    _wait_for([memory], 128 * MIB)
    warmer.follow(_step([63], []))
    warmer.stop()


def test_of_a_small_model_no_more_becomes_resident_than_will_be_used():
    layers, memory = _cache(8192, 1, 1, 128)  # of 64 MiB, 8 KiB a block
    warmer = Warmer(layers)
    _wait_for([memory], 2 * MIB)  # 2048 tokens take 1 MiB
    warmer.follow(_step([1], [1024]))
    warmer.mark_idle()
    _wait_for([memory], 10 * MIB)  # as far ahead, of those used
    warmer.stop()


def test_a_warmer_stops_while_it_works_and_while_it_waits():
    layers, _ = _cache(64, 1, 8, 2048)
    Warmer(layers, 1 << 40, 0).stop()  # more than there is
    warmer = Warmer(layers, 4 * MIB, 0)
    time.sleep(0.1)
    # a thread at idle priority outlives its process for seconds on a busy machine, and its memory with it
    assert os.sched_getscheduler(warmer._thread.native_id) == os.SCHED_BATCH
    warmer.stop()
    assert not warmer._thread.is_alive()


def test_a_cache_gives_its_memory_back():
    layers, memory = _cache(64, 2, 8, 2048)
    warmer = Warmer(layers, idle_bytes=32 * MIB, busy_bytes=8 * MIB)
    _wait_for([memory], 32 * MIB)
    memory[3] = 1
    warmer.give_back()
    assert _resident_bytes(memory) == 0 and not warmer._thread.is_alive()
    assert not memory[3].any()


@pytest.mark.slow
def test_a_cache_in_use_gives_the_memory_of_some_blocks_back():
    layers, memory = _cache(64, 2, 8, 2048)  # blocks of 2 MiB
    warmer = Warmer(layers, idle_bytes=32 * MIB, busy_bytes=8 * MIB)
    warmer.follow(_step([1], [11]))  # blocks 0 to 11
    warmer.mark_idle()
    _wait_for([memory], 56 * MIB)
    memory[3:8] = 1
    warmer.give_back_blocks([5, 4, 6, 10])
    assert _resident_bytes(memory) == 16 * MIB, "without four blocks, and those ahead"
    warmer.follow(_step([4, 2], []))
    time.sleep(0.3)
    assert _resident_bytes(memory) == 16 * MIB, "nothing ahead while the machine is short"
    warmer.mark_idle()
    warmer.resume()
    _wait_for([memory], 16 * MIB + 32 * MIB)
    assert memory[3].all() and memory[7].all() and not memory[4:7].any()
    warmer.stop()


def test_pages_of_a_file_that_were_read_are_given_back(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.arange(1 << 20), "b": torch.ones(3)}, path)
    with safe_open(path, framework="pt") as file:
        tensor = file.get_tensor("a")
        total = tensor.sum()
        assert resident_of(path) >= tensor.nbytes
        link = tmp_path / "link"
        link.symlink_to(path)
        assert any(tensor.data_ptr() in addresses for addresses in huge_pages.mappings_of([link]))
        huge_pages.drop_mapped(tensor)
        assert resident_of(path) < 3 * mmap.PAGESIZE  # the first and the last page, which other tensors share
        assert tensor.sum() == total


def resident_of(path) -> int:
    """Resident bytes of the mappings of a file."""
    size, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            ours = line.endswith(str(path))
        elif ours and line.startswith("Rss:"):
            size += int(line.split()[1]) << 10
    return size


def test_lasting_tensors_are_zero_and_apart():
    """Sizes and types mixed, from several threads; large ones have memory of their own."""
    sizes = [1, 63, 64, 4097, MIB, 3 * MIB + 5, 9 * MIB] * 8
    dtypes = [torch.uint8, torch.bfloat16, torch.float32]

    def make(i: int) -> torch.Tensor:
        tensor = huge_pages.lasting(sizes[i], dtype=dtypes[i % 3])
        assert not tensor.any() and tensor.data_ptr() % 64 == 0
        return tensor.fill_(i)

    with ThreadPoolExecutor(4) as pool:
        tensors = list(pool.map(make, range(len(sizes))))
    for i, tensor in enumerate(tensors):
        assert tensor.shape == (sizes[i],) and (tensor == i).all()


def test_a_chunk_of_lasting_tensors_is_freed_with_the_last():
    gc.collect()
    before = _resident()
    tensors = [huge_pages.lasting(MIB, dtype=torch.uint8).fill_(1) for _ in range(128)]
    assert _resident() - before > 90 * MIB  # some began in a chunk that may have been resident
    del tensors
    gc.collect()
    assert _resident() - before < 40 * MIB  # the chunk of the next tensors
