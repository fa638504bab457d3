"""Every attention backend computes the same as dense float32 attention, or gives a reason why it cannot."""

from __future__ import annotations

import importlib
import itertools
import sys
import types
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.worker.attention import torch_paged as cpu_paged
from quire.worker.attention.base import AttentionBackend, AttentionMetadata, AttentionSpec
from quire.worker.attention.registry import BACKENDS, select_backend
from quire.worker.attention.scaled import FP8, ScaledCache
from quire.worker.cuda import flash_attn, varlen
from quire.worker.cuda.device import CudaPlatform
from quire.worker.cuda.flash_attn_4 import FlashAttention4
from tests.helpers.worker.attention_cases import dense, make_case

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BATCHES = {
    "prefill": ([1, 7, 33, 64], [0, 0, 0, 0]),
    "chunked": ([5, 16, 1, 40], [3, 64, 0, 17]),
    "decode": ([1] * 7, [0, 1, 15, 16, 17, 63, 200]),
    "mixed": ([1, 9, 1, 1, 30], [40, 0, 3, 129, 55]),
    "one": ([1], [31]),
}
# every pair of a block size, of heads and of a window
SIZES = [
    (block_size, heads, *windows)
    for i, block_size in enumerate((1, 5, 16))
    for j, heads in enumerate(((4, 4), (4, 2), (6, 1)))
    for k, windows in enumerate(((None, None), (1, None), (24, None), (None, 5.0), (24, 5.0)))
    if (i + j + k) % 3 == 0
]


def _spec(where: torch.device, **changes) -> AttentionSpec:
    values = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "dtype": torch.float32, "device": where}
    return AttentionSpec(**values | changes)


def _backend_cls(name: str) -> type[AttentionBackend]:
    module_name, _, class_name = BACKENDS[name].partition(":")
    return getattr(importlib.import_module(module_name), class_name)


@cache
def _reason(name: str, spec: AttentionSpec) -> str | None:
    return _backend_cls(name).supports(spec)


def _available(name: str, spec: AttentionSpec):
    if reason := _backend_cls(name).supports(spec):
        pytest.skip(f"{name}: {reason}")
    return _backend_cls(name)()


@pytest.mark.slow
@pytest.mark.parametrize("block_size, heads, window, soft_cap", SIZES)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", [name for name in BACKENDS if name.startswith("cpu_")])
def test_equals_dense_attention(request, name, batch, block_size, heads, window, soft_cap):
    if name in ("cpu_native", "cpu_fixed"):
        request.getfixturevalue("native_kernels")
    backend = _available(
        name,
        _spec(
            CPU,
            num_heads=heads[0],
            num_kv_heads=heads[1],
            block_size=block_size,
            uses_sliding_window=window is not None,
            uses_soft_cap=soft_cap is not None,
        ),
    )
    case = make_case(backend, *BATCHES[batch], num_heads=heads[0], num_kv_heads=heads[1], block_size=block_size)
    backend.build(case.meta)
    out = backend.forward(case.q, case.k_cache, case.v_cache, case.meta, 0.3, window, soft_cap)
    torch.testing.assert_close(out, dense(case, 0.3, window, soft_cap), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sizes", [(32, 16, 4, False), (48, 32, 1, True)])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", ["cpu_native", "cpu_fixed", "cpu_paged"])
