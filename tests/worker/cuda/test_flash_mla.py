"""Latent attention by FlashMLA and FlashAttention 3: how their functions are called. Stand-ins for the packages check
the shapes and types that the packages document, and compute with plain torch.
"""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from quire.worker.attention.base import AttentionMetadata, AttentionSpec
from quire.worker.attention.registry import select_backend
from quire.worker.cuda import triton_backend
from quire.worker.cuda.device import CudaPlatform
from quire.worker.cuda.flash_mla import FlashAttention3MLA, FlashMLA
from tests.helpers.worker.attention_cases import Case, dense, make_case

RANK, ROPE, HEADS, SCALE = 512, 64, 4, 0.05
CUDA = torch.device("cuda")
ABSORBED = AttentionSpec(HEADS, 1, RANK + ROPE, torch.bfloat16, CUDA, v_head_dim=RANK, latent=True)
EXPANDED = AttentionSpec(HEADS, HEADS, 192, torch.bfloat16, CUDA, v_head_dim=128, expanded=True)


def gathered(cache: torch.Tensor, row: torch.Tensor, length: int) -> torch.Tensor:
    return cache[row.long()].flatten(0, 1)[:length, 0].float()


def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention of q `[n, heads, D]` to keys `[length, D]`, right-aligned."""
    scores = torch.einsum("qhd,kd->hqk", q.float(), keys) * scale
    at = torch.arange(len(keys) - len(q), len(keys))[:, None]
    scores = scores.masked_fill(torch.arange(len(keys))[None] > at, -torch.inf)
    return torch.einsum("hqk,kd->qhd", scores.softmax(-1), values)


@pytest.fixture
def flash_mla(monkeypatch) -> list[str]:
    """A stand-in for flash_mla. Returns the names of the functions called."""
    calls: list[str] = []
    module = types.ModuleType("flash_mla")

    def get_mla_metadata(cache_seqlens, num_heads_per_head_k, num_heads_k):
        calls.append("metadata")
        assert cache_seqlens.dtype == torch.int32 and (num_heads_per_head_k, num_heads_k) == (HEADS, 1)
        return cache_seqlens.new_zeros(8, 8), torch.arange(len(cache_seqlens) + 1, dtype=torch.int32)

    def flash_mla_with_kvcache(
        q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits,
        softmax_scale=None, causal=False,
    ):  # fmt: skip
        calls.append("attend")
        num_requests, num_queries, heads, width = q.shape
        assert (num_queries, heads, width, head_dim_v) == (1, HEADS, RANK + ROPE, RANK) and causal
        assert k_cache.shape[1:] == (64, 1, RANK + ROPE) and block_table.dtype == cache_seqlens.dtype == torch.int32
        assert len(block_table) == len(cache_seqlens) == num_requests and num_splits.shape == (num_requests + 1,)
        assert tile_scheduler_metadata.shape[1] == 8
        out = []
        for one, row, length in zip(q, block_table, cache_seqlens.tolist()):
            keys = gathered(k_cache, row, length)
            out.append(attend(one, keys, keys[:, :head_dim_v], softmax_scale))
        return torch.stack(out).to(q.dtype), q.new_zeros(num_requests, heads, 1)

    module.get_mla_metadata, module.flash_mla_with_kvcache = get_mla_metadata, flash_mla_with_kvcache
    monkeypatch.setitem(sys.modules, "flash_mla", module)
    return calls


@pytest.fixture
def flash_attn_3(monkeypatch) -> list[str]:
    """The same for FlashAttention 3."""
    calls: list[str] = []
    module = types.ModuleType("flash_attn_interface")

    def flash_attn_with_kvcache(
        q, k_cache, v_cache, qv=None, cache_seqlens=None, page_table=None, cu_seqlens_q=None, max_seqlen_q=None,
        softmax_scale=None, causal=False,
    ):  # fmt: skip
        calls.append("attend")
        assert q.shape[1:] == (HEADS, ROPE) and qv.shape == (*q.shape[:2], RANK) and causal
        assert k_cache.shape[2:] == (1, ROPE) and v_cache.shape == (*k_cache.shape[:3], RANK)
        assert all(tensor.stride(-1) == 1 for tensor in (q, qv, k_cache, v_cache))
        starts = cu_seqlens_q.tolist()
        assert max_seqlen_q == max(end - start for start, end in pairwise(starts))
        out = []
        for (start, end), row, length in zip(pairwise(starts), page_table, cache_seqlens.tolist()):
            rope, latent = gathered(k_cache, row, length), gathered(v_cache, row, length)
            queries = torch.cat((qv[start:end], q[start:end]), -1)
            out.append(attend(queries, torch.cat((latent, rope), -1), latent, softmax_scale))
        return torch.cat(out).to(q.dtype)

    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    return calls


def case_of(query_lens: list[int], context_lens: list[int], block_size: int) -> Case:
    sizes = {"num_heads": HEADS, "num_kv_heads": 1, "head_dim": RANK + ROPE, "v_head_dim": RANK, "latent": True}
    return make_case(None, query_lens, context_lens, block_size=block_size, heads_first=False, **sizes)


def run(backend, case: Case) -> torch.Tensor:
    return backend.forward(case.q, case.k_cache, case.v_cache, case.meta, SCALE)


def test_flash_mla_decodes(flash_mla):
    case, backend = case_of([1, 1, 1], [0, 63, 130], 64), FlashMLA()
    backend.build(case.meta)
    for _ in range(3):  # layers
        torch.testing.assert_close(run(backend, case), dense(case, SCALE), atol=1e-4, rtol=1e-4)
    assert flash_mla == ["metadata", *["attend"] * 3]  # once per step
    backend.build(case.meta)
    run(backend, case)
    assert flash_mla[-2:] == ["metadata", "attend"]


def test_flash_mla_leaves_longer_queries_and_the_expanded_form_to_triton(flash_mla, monkeypatch):
    passed = []
    monkeypatch.setattr(triton_backend.TritonPagedBackend, "forward", lambda self, q, *rest: passed.append(len(q)))
    backend, mixed, decode = FlashMLA(), case_of([1, 5], [9, 3], 64), case_of([1, 1], [9, 3], 64)
    for case in (mixed, decode):
        backend.build(case.meta)
    run(backend, mixed)
    backend.forward(decode.q, decode.k_cache, decode.k_cache.clone(), decode.meta, SCALE)
    assert passed == [6, 2] and flash_mla == []


@pytest.mark.parametrize("lengths", [([1, 1, 1], [0, 63, 130]), ([1, 9, 40], [20, 0, 55])])
def test_flash_attention_3_decodes_and_reads_prompts(flash_attn_3, lengths):
    case, backend = case_of(*lengths, 16), FlashAttention3MLA()
    backend.build(case.meta)
    torch.testing.assert_close(run(backend, case), dense(case, SCALE), atol=1e-4, rtol=1e-4)
    assert flash_attn_3 == ["attend"]


def test_the_first_one_that_applies_is_selected_with_reasons(flash_mla, flash_attn_3, monkeypatch):
    tried = []
    monkeypatch.setattr("quire.worker.cuda.flash_mla.try_once", lambda backend, spec: tried.append(backend.name))
    monkeypatch.setattr(triton_backend.TritonPagedBackend, "supports", classmethod(lambda cls, spec: None))
    selected = select_backend(CudaPlatform.attention_order, [ABSORBED, EXPANDED])
    assert (selected.backend.name, selected.block_size, tried) == ("flash_mla", 64, ["flash_mla"])
    assert "flash_attn_3" in selected.rejected
    in_blocks = [replace(spec, block_size=16) for spec in (ABSORBED, EXPANDED)]
    selected = select_backend(CudaPlatform.attention_order, in_blocks)
    assert (selected.backend.name, selected.block_size) == ("flash_attn_3_mla", 16)
    assert selected.rejected["flash_mla"] == "needs a block size of 64, not 16"
    small = [replace(ABSORBED, head_dim=320, v_head_dim=256), EXPANDED]
    selected = select_backend(CudaPlatform.attention_order, small)
    assert selected.backend.name == "triton_paged"
    assert selected.rejected["flash_attn_3_mla"].startswith("has kernels for latents of (576, 512) entries only")
    for scales in ("token", "layer"):
        in_8_bits = replace(ABSORBED, kv_dtype=torch.float8_e4m3fn, kv_scales=scales)
        selected = select_backend(CudaPlatform.attention_order, [in_8_bits, EXPANDED])
        assert selected.backend.name == "triton_paged"
        for name in ("flash_mla", "flash_attn_3_mla"):
            assert selected.rejected[name] == "has no window, soft cap, sinks or 8-bit cache"


def test_why_they_do_not_apply(flash_attn_3, monkeypatch):
    plain = AttentionSpec(4, 2, 128, torch.bfloat16, CUDA)
    assert FlashMLA.supports(plain) == "serves latent attention (MLA) only"
    assert FlashMLA.supports(replace(ABSORBED, device=torch.device("cpu"))) == "needs a GPU"
    assert "not float32" in FlashMLA.supports(replace(ABSORBED, dtype=torch.float32))
    monkeypatch.setitem(sys.modules, "flash_mla", None)
    assert "flash_mla cannot be imported" in FlashMLA.supports(ABSORBED)
    old = sys.modules["flash_attn_interface"]
    monkeypatch.setattr(old, "flash_attn_with_kvcache", lambda q, k_cache, v_cache, cache_seqlens: None)
    assert "flash_attn_with_kvcache does not take causal, cu_seqlens_q" in FlashAttention3MLA.supports(ABSORBED)


def test_metadata_of_a_step_belongs_to_it(flash_mla):
    """Two steps in flight do not share it."""
    backend, cases = FlashMLA(), [case_of([1], [length], 64) for length in (5, 70)]
    metas: list[AttentionMetadata] = [case.meta for case in cases]
    for meta in metas:
        backend.build(meta)
    for case in cases:
        torch.testing.assert_close(run(backend, case), dense(case, SCALE), atol=1e-4, rtol=1e-4)
    assert metas[0].extra is not metas[1].extra and flash_mla.count("metadata") == 2
