"""All-reduces over symmetric memory, with threads as ranks and a stand-in for torch's memory: who takes which tensor,
and that ranks which cannot all share memory agree to sum as before.
"""

import threading
from types import SimpleNamespace

import pytest
import torch

from quire.worker import parallel
from quire.worker.cpu.device import CpuPlatform
from quire.worker.cuda import one_shot
from quire.worker.cuda.one_shot import OneShot
from quire.worker.parallel import ProcessGroup
from tests.helpers.worker.ranks import ThreadGroup, run_ranks, thread_groups

CPU = torch.device("cpu")


class Memory:
    """Every rank's buffer, which the others read."""

    def __init__(self, rank: int, size: int, buffers: dict, barrier: threading.Barrier, fails: bool = False):
        self.rank, self.size, self.buffers, self.barrier, self.fails = rank, size, buffers, barrier, fails

    def empty(self, num_bytes, device):
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)

    def rendezvous(self, buffer, group):
        if self.fails:
            raise RuntimeError("cuMemImportFromShareableHandle: not permitted")
        self.buffers[self.rank] = buffer

    def all_reduce(self, buffer, x, group):
        assert buffer.data_ptr() == self.buffers[self.rank].data_ptr() and buffer.dtype == x.dtype
        buffer.copy_(x)
        self.barrier.wait(30)
        total = sum(self.buffers[r].view(x.dtype)[: x.numel()].float() for r in range(self.size)).to(x.dtype)
        self.barrier.wait(30)
        return total


@pytest.fixture
def groups(monkeypatch):
    """Two ranks; torch's collectives go through threads and are counted by dtype."""
    threads, slow = thread_groups(2), []

    def all_reduce(x, op=None, group=None):
        slow.append(x.dtype)
        parts = group._exchange(x.clone())
        stacked = torch.stack(parts)
        x.copy_(stacked.amin(0) if op == "min" else stacked.sum(0))

    fake = SimpleNamespace(all_reduce=all_reduce, ReduceOp=SimpleNamespace(MIN="min"))
    monkeypatch.setattr(parallel, "dist", fake)

    def group_of(thread: ThreadGroup) -> ProcessGroup:
        group = ProcessGroup.__new__(ProcessGroup)
        group._fixed_order = False
        group.ranks, group.size, group.rank, group._group, group._small = [0, 1], 2, thread.rank, thread, None
        return group

    return [group_of(thread) for thread in threads], slow


def test_small_tensors_are_summed_in_shared_memory_and_others_as_before(groups):
    ranks, slow = groups
    buffers, barrier = {}, threading.Barrier(2)

    def run(rank: int) -> list[torch.Tensor]:
        group = ranks[rank]
        make = lambda of: OneShot(of, 2, CPU, Memory(rank, 2, buffers, barrier))  # noqa: E731
        assert group.use_small_sums(CPU, None, make) is None
        results = []
        for dtype, shape in ((torch.bfloat16, (3, 8)), (torch.float32, (4, 4)), (torch.float64, (2, 2)),
                             (torch.bfloat16, (3, 3)), (torch.float32, (300, 1024))):  # fmt: skip
            x = torch.full(shape, 1.5 + rank, dtype=dtype)
            results.append(group.all_reduce(x))
            assert results[-1].shape == shape and results[-1].dtype == dtype
        strided = torch.ones(8, 8)[:, ::2] * (rank + 1)
        results.append(group.all_reduce(strided))
        assert group.num_exchanges == 6
        return results

    first, second = run_ranks(run, 2)
    for a, b in zip(first, second):
        assert torch.equal(a, b)
    assert [r.flatten()[0].item() for r in first] == [4.0] * 5 + [3.0]
    # two votes of each rank; then float64, a size that is no multiple of 16 bytes, and one above the limit
    names = sorted(str(dtype) for dtype in slow if dtype != torch.int64)
    assert names.count("torch.float64") == 2 and names.count("torch.bfloat16") == 2 and slow.count(torch.int64) == 4


@pytest.mark.parametrize("where", ["obstacle", "rendezvous"])
def test_ranks_that_cannot_all_share_memory_agree(groups, where):
    ranks, slow = groups
    buffers, barrier = {}, threading.Barrier(2)

    def run(rank: int) -> str | None:
        fails = rank == 1
        make = lambda of: OneShot(of, 2, CPU, Memory(rank, 2, buffers, barrier, fails))  # noqa: E731
        reason = ranks[rank].use_small_sums(CPU, "is far away" if fails and where == "obstacle" else None, make)
        assert torch.equal(ranks[rank].all_reduce(torch.ones(4)), torch.full((4,), 2.0))
        return reason

    first, second = run_ranks(run, 2)
    assert first == "another rank cannot"
    assert second == "is far away" if where == "obstacle" else "not permitted" in second
    assert slow.count(torch.float32) == 2 and bool(buffers) == (where == "rendezvous")


def test_other_devices_share_no_memory():
    assert one_shot.obstacle([0, 1], CPU) == "needs NVIDIA GPUs"
    assert CpuPlatform().share_memory(None) == ""


def test_torch_has_the_operation():
    """Under the name and with the arguments that are used; a torch without it raises, and the ranks sum as before."""
    try:
        library = one_shot.TorchLibrary()
    except (ImportError, AttributeError):
        pytest.skip("this torch has no symmetric memory")
    arguments = library._sum.default._schema.arguments
    assert [argument.name for argument in arguments] == ["symm_buffer", "local_input", "reduce_op", "group_name"]