def test_values_of_another_size_than_keys(request, name, batch, sizes):
    if name != "cpu_paged":
        request.getfixturevalue("native_kernels")
    head_dim, v_dim, kv_heads, latent = sizes
    shape = {"num_kv_heads": kv_heads, "head_dim": head_dim, "v_head_dim": v_dim, "latent": latent}
    backend = _available(name, _spec(CPU, **shape))
    case = make_case(backend, *BATCHES[batch], **shape)
    backend.build(case.meta)
    out = backend.forward(case.q, case.k_cache, case.v_cache, case.meta, 0.3)
    torch.testing.assert_close(out, dense(case, 0.3), rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("window, soft_cap", [(None, None), (24, None), (None, 5.0)])
@pytest.mark.parametrize("heads, head_dim", [((16, 16), 64), ((32, 8), 128), ((14, 2), 64)])
@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("batch", [*BATCHES, "long"])
def test_backends_on_a_gpu_equal_dense_attention_and_one_another(batch, block_size, heads, head_dim, window, soft_cap):
    """Each backend that reports support works; the others must have given a reason."""
    query_lens, context_lens = BATCHES.get(batch, ([1, 1, 1], [3000, 700, 2047]))  # long enough for keys to be split
    size = {"num_heads": heads[0], "num_kv_heads": heads[1], "head_dim": head_dim, "dtype": torch.bfloat16}
    spec = AttentionSpec(
        device=CUDA,
        block_size=block_size,
        uses_sliding_window=window is not None,
        uses_soft_cap=soft_cap is not None,
        **size,
    )
    outputs, reasons = {}, {}
    for name in CudaPlatform.attention_order:
        if reason := _reason(name, spec):
            reasons[name] = reason
            continue
        backend = _backend_cls(name)()
        case = make_case(
            backend, query_lens, context_lens, block_size=block_size, device="cuda", heads_first=False, **size
        )
        backend.build(case.meta)
        outputs[name] = (
            backend.forward(case.q, case.k_cache, case.v_cache, case.meta, 0.125, window, soft_cap).float().cpu()
        )
    print(f"compared {', '.join(outputs)}; {reasons}")
    assert {"triton_paged", "cpu_paged"} <= outputs.keys() and all(reasons.values())
    want = dense(case, 0.125, window, soft_cap)
    for name, out in outputs.items():
        assert float((out - want).norm() / want.norm()) < 1e-2, name
    for one, other in itertools.combinations(outputs, 2):
        torch.testing.assert_close(
            outputs[one], outputs[other], rtol=2e-2, atol=2e-2, msg=lambda text, pair=(one, other): f"{pair}: {text}"
        )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("name", ["flash_attn_3", "flash_attn_4", "flash_attn_2", "torch_varlen"])
def test_library_is_usable_here(name):
    """Skips with the reason if the library is not usable; on a machine that should have it, check that reason."""
    block_size = _backend_cls(name).default_block_size
    if reason := _reason(name, AttentionSpec(32, 8, 128, torch.bfloat16, CUDA, block_size)):
        pytest.skip(reason)
    assert select_backend((name,), [AttentionSpec(32, 8, 128, torch.bfloat16, CUDA)]).block_size == block_size


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 90)), min_size=1, max_size=8),
    st.sampled_from([None, 7, 64]),
    st.sampled_from([64, 300, 8192]),
    st.sampled_from([64, 1 << 23]),
    st.booleans(),
)
def test_cpu_paged_cuts_ragged_batches_anywhere(requests, window, decode_tokens, prefill_scores, heads_first):
    backend = cpu_paged.CpuPagedAttention()
    queries, contexts = [q if q > 20 else 1 for q, _ in requests], [c for _, c in requests]
    case = make_case(backend, queries, contexts, block_size=3, heads_first=heads_first)
    with pytest.MonkeyPatch.context() as patch:  # small bounds, so that every way of splitting a batch occurs
        patch.setattr(cpu_paged, "_DECODE_TOKENS", decode_tokens)
        patch.setattr(cpu_paged, "_PREFILL_SCORES", prefill_scores)
        backend.build(case.meta)
        for w in (window, None):  # layers with different windows share one step
            out = backend.forward(case.q, case.k_cache, case.v_cache, case.meta, 0.25, w)
            torch.testing.assert_close(out, dense(case, 0.25, w), rtol=1e-4, atol=1e-4)


