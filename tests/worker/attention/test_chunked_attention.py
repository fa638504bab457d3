"""Attention in chunks of positions through backends that know nothing of chunks."""

from __future__ import annotations

import importlib
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quire.configs.config import Config
from quire.worker.attention.base import AttentionMetadata
from quire.worker.attention.chunked import split_at_chunks
from quire.worker.attention.registry import BACKENDS
from quire.worker.cpu.device import CpuPlatform
from quire.worker.limits import resolve_limits
from quire.worker.messages import CacheGroup
from quire.worker.models.registry import parse_model_spec, read_model_spec
from tests.helpers.models.families import build_family
from tests.helpers.worker.attention_cases import dense, make_case

PLATFORM = CpuPlatform()


def split(meta: AttentionMetadata, chunk: int, block_size: int) -> AttentionMetadata:
    (result,) = split_at_chunks((meta,), [CacheGroup("chunk", chunk)], block_size, PLATFORM.to_device)
    return result


def test_the_worked_example():
    """That of the module docstring."""
    table = torch.tensor([[10, 11, 12, 13, 14], [20, 21, 22, 0, 0]], dtype=torch.int32)
    starts, lengths = torch.tensor([0, 13, 14], dtype=torch.int32), torch.tensor([18, 10], dtype=torch.int32)
    slots = torch.arange(14)
    meta = AttentionMetadata(None, slots, starts, lengths, table, 13, 18)
    parts = split(meta, 8, 4)
    assert parts.query_start_loc.tolist() == [0, 3, 11, 13, 14] and parts.seq_lens.tolist() == [8, 8, 2, 2]
    assert parts.block_table[:, 0].tolist() == [10, 12, 14, 22] and parts.block_table[:2, 1].tolist() == [11, 13]
    assert (parts.max_query_len, parts.max_seq_len) == (8, 8) and parts.slot_mapping is slots
    assert parts.host == ([0, 3, 11, 13, 14], [8, 8, 2, 2])
    assert split_at_chunks((meta,), [CacheGroup()], 4, PLATFORM.to_device)[0] is meta


@pytest.mark.parametrize("with_host", [False, True])
def test_decoding_needs_no_lists_of_the_host(with_host):
    """The same parts as by the lists, computed on the device: a graph replays it."""
    lengths = [1, 7, 8, 9, 16, 30]
    table = torch.arange(1, 49, dtype=torch.int32).view(6, 8)
    starts = list(range(7))
    meta = AttentionMetadata(
        None,
        torch.arange(6),
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(lengths, dtype=torch.int32),
        table,
        1,
        30,
        host=(starts, lengths) if with_host else None,
    )
    device = split(meta, 8, 4)
    host = split(replace(meta, max_query_len=2, host=(starts, lengths)), 8, 4)
    assert device.query_start_loc.tolist() == host.query_start_loc.tolist()
    assert device.seq_lens.tolist() == host.seq_lens.tolist() == [1, 7, 8, 1, 8, 6]
    assert torch.equal(device.block_table, host.block_table) and device.max_seq_len == host.max_seq_len == 8
    assert device.host == (host.host if with_host else None)


def backend_of(request, name: str):
    if name in ("cpu_native", "cpu_fixed"):
        request.getfixturevalue("native_kernels")
    module, _, cls = BACKENDS[name].partition(":")
    return getattr(importlib.import_module(module), cls)()


@pytest.mark.parametrize(
    "name", ["cpu_paged", "cpu_native", "cpu_fixed", pytest.param("triton_paged", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("chunk", [8, 16, 64])
def test_every_backend_equals_dense_attention(request, name, chunk):
    if name == "triton_paged":
        from tests.helpers.worker.interpreter import loops_work  # skips without Triton

        if not loops_work():
            pytest.skip("this Triton interpreter cannot loop over loaded values")
    backend, rng = backend_of(request, name), random.Random(chunk)
    for query_lens, context_lens in (
        ([1, 9, 1, 40], [40, 0, 3, 55]),
        ([1] * 5, [0, 7, 8, 15, 63]),
        ([rng.randrange(1, 30) for _ in range(4)], [rng.randrange(90) for _ in range(4)]),
    ):
        case = make_case(backend, query_lens, context_lens, block_size=8)
        meta = split(case.meta, chunk, 8)
        backend.build(meta)
        out = backend.forward(case.q, case.k_cache, case.v_cache, meta, 0.3)
        torch.testing.assert_close(out, dense(case, 0.3, chunk=chunk), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_blocks_must_not_cross_chunks(tmp_path):
    folder = build_family("llama4", tmp_path)
    config = Config.from_flat(model=folder, device="cpu", block_size=24)
    with pytest.raises(
        ValueError, match="--block-size 24 must divide the attention_chunk_size 32 of Llama4ForCausalLM"
    ):
        resolve_limits(config, read_model_spec(folder), PLATFORM)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types must name chunked_attention or full_attention"),
        ({"attention_chunk_size": 0}, "attention_chunk_size must be a positive integer, not 0"),
        ({"no_rope_layers": [1]}, "no_rope_layers has 1 numbers for 4 layers"),
    ],
)
def test_refusals_name_the_key(tmp_path, changes, message):
    raw = json.loads(Path(build_family("llama4", tmp_path), "config.json").read_text())
    with pytest.raises(ValueError, match=message):
        parse_model_spec(raw | changes)
