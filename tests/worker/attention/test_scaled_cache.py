"""Keys and values in 8 bits: their arithmetic, and attention over them against dense attention over the numbers that
the cache stands for.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from quire.worker.attention.base import AttentionMetadata, AttentionSpec
from quire.worker.attention.registry import BACKENDS, select_backend
from quire.worker.attention.scaled import FP8, LARGEST, ScaledCache, ScaledLatents, scale_of, store, to_8_bits, widened
from quire.worker.cache.allocation import Warmer, allocate
from quire.worker.cache.storage import KVStorage
from quire.worker.cpu.device import CpuPlatform
from quire.worker.layers.attention import Attention
from quire.worker.layers.mla import LatentAttention
from quire.worker.spec.cache import Full, Latent, LatentSizes, Window, plan_cache
from tests.helpers.worker.attention_cases import Case, dense, make_case

CPU = torch.device("cpu")
TYPES = {"int8": torch.int8, "fp8": FP8}
BATCHES = {
    "prefill": ([1, 7, 33, 64], [0, 0, 0, 0]),
    "chunked": ([5, 16, 1, 40], [3, 64, 0, 17]),
    "decode": ([1] * 7, [0, 1, 15, 16, 17, 63, 200]),
    "mixed": ([1, 9, 1, 1, 30], [40, 0, 3, 129, 55]),
}


@pytest.mark.parametrize("kind", TYPES)
def test_rounding_to_8_bits(kind):
    """Integers: at most half a step of 1 / 127 of the largest entry; e4m3: 4 bits of precision, or half a step of the
    smallest exponent.
    """
    x = torch.randn(1000, 64, generator=torch.Generator().manual_seed(0))
    scales, inverse = scale_of(x, TYPES[kind])
    values = to_8_bits(x * inverse[..., None], TYPES[kind])
    error, largest = (widened(values, scales) - x).abs(), x.abs().amax(-1, keepdim=True)
    assert widened(values, scales).abs().amax(-1) == pytest.approx(largest[:, 0], rel=1e-6)
    if kind == "int8":
        assert (error <= largest / 127 / 2 * 1.0001).all()
    else:
        assert (error <= torch.maximum(x.abs() / 16, largest / 448 * 2**-10) * 1.0001).all()


@pytest.mark.parametrize("kind", TYPES)
def test_zeros_and_numbers_that_are_none(kind):
    x = torch.ones(4, 16)
    x[0], x[1], x[2, 3], x[3, 5] = 0, 1e-38, torch.nan, torch.inf
    scales, inverse = scale_of(x, TYPES[kind])
    read = widened(to_8_bits(x * inverse[..., None], TYPES[kind]), scales)
    assert torch.equal(read[0], x[0]) and torch.equal(read[1], x[0])
    assert read[2].isnan().all() and not read[3].isfinite().all()


def eight_bits(case: Case, dtype: torch.dtype, constant: bool = False) -> Case:
    """`case` with its caches in 8 bits, and the keys and values that these stand for. What the cache holds of no
    request is NaN or the largest number.
    """
    caches, entries = [], []
    for cache, of_requests in ((case.k_cache, case.keys), (case.v_cache, case.values)):
        values = torch.full(cache.shape, 127, dtype=torch.int8).transpose(1, 2).contiguous().transpose(1, 2)
        scales = torch.full((cache.shape[0], cache.shape[2], cache.shape[1]), torch.nan).transpose(1, 2)
        values[0], scales[0] = 0, 1.0
        if constant:
            scales = torch.tensor(0.01 if dtype == FP8 else 0.03).expand(scales.shape)
        scaled = ScaledCache(values.view(dtype), scales, constant)
        read = []
        for x, table in zip(of_requests, case.meta.block_table):
            positions = torch.arange(len(x))
            slots = table[positions // cache.shape[1]].long() * cache.shape[1] + positions % cache.shape[1]
            store(scaled, slots, x.to(case.q.dtype))
            blocks, offsets = slots // cache.shape[1], slots % cache.shape[1]
            read.append(widened(values[blocks, offsets].view(dtype), scales[blocks, offsets]))
        caches.append(scaled)
        entries.append(read)
    return replace(case, k_cache=caches[0], v_cache=caches[1], keys=entries[0], values=entries[1])


def latents_in_8_bits(case: Case, dtype: torch.dtype, rank: int, constant: bool = False) -> Case:
    """The same for a latent cache, with NaN for the scales of latents of no request."""
    blocks, block_size, _, width = case.k_cache.shape
    values = torch.full((blocks, 1, block_size, width), 127, dtype=torch.int8).transpose(1, 2)
    scales = torch.full((blocks, block_size, 1, 2), torch.nan)
    values[0], scales[0] = 0, 1.0
    if constant:
        scales = torch.tensor(0.01 if dtype == FP8 else 0.03).expand(scales.shape)
    latents, keys = ScaledLatents(values.view(dtype), scales, rank, constant), []
    for x, table in zip(case.keys, case.meta.block_table.cpu()):
        positions = torch.arange(len(x))
        at = table[positions // block_size].long(), positions % block_size
        store(latents, at[0] * block_size + at[1], x.to(case.q.dtype))
        keys.append(latents.widened(values[at].view(dtype), scales[at]))
    device = case.q.device
    latents = ScaledLatents(latents.values.to(device), scales.to(device), rank, constant)
    return replace(case, k_cache=latents, v_cache=latents.latent, keys=keys, values=[k[..., :rank] for k in keys])


def backend_of(request, name: str, **changes):
    if name in ("cpu_native", "cpu_fixed"):
        request.getfixturevalue("native_kernels")
    values = dict(
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        dtype=torch.float32,
        device=CPU,
        kv_dtype=torch.int8,
        kv_scales="token",
    )
    return select_backend((), [AttentionSpec(**values | changes)], name).backend


NAMES = [name for name in BACKENDS if name.startswith("cpu_")]
# every pair of a block size, of heads and of a window
SIZES = [
    ((5, 16)[(i + j) % 2], *heads, *windows)
    for i, heads in enumerate((((4, 4), 16), ((4, 2), 64), ((6, 1), 80), ((16, 2), 128)))
    for j, windows in enumerate(((None, None), (24, None), (None, 5.0)))
]


@pytest.mark.slow
@pytest.mark.parametrize("block_size, heads, head_dim, window, soft_cap", SIZES)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("name", NAMES)
def test_equals_dense_attention_over_the_stored_numbers(
    request, name, kind, batch, block_size, heads, head_dim, window, soft_cap
):
    shape = {"num_heads": heads[0], "num_kv_heads": heads[1], "head_dim": head_dim, "block_size": block_size}
    backend = backend_of(request, name, **shape)
    case = eight_bits(make_case(backend, *BATCHES[batch], **shape), TYPES[kind])
    backend.build(case.meta)
    out = backend.forward(case.q, case.k_cache, case.v_cache, case.meta, 0.2, window, soft_cap)
    torch.testing.assert_close(out, dense(case, 0.2, window, soft_cap), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("name", NAMES)
def test_constant_scales(request, name, kind, batch):
    """The scale of a checkpoint may be too small for some entries, which become the largest number."""
    backend = backend_of(request, name, kv_scales="layer", head_dim=32)
    plain = make_case(backend, *BATCHES[batch], head_dim=32)
    case = eight_bits(plain, TYPES[kind], constant=True)
    largest = case.k_cache.scales[0, 0, 0] * LARGEST[TYPES[kind]]
    before = torch.cat([k.flatten() for k in plain.keys]).clamp(-largest, largest)
    after = torch.cat([k.flatten() for k in case.keys])
    assert (before - after).abs().max() < (0.016 if kind == "int8" else 0.2)
    backend.build(case.meta)
    out = backend.forward(case.q, case.k_cache, case.v_cache, case.meta, 0.2)
    torch.testing.assert_close(out, dense(case, 0.2), rtol=2e-4, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(3, 32, 16), (20, 64, 16), (16, 256, 32)])  # heads, rank, rotary width
@pytest.mark.parametrize("block_size, constant", [(5, False), (16, False), (16, True)])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("name", NAMES)
def test_latents(request, name, kind, batch, block_size, sizes, constant):
    heads, rank, rope = sizes
    shape = {"num_heads": heads, "num_kv_heads": 1, "head_dim": rank + rope, "v_head_dim": rank, "latent": True}
    backend = backend_of(request, name, **shape, kv_scales="layer" if constant else "token")
    plain = make_case(backend, *BATCHES[batch], **shape, block_size=block_size)
    case = latents_in_8_bits(plain, TYPES[kind], rank, constant)
    backend.build(case.meta)
    out = backend.forward(case.q, case.k_cache, case.v_cache, case.meta, 0.1)
    torch.testing.assert_close(out, dense(case, 0.1), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("kind", TYPES)
def test_rotary_keys_have_a_scale_of_their_own(kind):
    """Latents are normalized, rotary keys may be 50 times as large: with one scale for both, integers would lose the
    latents.
    """
    backend, sizes = select_backend(("cpu_paged",), [], None).backend, {"head_dim": 80, "v_head_dim": 64}
    case = make_case(backend, [1, 9], [500, 300], num_kv_heads=1, latent=True, **sizes)
    case.q[..., 64:] /= 50
    for k in case.keys:
        k[..., 64:] *= 50
    exact = dense(case, 0.1)
    case = latents_in_8_bits(case, TYPES[kind], 64)
    backend.build(case.meta)
    out = backend.forward(case.q, case.k_cache, case.v_cache, case.meta, 0.1)
    assert (out - exact).norm() / exact.norm() < (0.01 if kind == "int8" else 0.04)
    worse = replace(case, keys=[one_scale(k, TYPES[kind]) for k in case.keys])
    worse.values = [k[..., :64] for k in worse.keys]
    assert (dense(worse, 0.1) - exact).norm() / exact.norm() > 0.1 or kind == "fp8"


def one_scale(x: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    scales, inverse = scale_of(x, kind)
    return widened(to_8_bits(x * inverse[..., None], kind), scales)


@pytest.mark.parametrize("kind", TYPES)
def test_distance_from_attention_without_rounding(kind):
    """Random keys and values, whose errors average out over many keys."""
    backend = select_backend(("cpu_paged",), [], None).backend
    case = make_case(backend, [1, 9], [500, 300], head_dim=64)
    exact, case = dense(case, 64**-0.5), eight_bits(case, TYPES[kind])
    backend.build(case.meta)
    out = backend.forward(case.q, case.k_cache, case.v_cache, case.meta, 64**-0.5)
    assert (out - exact).norm() / exact.norm() < (0.01 if kind == "int8" else 0.04)


def test_a_page_holds_its_scales():
    """A head of 128 entries takes 132 bytes instead of 256 in bfloat16."""
    plain, scaled = Full(8, 128, 128, 2), Full(8, 128, 128, 1, scale_bytes=4)
    assert plain.page_bytes(16) / scaled.page_bytes(16) == pytest.approx(256 / 132)
    assert Full(8, 128, 128, 1).page_bytes(16) * 2 == plain.page_bytes(16)  # constant scales
    assert Latent(576, 64, 2).page_bytes(16) / Latent(576, 64, 1, 4).page_bytes(16) == 1152 / 584  # DeepSeek
    window = Window(2, 96, 64, 1, 24, scale_bytes=4)
    plan = plan_cache([scaled, window])
    assert plan.layer_page_bytes(16) % 128 == plan.layer_page_bytes(16) % 96 == 0


@pytest.mark.parametrize("heads", [(2, 2), (2, 1)])
@pytest.mark.parametrize("kind", TYPES)
def test_layers_share_pages_with_their_scales(kind, heads):
    """Layers of equal and of unequal shapes: each reads its own keys and values after all have written, and all memory
    that the plan counts is theirs.
    """
    torch.manual_seed(0)
    layers = [Attention(4, heads[0], 16, 0), Attention(2, heads[1], 16, 1, sliding_window=24)]
    storage = KVStorage(TYPES[kind])
    plan = plan_cache([layer.cache_spec(1, 4) for layer in layers])
    allocate(layers, plan, 6, 4, storage, CpuPlatform())
    tensors = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for layer in layers
               for c in (layer.k_cache, layer.v_cache) for t in (c.values, c.scales)}  # fmt: skip
    assert sum(tensors.values()) == 6 * plan.page_bytes(4)
    starts, lengths = torch.tensor([0, 6], dtype=torch.int32), torch.tensor([6], dtype=torch.int32)
    backend, written = select_backend(("cpu_paged",), [], None).backend, []
    for layer, blocks in zip(layers, ([5, 2], [1, 3])):
        slots = torch.tensor([blocks[p // 4] * 4 + p % 4 for p in range(6)])
        table = torch.tensor([blocks], dtype=torch.int32)
        meta = AttentionMetadata(backend, slots, starts, lengths, table, 6, 6)
        q, k, v = (torch.randn(6, n, 16) for n in (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads))
        backend.build(meta)
        written.append((layer, q, meta, layer(q, k, v, meta)))
    for layer, q, meta, out in written:
        backend.build(meta)
        assert torch.equal(layer.attend(q, meta), out)


@pytest.mark.parametrize("constants", [None, {0: (0.1, 0.2), 1: (0.1, 0.2)}])
def test_all_of_the_memory_is_made_resident(constants):
    """Keys, values and, if tokens have scales, the scales of both."""
    layers = [Attention(4, 2, 64, i) for i in range(2)]
    storage = KVStorage(torch.int8, constants)
    plan = plan_cache([layer.cache_spec(1, storage.scale_bytes) for layer in layers])
    allocate(layers, plan, 8, 16, storage, CpuPlatform())
    warmer = Warmer(layers)
    try:
        assert warmer._size >= 8 * plan.page_bytes(16)
    finally:
        warmer.stop()


@pytest.mark.parametrize("constants", [None, {0: (0.1, 0.1), 1: (0.2, 0.2)}])
def test_latents_fill_their_pages(constants):
    """All memory that the plan counts is theirs, and is made resident."""
    layers = [LatentAttention(4, LatentSizes(32, 16, 8, 24), i, 1.0) for i in range(2)]
    storage = KVStorage(torch.int8, constants)
    plan = plan_cache([layer.cache_spec(1, storage.scale_bytes) for layer in layers])
    allocate(layers, plan, 6, 4, storage, CpuPlatform())
    for i, layer in enumerate(layers):
        assert layer.v_cache.values.data_ptr() == layer.k_cache.values.data_ptr()
        assert constants is None or layer.k_cache.scales[3, 1, 0].tolist() == pytest.approx(constants[i])
    warmer = Warmer(layers)
    try:
        assert warmer._size >= 6 * plan.page_bytes(4)
    finally:
        warmer.stop()


def test_prefixes_that_requests_share(request):
    """Requests with the same blocks at the start of their tables, long enough for the keys to be read once."""
    pytest.importorskip("numpy")
    for kind, name in itertools.product(TYPES, NAMES):
        backend = backend_of(request, name, num_heads=8, num_kv_heads=2, head_dim=64)
        case = make_case(backend, [1] * 6, [400] * 6, num_heads=8, num_kv_heads=2, head_dim=64)
        case.meta.block_table[:, :20] = case.meta.block_table[0, :20]
        for entries in (case.keys, case.values):
            for x in entries[1:]:
                x[:320] = entries[0][:320]
        case = eight_bits(case, TYPES[kind])
        backend.build(case.meta)
        out = backend.forward(case.q, case.k_cache, case.v_cache, case.meta, 0.2)
        torch.testing.assert_close(out, dense(case, 0.2), rtol=2e-4, atol=2e-4)