def test_cpu_paged_takes_views_of_a_fused_projection():
    backend = cpu_paged.CpuPagedAttention()
    case = make_case(backend, [3, 1, 1], [5, 9, 30])
    fused = torch.cat([case.q.flatten(1), torch.zeros(5, 64)], 1)
    q = fused[:, :64].view(5, 4, 16)
    backend.build(case.meta)
    torch.testing.assert_close(
        backend.forward(q, case.k_cache, case.v_cache, case.meta, 0.25), dense(case, 0.25), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("heads_first", [False, True])
def test_write_kv_stores_by_slot(heads_first):
    backend = cpu_paged.CpuPagedAttention()
    k_cache, v_cache = (
        torch.zeros(4, 5, 2, 3).transpose(1, 2) if heads_first else torch.zeros(4, 2, 5, 3) for _ in range(2)
    )
    k, v = torch.randn(3, 5, 3), torch.randn(3, 5, 3)
    backend.write_kv(k, v, k_cache, v_cache, torch.tensor([2, 7, 5]))
    for stored, written in ((k_cache, k), (v_cache, v)):
        by_slot = stored.flatten(0, 1)
        assert torch.equal(by_slot[[2, 7, 5]], written) and by_slot[[0, 1, 3, 4, 6]].count_nonzero() == 0


# ---- what the CUDA libraries are called with


def _meta(query_lens: list[int], seq_lens: list[int]) -> AttentionMetadata:
    starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    table = torch.arange(2 * len(seq_lens), dtype=torch.int32).view(-1, 2)
    return AttentionMetadata(
        None,
        torch.zeros(sum(query_lens), dtype=torch.int64),
        starts,
        torch.tensor(seq_lens, dtype=torch.int32),
        table,
        max(query_lens),
        max(seq_lens),
    )


@pytest.fixture
def library(monkeypatch):
    """A stand-in for flash-attn that records its calls and returns the queries."""
    calls = []

    def record(name):
        def function(*args, **kwargs):
            calls.append((name, args, kwargs))
            return args[0]

        return function

    for module_name in ("flash_attn", "flash_attn_interface"):
        module = types.ModuleType(module_name)
        module.flash_attn_with_kvcache, module.flash_attn_varlen_func = record("kvcache"), record("varlen")
        monkeypatch.setitem(sys.modules, module_name, module)
    return calls


def test_flash_attention_3_call(library):
    backend, meta, q, cache = (
        flash_attn.FlashAttention3(),
        _meta([1, 3], [9, 5]),
        torch.randn(4, 4, 16),
        torch.zeros(6, 16, 2, 16),
    )
    backend.build(meta)
    assert backend.forward(q, cache, cache, meta, 0.5, 24) is q
    ((name, args, kwargs),) = library
    assert name == "kvcache" and args[0] is q and args[1] is cache
    assert (
        kwargs["cache_seqlens"] is meta.seq_lens
        and kwargs["page_table"] is meta.block_table
        and kwargs["cu_seqlens_q"] is meta.query_start_loc
    )
    assert (
        kwargs["max_seqlen_q"],
        kwargs["softmax_scale"],
        kwargs["causal"],
        kwargs["window_size"],
        kwargs["softcap"],
    ) == (3, 0.5, True, (23, 0), 0.0)


@pytest.fixture
def cute(monkeypatch):
    """A stand-in for flash-attn-4, with the arguments of its version 4.0.0b36 that matter: dense attention. Yields the
    calls.
    """
    calls = []

    def flash_attn_varlen_func(
        q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
        min_seqlen_k=None, seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None,
        softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1,
    ):  # fmt: skip
        calls.append(max_seqlen_q)
        assert page_table.dtype == cu_seqlens_q.dtype == seqused_k.dtype == torch.int32 and page_table.stride(-1) == 1
        assert cu_seqlens_k is None and max_seqlen_q == int(cu_seqlens_q.diff().max()) and causal
        left, right = window_size
        assert right in (None, 0) and (left is None) == (right is None)
        window = None if left is None else left + 1
        meta = AttentionMetadata(
            None, None, cu_seqlens_q, seqused_k, page_table, max_seqlen_q, max_seqlen_k or page_table.shape[1]
        )
        out = cpu_paged.CpuPagedAttention()
        out.build(meta)
        cap = softcap or None
        return out.forward(q, k, v, meta, softmax_scale, window, cap, sinks=learnable_sink), None

    module = types.ModuleType("flash_attn.cute")
    module.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    return calls


@pytest.mark.parametrize("window, cap", [(None, None), (7, None), (None, 5.0)])
@pytest.mark.parametrize("query_lens", [[5, 1, 9], [1, 1, 1]])
def test_flash_attention_4_call(cute, query_lens, window, cap):
    backend = FlashAttention4()
    case = make_case(backend, query_lens, [3, 20, 0], block_size=16)
    backend.build(case.meta)
    out = backend.forward(case.q, case.k_cache, case.v_cache, case.meta, 0.25, window, cap)
    torch.testing.assert_close(out, dense(case, 0.25, window, cap), rtol=1e-4, atol=1e-4)
    assert cute == [max(query_lens)]


def test_flash_attention_4_takes_sinks(cute):
    backend = FlashAttention4()
    case, sinks = make_case(backend, [4, 1], [2, 9], block_size=16), torch.tensor([0.5, -1.0, 2.0, 0.0])
    out = backend.forward(case.q, case.k_cache, case.v_cache, case.meta, 0.25, sinks=sinks)
    want = cpu_paged.CpuPagedAttention()
    want.build(case.meta)
    wanted = want.forward(case.q, case.k_cache, case.v_cache, case.meta, 0.25, sinks=sinks)
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4)


