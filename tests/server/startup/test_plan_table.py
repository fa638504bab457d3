"""The table before serving."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.checkpoints.sizes import format_bytes, format_each
from quire.engine.messages import MemoryPlan, WorkerReady
from quire.server.startup.plan_table import plan_table
from quire.worker.messages import CacheGroup, TierInfo

GIB = 2**30
TIERS = [TierInfo("ram", "CPU", "in RAM", 8 * GIB), TierInfo("disk", "STORAGE", "on disk", GIB // 2, saves=True)]


def test_table_says_where_memory_goes_and_what_was_chosen():
    plan = MemoryPlan(
        "cuda:0 (H200)",
        139 * GIB,
        138 * GIB,
        weights=16 * GIB,
        activations=2 * GIB,
        kv_cache=100 * GIB,
        reserve=20 * GIB,
        bytes_per_block=2 * 2**20,
    )
    ready = WorkerReady(
        51201,
        16,
        40960,
        256,
        8192,
        151936,
        2,
        plan,
        [("dtype", "bfloat16", "config.json says so"), ("block_size", "16", "flash-attn")],
    )
    table = plan_table(ready)
    lines = table.splitlines()
    assert "in RAM" not in table and "on disk" not in table
    below = plan_table(msgspec.structs.replace(ready, tiers=TIERS))
    assert f"in RAM, at most: {format_bytes(8 * GIB)}" in below
    on_cpu = msgspec.structs.replace(ready, plan=msgspec.structs.replace(plan, offload=GIB))
    assert "RAM tier" not in table and "RAM tier" in plan_table(on_cpu)
    assert f"on disk, at most: {format_bytes(GIB // 2)}" in below
    assert [
        next(line for line in lines if line.strip().startswith(name)).split()[1]
        for name in ("weights", "activations", "reserve")
    ] == ["16.0", "2.00", "20.0"]
    assert (
        "139 GiB" in lines[0]
        and "100 GiB" in table
        and "819,200 tokens" in table
        and "20.0 requests of the full length of 40,960" in table
    )
    assert "dtype      = bfloat16  (config.json says so)" in table and "block_size = 16  (flash-attn)" in table
    assert "CUDA graphs" not in table
    with_graphs = plan_table(
        WorkerReady(51201, 16, 40960, 256, 8192, 151936, 2, msgspec.structs.replace(plan, graphs=GIB // 2))
    )
    assert "CUDA graphs     512 MiB" in with_graphs
    assert "72%" in table and "51,200 blocks of 16 tokens, 2.00 MiB each" in table


@pytest.mark.parametrize(
    "size,text",
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (15 * 2**20, "15.0 MiB"),
        (int(1.5 * GIB), "1.50 GiB"),
        (900 * GIB, "900 GiB"),
        (2**50, "1024 TiB"),
        (2**20 - 1, "1.00 MiB"),
    ],
)
def test_bytes(size, text):
    assert format_bytes(size) == text


_BYTES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@given(st.lists(st.integers(0, 2**45), min_size=1, max_size=5), st.lists(st.integers(0, 3), max_size=3))
def test_different_sizes_look_different(sizes, apart):
    """Also those that are a few bytes apart, and in the order of the sizes."""
    sizes += [sizes[0] + more for more in apart]
    texts = format_each(*sizes)
    assert len(set(texts)) == len(set(sizes))
    shown = [float(number.replace(",", "")) * _BYTES[unit] for number, unit in map(str.split, texts)]
    assert sorted(range(len(sizes)), key=sizes.__getitem__) == sorted(range(len(sizes)), key=shown.__getitem__)
    assert format_each(sizes[0]) == [format_bytes(sizes[0])]


def test_requests_that_fit_hold_blocks_of_several_groups():
    """A model with two groups that keep all tokens and one with a window: 40,960 tokens hold 5,120 + 577 blocks."""
    groups = [CacheGroup(), CacheGroup(), CacheGroup("window", 1024)]
    plan = MemoryPlan("cpu", GIB, GIB, weights=0, activations=0, kv_cache=GIB, reserve=0, bytes_per_block=1)
    ready = WorkerReady(51201, 16, 40960, 256, 8192, 151936, 2, plan, groups=groups)
    assert "fits 368,115 tokens: 9.0 requests of the full length of 40,960" in plan_table(ready)
    states = msgspec.structs.replace(ready, groups=[CacheGroup("state")])
    assert "fits 819,200 tokens: 20.0 requests" in plan_table(states)
