"""Decisions of the platforms."""

from __future__ import annotations

import pytest
import torch

from quire.worker.cpu.device import _num_threads
from quire.worker.cuda.device import CudaPlatform
from quire.worker.host import resources as host
from quire.worker.platforms.base import is_out_of_memory


@pytest.mark.parametrize(
    "cores, ranks, frontends, expected",
    [(8, 1, 1, 8), (8, 2, 1, 4), (8, 3, 1, 2), (8, 1, 2, 6), (8, 2, 2, 3), (2, 4, 1, 1), (2, 1, 4, 1)],
)
def test_cores_are_divided_among_ranks_and_several_frontends(monkeypatch, cores, ranks, frontends, expected):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(host, "num_cores", lambda: cores)
    threads, reason = _num_threads(None, ranks, frontends)
    assert threads == expected
    assert (f"shared by {ranks} ranks" in reason) == (ranks > 1) and (
        f"minus {frontends} for the frontends" in reason
    ) == (frontends > 1)


def test_threads_that_were_asked_for(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert _num_threads(5, 2, 2) == (5, "as requested")
    assert _num_threads(None, 2, 2) == (3, "OMP_NUM_THREADS")


def test_what_counts_as_out_of_memory():
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 50, dtype=torch.uint8)
    assert is_out_of_memory(raised.value)
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2, 3) @ torch.empty(2, 3)
    assert not is_out_of_memory(raised.value)


@pytest.mark.parametrize("cores, ranks, blocking", [(2, 1, True), (16, 1, False), (16, 4, True), (64, 8, False)])
def test_waiting_for_a_gpu_spins_only_where_cores_are_many(monkeypatch, cores, ranks, blocking):
    events = []

    class Event:
        def __init__(self, blocking=False):
            events.append(blocking)

        def record(self, stream):
            pass

    for name, value in {
        "set_device": lambda device: None,
        "Stream": lambda device: None,
        "get_device_name": lambda device: "a GPU",
        "current_stream": lambda device: None,
        "Event": Event,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(host, "num_cores", lambda: cores)
    platform = CudaPlatform(0)
    platform.start(None, ranks)
    platform.event()
    assert events == [blocking]