def test_what_flash_attention_4_refuses(monkeypatch):
    spec = AttentionSpec(4, 2, 64, torch.bfloat16, torch.device("cuda"), 16)
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert "flash_attn.cute cannot be imported (" in FlashAttention4.supports(spec)
    assert "at most 32 tokens, not 64" in FlashAttention4.supports(replace(spec, block_size=64))
    assert "no KV cache in 8 bits" in FlashAttention4.supports(replace(spec, kv_scales="token"))
    assert "not float32" in FlashAttention4.supports(replace(spec, dtype=torch.float32))

    def fails(name):
        raise RuntimeError("no driver")

    monkeypatch.setattr("quire.worker.cuda.flash_attn_4.importlib.import_module", fails)
    assert FlashAttention4.supports(spec) == "flash_attn.cute cannot be imported (RuntimeError: no driver)"


FORWARD = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor? k_new = None, Tensor? v_new = None, Tensor? q_v = None, Tensor? "
    "out = None, Tensor? cu_seqlens_q = None, "
    "Tensor? cu_seqlens_k = None, Tensor? cu_seqlens_k_new = None, Tensor? seqused_q = None, Tensor? seqused_k = "
    "None, int? max_seqlen_q = None, "
    "int? max_seqlen_k = None, Tensor? page_table = None, Tensor? kv_batch_idx = None, Tensor? leftpad_k = None, "
    "Tensor? rotary_cos = None, "
    "Tensor? rotary_sin = None, Tensor? seqlens_rotary = None, Tensor? q_descale = None, Tensor? k_descale = "
    "None, Tensor? v_descale = None, "
    "float? softmax_scale = None, bool is_causal = False, int window_size_left = -1, int window_size_right = -1, "
    "int attention_chunk = 0, "
    "float softcap = 0.0, bool is_rotary_interleaved = False, Tensor? scheduler_metadata = None, int num_splits "
    "= 0, bool? pack_gqa = None, "
    "int sm_margin = 0) -> (Tensor, Tensor, Tensor, Tensor)"
)
METADATA = (
    "get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, int num_heads_k, "
    "int headdim, int headdim_v, "
    "ScalarType qkv_dtype, Tensor seqused_k, Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None, Tensor? "
    "cu_seqlens_k_new = None, "
    "Tensor? seqused_q = None, Tensor? leftpad_k = None, int? page_size = None, int max_seqlen_k_new = 0, bool "
    "is_causal = False, "
    "int window_size_left = -1, int window_size_right = -1, int attention_chunk = 0, bool has_softcap = False, "
    "int num_splits = 0, "
    "bool? pack_gqa = None, int sm_margin = 0) -> Tensor"
)


