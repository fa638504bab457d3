"""The native kernels over keys and values in 8 bits, at every instruction-set level that this CPU supports: what they
store is what plain torch stores, and attention is that of the numbers that the cache stands for.
"""

from __future__ import annotations

import random

import pytest
import torch

from quire.worker.attention.scaled import FP8, ScaledCache, ScaledLatents, scale_of, store, to_8_bits, widened
from quire.worker.cpu import ops as cpu_ops
from quire.worker.platforms.ops import Ops
from tests.helpers.worker.native_kernels import DTYPES, ROUNDING, assert_near
from tests.worker.cpu.test_native_attention import _paged_case, _sharing_case, dense_attention

TYPES = [torch.int8, FP8]


def scaled_cache(shape: tuple[int, ...], dtype: torch.dtype, constant: bool, heads_first: bool) -> ScaledCache:
    """A cache whose scales are NaN, which exposes any read of an unwritten slot, or the constant 0.02."""
    num_blocks, block_size, heads, dim = shape
    order = (num_blocks, heads, block_size) if heads_first else (num_blocks, block_size, heads)
    values, scales = torch.full((*order, dim), 99, dtype=torch.int8), torch.full(order, torch.nan)
    if heads_first:
        values, scales = values.transpose(1, 2), scales.transpose(1, 2)
    if constant:
        scales = torch.tensor(0.02).expand(scales.shape)
    return ScaledCache(values.view(dtype), scales, constant)


def equal(a: ScaledCache, b: ScaledCache) -> bool:
    scales = torch.equal(a.scales.nan_to_num(7), b.scales.nan_to_num(7))
    return scales and torch.equal(a.values.view(torch.int8), b.values.view(torch.int8))


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_write_kv(kernels, rng, dtype, kind, constant):
    """Every bit, with entries of all sizes, heads of zeros, and more than a constant scale reaches."""
    tokens, heads, dim = rng.choice([1, 40]), rng.choice([1, 3]), rng.choice([5, 64, 128])
    shape, heads_first = (50, rng.choice([1, 5, 16]), heads, dim), rng.random() < 0.5
    slots = torch.randperm(50 * shape[1])[:tokens]
    both = torch.randn(tokens, 2 * heads, dim) * torch.exp2(torch.randint(-14, 3, (tokens, 2 * heads, 1)).float())
    both[torch.rand(both.shape[:2]) < 0.1] = 0
    both[..., ::3] *= 2.0**-7  # subnormal in e4m3
    k, v = both.to(dtype).split(heads, 1)
    ours, twins = ([scaled_cache(shape, kind, constant, heads_first) for _ in range(2)] for _ in range(2))
    cpu_ops.write_kv(k, v, *ours, slots)
    for twin, x in zip(twins, (k, v)):
        store(twin, slots, x)
    assert all(equal(*pair) for pair in zip(ours, twins))


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_qk_norm_rope_write(kernels, rng, dtype, kind):
    """Keys are rounded to the type of the activations before they are rounded to 8 bits, as in the twin. Their norms
    and rotations may differ in the last bit.
    """
    tokens, heads, kv_heads, dim = rng.choice([1, 33]), rng.choice([4, 6]), rng.choice([1, 2]), rng.choice([16, 64, 80])
    slots, positions = torch.randperm(40 * 16)[:tokens], torch.randint(0, 100, (tokens,))
    qkv, table = torch.randn(tokens, (heads + 2 * kv_heads) * dim).to(dtype), torch.randn(100, dim)
    weights = torch.randn(2, dim).to(dtype) if rng.random() < 0.6 else (None, None)
    ours, twins = ([scaled_cache((40, 16, kv_heads, dim), kind, False, True) for _ in range(2)] for _ in range(2))
    want = Ops().qk_norm_rope_write(qkv.clone(), *weights, 1e-6, table, positions, *twins, slots, heads)
    got = cpu_ops.qk_norm_rope_write(qkv.clone(), *weights, 1e-6, table, positions, *ours, slots, heads)
    assert_near(got, want, 3 * ROUNDING[dtype])
    assert equal(ours[1], twins[1])
    blocks, offsets = slots // 16, slots % 16
    read = [widened(c.values[blocks, offsets], c.scales[blocks, offsets]) for c in (ours[0], twins[0])]
    step = twins[0].scales[blocks, offsets][..., None] if kind == torch.int8 else read[1].abs() / 8
    assert ((read[0] - read[1]).abs() <= step * 1.01 + 3 * ROUNDING[dtype] * (1 + read[1].abs())).all()
    assert int((~ours[0].scales.isnan()).sum()) == tokens * kv_heads


def in_8_bits(arguments: tuple, kind: torch.dtype) -> tuple[tuple, torch.Tensor]:
    """(arguments of `paged_attention` over caches in 8 bits, the result over the numbers these stand for)."""
    q, k_cache, v_cache, table, lengths, starts, *options = arguments
    if k_cache.data_ptr() == v_cache.data_ptr():
        rank = v_cache.shape[3]
        values, scales = zip(*(in_bytes(part, kind) for part in (k_cache[..., :rank], k_cache[..., rank:])))
        latents = ScaledLatents(torch.cat(values, -1), torch.stack(scales, -1), rank)
        caches, k = (latents, latents.latent), latents.widened(latents.values, latents.scales).nan_to_num(0.0)
        numbers = k, k[..., :rank]
    else:
        caches = [ScaledCache(*in_bytes(cache, kind)) for cache in (k_cache, v_cache)]
        numbers = [widened(cache.values, cache.scales).nan_to_num(0.0) for cache in caches]
    want = []
    for i, length in enumerate(lengths.tolist()):
        k, v = (x[table[i].long()].flatten(0, 1)[:length] for x in numbers)
        want.append(dense_attention(q[starts[i] : starts[i + 1]], k, v, *options))
    return (q, *caches, table, lengths, starts, *options), torch.cat(want)


