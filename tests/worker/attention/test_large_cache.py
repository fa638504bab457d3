"""Attention over the last blocks of a cache with more entries than 32 bits count."""

from __future__ import annotations

import importlib

import pytest
import torch

from quire.worker.attention.base import AttentionSpec
from quire.worker.attention.registry import BACKENDS
from tests.helpers.worker.attention_cases import dense, make_case

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.mark.parametrize(
    "name, where, num_entries",
    [
        ("cpu_paged", CPU, 1 << 20),
        *(
            pytest.param(name, CUDA, 1 << 32, marks=[pytest.mark.gpu, NEEDS_GPU])
            for name in ("flash_attn_3", "flash_attn_4", "flash_attn_2", "triton_paged")
        ),
    ],
)
def test_blocks_at_the_end_of_a_large_cache(name, where, num_entries):
    """On a GPU the offsets of entries exceed 32 bits."""
    size = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": torch.bfloat16}
    module, _, class_name = BACKENDS[name].partition(":")
    cls = getattr(importlib.import_module(module), class_name)
    if reason := cls.supports(AttentionSpec(device=where, **size)):
        pytest.skip(f"{name}: {reason}")
    backend = cls()
    page = backend.default_block_size
    case = make_case(backend, [1, 17, 28], [70, 0, 64], block_size=page, device=where, heads_first=False, **size)
    unused = num_entries // (page * 8 * 128)
    k, v = (
        torch.zeros(unused + len(cache), page, 8, 128, dtype=torch.bfloat16, device=where)
        for cache in (case.k_cache, case.v_cache)
    )
    k[unused:], v[unused:] = case.k_cache, case.v_cache
    case.meta.block_table.add_(unused)
    backend.build(case.meta)
    out = backend.forward(case.q, k, v, case.meta, 128**-0.5).float().cpu()
    want = dense(case, 128**-0.5)
    assert float((out - want).norm() / want.norm()) < 1e-2