def _names(schema: str) -> list[str]:
    return [
        argument.split("=")[0].split()[-1]
        for argument in schema[schema.index("(") + 1 : schema.index(") ->")].split(",")
    ]


@contextmanager
def _operators(*schemas: str):
    """Stand-ins for the operators that FlashAttention 3 registers. Yields their calls as (name, arguments by name)."""
    calls = []
    with torch.library._scoped_library("flash_attn_3", "FRAGMENT") as library:
        for schema in schemas:
            name = schema.partition("(")[0]

            def record(*args, name=name, schema=schema, **kwargs):
                given = dict(zip(_names(schema), args)) | kwargs  # without what is the default
                calls.append((name, given))
                return (
                    given["seqused_k"].clone()
                    if name == "get_scheduler_metadata"
                    else (given["q"] + 1, *(given["q"].new_empty(0) for _ in range(3)))
                )

            library.define(schema)
            library.impl(name, record, "CPU")
        yield calls


def test_flash_attention_3_calls_its_operators(library):
    """Every layer calls the operator itself; the scheduler metadata is computed once per step and kind of layer."""
    with _operators(FORWARD, METADATA) as calls:
        backend, meta = flash_attn.FlashAttention3(), _meta([1, 3], [9, 5])
        q, cache = torch.randn(4, 4, 16), torch.zeros(6, 16, 2, 16)
        backend.build(meta)
        for window in (None, 24, None, 24):
            assert torch.equal(backend.forward(q, cache, cache, meta, 0.5, window), q + 1)
        assert [name for name, _ in calls] == ["get_scheduler_metadata", "fwd"] * 2 + ["fwd"] * 2 and not library
        metadata, forward = calls[2][1], calls[3][1]
        again = calls[5][1]
        want = {
            "batch_size": 2,
            "max_seqlen_q": 3,
            "max_seqlen_k": 32,
            "num_heads": 4,
            "num_heads_k": 2,
            "headdim": 16,
            "headdim_v": 16,
            "page_size": 16,
            "is_causal": True,
            "window_size_left": 23,
            "window_size_right": 0,
        }
        assert {name: metadata[name] for name in want} == want
        want = {
            "max_seqlen_q": 3,
            "softmax_scale": 0.5,
            "is_causal": True,
            "window_size_left": 23,
            "window_size_right": 0,
        }
        assert {name: forward[name] for name in want} == want
        for name, tensor in (
            ("cu_seqlens_q", meta.query_start_loc),
            ("seqused_k", meta.seq_lens),
            ("page_table", meta.block_table),
        ):
            assert torch.equal(forward[name], tensor)
        assert (
            forward["scheduler_metadata"].data_ptr()
            == again["scheduler_metadata"].data_ptr()
            != calls[1][1]["scheduler_metadata"].data_ptr()
        )
        backend.build(meta)
        backend.forward(q, cache, cache, meta, 0.5, None)
        assert calls[-2][0] == "get_scheduler_metadata"


def test_steps_of_one_token_per_request_are_left_to_triton(library, monkeypatch):
    called = []
    monkeypatch.setattr(flash_attn, "triton_decodes", lambda q, num_kv_heads: num_kv_heads == 2)
    monkeypatch.setattr(flash_attn.triton_paged, "attend", lambda call: called.append(call) or call.q)
    backend, q, cache = flash_attn.FlashAttention3(), torch.randn(2, 4, 16), torch.zeros(6, 16, 2, 16)
    for meta, by_triton in ((_meta([1, 1], [9, 5]), 1), (_meta([1, 3], [9, 5]), 0)):
        library.clear(), called.clear()
        backend.build(meta)
        assert backend.forward(q, cache, cache, meta, 0.5, 24) is q
        assert (len(called), len(library)) == (by_triton, 1 - by_triton)
        assert all(call.q is q and call.sliding_window == 24 for call in called)