def in_bytes(x: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(bytes, scales) of a cache. The scales are NaN where nothing was written."""
    scales, inverse = scale_of(x, kind)
    return to_8_bits((x.float() * inverse[..., None]).nan_to_num(99.0), kind), scales


def check(arguments: tuple, kind: torch.dtype, dtype: torch.dtype) -> None:
    arguments, want = in_8_bits(arguments, kind)
    # AMX multiplies keys, values and the weights of the softmax rounded to bfloat16
    roundings = 7 if cpu_ops.has_amx() else 4
    for path in range(4):
        got = cpu_ops.paged_attention(*arguments, path=path)
        assert_near(got, want, max(roundings * ROUNDING[dtype], 3e-5))


@pytest.mark.slow
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256])
def test_attention_decode(kernels, rng, dtype, head_dim, kind):
    contexts = [rng.choice([0, 1, 15, 16, 63, 255, 256, 300, 700]) for _ in range(4)]
    check(_paged_case(rng, dtype, [1] * 4, contexts, head_dim)[0], kind, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 64, 96, 128])
def test_attention_prefill_and_mixed(kernels, rng, dtype, head_dim, kind):
    check(_paged_case(rng, dtype, [1, 40, 3, 130], [200, 5, 140, 64], head_dim)[0], kind, dtype)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_to_values_of_another_size(kernels, rng, dtype, kind):
    for head_dim, v_dim in ((192, 128), (32, 64)):
        check(_paged_case(rng, dtype, [1, 40, 3], [200, 5, 140], head_dim, None, 16, v_dim)[0], kind, dtype)


# runs of 256 entries, of which all but the last, or none, have one scale, and a width that AMX does not multiply
LATENTS = [(576, 512), (288, 256), (96, 64), (80, 64)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", LATENTS)
def test_attention_over_latents(kernels, rng, dtype, sizes, kind):
    """Rotary keys are larger than latents, or smaller: each has its scale."""
    width, rank = sizes
    for query_lens, contexts in (([1] * 3, [0, 130, 300]), ([1, 40, 3], [200, 5, 140])):
        group, block_size = rng.choice([1, 4, 16, 40]), rng.choice([5, 16])
        arguments, _ = _paged_case(rng, dtype, query_lens, contexts, width, group, block_size, rank, True)
        factor = rng.choice([8.0, 1 / 8])
        arguments[1][..., rank:] *= factor
        arguments[0][..., rank:] /= factor
        check(arguments, kind, dtype)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_write_latents(kernels, rng, dtype, kind):
    """Every bit, of parts of different sizes."""
    slots, x = torch.randperm(80)[:30], torch.randn(30, 1, 72).to(dtype)
    x[..., 64:] *= 30
    values, scales = torch.full((2, 5, 16, 1, 72), 99, dtype=torch.int8), torch.full((2, 5, 16, 1, 2), torch.nan)
    ours, twin = (ScaledLatents(v.view(kind), s, 64) for v, s in zip(values, scales))
    cpu_ops.write_kv(x[..., :64], x[..., 64:], ours.latent, ours.rope, slots)
    store(twin, slots, x)
    assert torch.equal(*values) and torch.equal(*scales.nan_to_num(7))


@pytest.mark.slow
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_over_shared_keys(kernels, rng, dtype, kind):
    """Every path; in a fixed order the bits are those of private blocks."""
    shared, private, _ = _sharing_case(rng, dtype, 64)
    check(shared, kind, dtype)
    got, alone = (cpu_ops.paged_attention(*in_8_bits(case, kind)[0], path=2) for case in (shared, private))
    assert torch.equal(got, alone)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_of_a_chunk_is_that_of_its_tokens_one_by_one(kernels, rng, dtype, kind):
    """On the fixed-order path, which `--deterministic` uses."""
    case = _paged_case(rng, dtype, [1, 70, 9], [200, 500, 5], 64)[0]
    (q, k_cache, v_cache, table, lengths, starts, *rest), _ = in_8_bits(case, kind)
    request = torch.repeat_interleave(torch.arange(3), starts.diff())
    seen = (lengths[request] - starts[1:][request] + torch.arange(len(q)) + 1).int()
    one_by_one = table[request], seen, torch.arange(len(q) + 1).int()
    alone = cpu_ops.paged_attention(q, k_cache, v_cache, *one_by_one, *rest, path=2)
    assert torch.equal(cpu_ops.paged_attention(q, k_cache, v_cache, table, lengths, starts, *rest, path=2), alone)


def test_a_number_that_is_none_stays_in_its_request(kernels):
    """NaN in a value makes its scale NaN, and no other request reads it."""
    case = _paged_case(random.Random(0), torch.bfloat16, [1, 1], [40, 40], 64, 2, 16)[0]
    (q, k_cache, v_cache, table, *rest), want = in_8_bits(case, torch.int8)
    v = torch.ones(1, k_cache.shape[2], 64).to(torch.bfloat16)
    v[..., 5] = torch.nan
    cpu_ops.write_kv(torch.zeros_like(v), v, k_cache, v_cache, torch.tensor([int(table[0, 2]) * 16 + 8]))
    got = cpu_ops.paged_attention(q, k_cache, v_cache, table, *rest)
    assert got[0].isnan().all()
    assert_near(got[1:], want[1:], 4 * ROUNDING[torch.bfloat16])