def test_flash_attention_3_without_scheduler_metadata(library):
    """An older build registers only the attention operator; a build whose operator takes other arguments is called
    through its wrapper.
    """
    meta, q, cache = _meta([1, 3], [9, 5]), torch.randn(4, 4, 16), torch.zeros(6, 16, 2, 16)
    with _operators(FORWARD) as calls:
        backend = flash_attn.FlashAttention3()
        backend.build(meta)
        backend.forward(q, cache, cache, meta, 0.5)
        assert [name for name, _ in calls] == ["fwd"] and calls[0][1].get("scheduler_metadata") is None and not library
    with _operators(FORWARD.replace("page_table", "pages")) as calls:
        assert flash_attn.FlashAttention3().forward(q, cache, cache, meta, 0.5) is q and not calls and len(library) == 1


def test_flash_attention_3_over_an_fp8_cache(library):
    """With the scales of a checkpoint: the cache as it is, queries in FP8, and scales per request and KV head; through
    the operator and through the wrapper.
    """
    torch.manual_seed(0)
    meta, q = _meta([1, 3], [9, 5]), torch.randn(4, 4, 16).to(torch.bfloat16)
    k_cache, v_cache = (
        ScaledCache(torch.zeros(6, 16, 2, 16, dtype=FP8), torch.tensor(scale).expand(6, 16, 2), constant=True)
        for scale in (0.5, 0.25)
    )

    def check(q8, k, v, descales):
        assert k.data_ptr() == k_cache.values.data_ptr() and v.data_ptr() == v_cache.values.data_ptr()
        assert torch.equal(descales["k_descale"], torch.full((2, 2), 0.5))
        assert torch.equal(descales["v_descale"], torch.full((2, 2), 0.25))
        numbers = q8.float().unflatten(1, (2, 2)) * descales["q_descale"][0][:, None, None]
        assert q8.dtype == FP8 and torch.allclose(numbers.flatten(1, 2), q.float(), rtol=1 / 15, atol=1e-3)

    backend = flash_attn.FlashAttention3()
    backend.build(meta)
    out = backend.forward(q, k_cache, v_cache, meta, 0.5)
    ((_, args, kwargs),) = library
    check(*args[:3], kwargs)
    assert out.dtype == torch.bfloat16
    with _operators(FORWARD, METADATA) as calls:
        calls_before, backend = len(calls), flash_attn.FlashAttention3()
        backend.build(meta)
        backend._forward = lambda q, k, v, **kwargs: calls.append(("fwd", {"q": q, "k": k, "v": v} | kwargs)) or [q]
        backend.forward(q, k_cache, v_cache, meta, 0.5, 24)
        (_, metadata), (_, forward) = calls[calls_before:]
        assert metadata["qkv_dtype"] == FP8
        check(forward["q"], forward["k"], forward["v"], forward)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_dtype": torch.int8, "kv_scales": "token"}, "has no KV cache in int8"),
        ({"kv_dtype": FP8, "kv_scales": "token"}, "one scale of an FP8 cache per head, not one per token"),
    ],
)
def test_caches_that_flash_attention_leaves_to_others(library, changes, words):
    spec = _spec(CUDA, dtype=torch.bfloat16, **changes)
    assert words in flash_attn.FlashAttention3.supports(spec)
    assert flash_attn.FlashAttention2.supports(spec) == "has no KV cache in 8 bits"


def test_flash_attention_2_calls(library):
    backend, q, cache = flash_attn.FlashAttention2(), torch.randn(4, 4, 16), torch.zeros(6, 256, 2, 16)
    mixed, decode = _meta([1, 3], [9, 5]), _meta([1] * 4, [9, 5, 1, 300])
    for meta in (mixed, decode):
        backend.build(meta)
        assert backend.forward(q, cache, cache, meta, 0.5, soft_cap=30.0).shape == q.shape
    (name, args, kwargs), (decode_name, decode_args, decode_kwargs) = library
    assert (
        name == "varlen"
        and args[3] is mixed.query_start_loc
        and args[4].tolist() == [0, 9, 14]
        and args[4].dtype == torch.int32
        and args[5:] == (3, 9)
    )
    assert (
        kwargs["block_table"] is mixed.block_table and kwargs["window_size"] == (-1, -1) and kwargs["softcap"] == 30.0
    )
    assert (
        decode_name == "kvcache"
        and decode_args[0].shape == (4, 1, 4, 16)
        and decode_kwargs["cache_seqlens"] is decode.seq_lens
    )


def test_torch_varlen_call(monkeypatch):
    calls = []
    monkeypatch.setattr(varlen, "varlen_attn", lambda *args, **kwargs: calls.append((args, kwargs)))
    backend, meta, q, cache = (
        varlen.TorchVarlenAttention(),
        _meta([1, 3], [9, 5]),
        torch.randn(4, 4, 16),
        torch.zeros(6, 256, 2, 16),
    )
    backend.build(meta)
    backend.forward(q, cache, cache, meta, 0.5, 24)
    ((args, kwargs),) = calls
    assert args[3] is meta.query_start_loc and args[4].tolist() == [0, 9, 14] and args[5:] == (3, 9)
    assert (
        kwargs["seqused_k"] is meta.seq_lens
        and kwargs["block_table"] is meta.block_table
        and kwargs["window_size"] == (23, 0)
        and kwargs["enable_gqa"]
    )


def test_old_torch_has_no_block_table(monkeypatch):
    monkeypatch.setattr(varlen, "varlen_attn", lambda query, key, value, cu_seq_q, cu_seq_k, max_q, max_k: None)
    assert "takes no block table" in varlen.TorchVarlenAttention.supports(_spec(CUDA, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    "name, changes, words",
    [
        ("flash_attn_3", {"device": CPU}, "needs a GPU"),
        ("flash_attn_3", {"dtype": torch.float32}, "not float32"),
        ("flash_attn_2", {"block_size": 16}, "multiple of 256, not 16"),
        ("torch_varlen", {"uses_soft_cap": True}, "soft-cap"),
    ],
)
def test_reasons(name, changes, words):
    module_name, _, class_name = BACKENDS[name].partition(":")
    assert words in getattr(importlib.import_module(module_name), class_name).supports(
        _spec(CUDA, **{"dtype": torch.bfloat16} | changes)
    )


def test_a_missing_library_is_the_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    assert "flash_attn_interface cannot be imported" in flash_attn.FlashAttention3.supports(
        _spec(CUDA, dtype=torch.bfloat16)
    )


def test_selection_says_why_not_the_others():
    selection = select_backend(("flash_attn_3", "cpu_paged"), [_spec(CPU)])
    assert selection.backend.name == "cpu_paged" and selection.block_size == 16
    assert selection.rejected == {"flash_attn_3": "needs a GPU"} and "flash_attn_3: needs a GPU" in selection.reason
    assert select_backend(("cpu_paged",), [_spec(CPU, block_size=7)]).block_size == 7


def test_selection_errors():
    with pytest.raises(ValueError, match="must be one of cpu_fixed, cpu_native, cpu_paged"):
        select_backend(("cpu_paged",), [_spec(CPU)], "magic")
    with pytest.raises(ValueError, match="--attention-backend cannot be used: flash_attn_2: needs a GPU"):
        select_backend(("cpu_paged",), [_spec(CPU)], "flash_attn_2")
    with pytest.raises(ValueError, match="no attention backend supports this model on this device: torch_varlen"):
        select_backend(("torch_varlen",), [_spec(CPU)])
