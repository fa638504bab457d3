"""Products of many rows as fixed-point numbers (csrc/gemm_fixed.h), by vectors of either width, and attention
(csrc/attention_avx2.h), with AVX2: how exact they are, against float64, and what they do with what is extreme.
"""

from __future__ import annotations

import random

import pytest
import torch

from quire.worker.cpu import build
from quire.worker.cpu import ops as cpu_ops
from quire.worker.cpu.native_linear import PackedLinear, QuantizedLinear
from tests.helpers.worker.native_kernels import installed, usable_levels
from tests.worker.cpu.test_kernels import random_quantized
from tests.worker.cpu.test_native_attention import dense_attention

pytestmark = pytest.mark.slow

FIXED, FLOATS = 0, 3  # paths of 6 rows and more (AVX2: 9); of float32 outputs from 33 on


@pytest.fixture(autouse=True, scope="module", params=[level for level in usable_levels() if level != "amx"])
def level(request):
    with installed(request.param, build.build(request.param, build.cache_folder())):
        yield request.param


@pytest.fixture
def attention(level):
    if level != "avx2":
        pytest.skip("attention by AVX-512 has floats")


def _gaussian(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


def _heavy_tailed(*shape: int) -> torch.Tensor:
    return torch.randn(*shape) * torch.exp(1.5 * torch.randn(*shape))


def _with_outliers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape) * (1 + 999 * (torch.rand(*shape) < 0.003))


def _linear(weight: torch.Tensor, *args, **kwargs) -> PackedLinear:
    linear = PackedLinear(weight, *args, **kwargs)
    assert linear.compact is not None, "others are multiplied as floats"
    return linear


def _norms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What errors are relative to: the most that each product can be."""
    return x.double().norm(dim=1)[:, None] * weight.double().norm(dim=1)


@pytest.mark.parametrize("of", [_gaussian, _heavy_tailed, _with_outliers])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(33, 64, 256), (64, 96, 1024), (100, 45, 1000), (40, 64, 3072), (300, 33, 77)]
)
def test_error_is_a_fraction_of_what_rounding_to_bfloat16_makes(of, m, n, k):
    torch.manual_seed(k)
    exact, weight = of(m, k), of(n, k).mul(0.02).bfloat16()
    x = exact.bfloat16()
    want, norms = x.double() @ weight.double().T, _norms(x, weight)
    linear = _linear(weight)
    rounding = (((x.double() - exact.double()) @ weight.double().T) / norms).pow(2).mean().sqrt()
    error = (linear(x, torch.float32, FIXED).double() - want) / norms
    assert error.pow(2).mean().sqrt() < 0.4 * rounding
    assert error.abs().max() < 1e-3  # what is proven: each side is off by at most 16 half steps of 1/16000
    assert ((linear(x, torch.float32, FLOATS).double() - want) / norms).abs().max() < 2e-6


@pytest.mark.parametrize("m", [9, 17, 31, 500])
@pytest.mark.parametrize("gated", [None, "silu"])
def test_small_integers_are_exact(m, gated):
    torch.manual_seed(m)
    x, weight, bias = (
        torch.randint(-9, 10, (m, 700)).bfloat16(),
        torch.randint(1, 10, (70, 700)).bfloat16(),
        torch.randn(70).bfloat16(),
    )
    weight *= torch.randn(70, 700).sign()
    linear = _linear(weight, bias, gated=gated)
    assert torch.equal(linear(x, path=FIXED), linear(x, path=FLOATS))


@pytest.mark.parametrize("k", [256, 640])
def test_no_sum_overflows(k):
    """Rows and columns of one direction make the largest sums that there can be: all entries equal, or one that is
    everything, of either sign.
    """
    kinds = [
        torch.full((k,), 1.99),
        torch.full((k,), -1.99),
        torch.eye(k)[7] * 255,
        torch.eye(k)[7] * -255,
        torch.linspace(-3, 3, k),
        torch.full((k,), 2.0**50),
        torch.full((k,), 2.0**-50),
    ]
    x, weight = torch.stack(kinds * 7).bfloat16(), torch.cat([torch.stack(kinds), torch.randn(400, k)]).bfloat16()
    want = x.double() @ weight.double().T
    got = _linear(weight)(x, torch.float32, FIXED).double()
    assert ((got - want).abs() <= 2e-4 * _norms(x, weight)).all()
    assert torch.allclose(got[:, :4], want[:, :4], rtol=1e-6) and got[0, 0] > 3.9 * k


def test_zeros_and_what_is_not_finite():
    torch.manual_seed(0)
    x, weight = torch.randn(48, 600).bfloat16(), torch.randn(128, 600).bfloat16()
    x[3], weight[5] = 0, 0
    x[7, 300], x[9, 599] = float("inf"), float("nan")
    got = _linear(weight)(x, torch.float32, FIXED)
    others = [row for row in range(48) if row not in (7, 9)]
    assert (got[3] == 0).all() and (got[others, 5] == 0).all() and got[others].isfinite().all()
    assert not got[[7, 9]][:, [c for c in range(128) if c != 5]].isfinite().any()
    weight[11, 450] = 3e38  # a norm that no float can square
    got = _linear(weight)(x, torch.float32, FIXED)
    assert not got[[0, 1, 47], 11].isfinite().any() and got[0, :11].isfinite().all()


@pytest.mark.parametrize("k", [333, 2112])
def test_rows_do_not_depend_on_each_other_beyond_eight(level, k):
    torch.manual_seed(k)
    weight, x = torch.randn(96, k).bfloat16(), torch.randn(1500, k + 5).bfloat16()[:, :k]  # rows in several chunks
    linear = _linear(weight)
    together, floats = linear(x, path=FIXED), linear(x, path=FLOATS)
    for m in (9, 16, 17, 40, 300, 1499):
        assert torch.equal(linear(x[:m], path=FIXED), together[:m])
    few = 8 if level == "avx2" else 5
    assert torch.equal(linear(x[:few], path=FIXED), floats[:few]) and not torch.equal(together, floats)
    assert torch.equal(linear(x[: few + 1], path=FIXED), together[: few + 1])
    logits = linear(x[:32], torch.float32, FIXED)
    assert torch.equal(logits, linear(x[:32], torch.float32, FLOATS)) and not torch.equal(
        logits, linear(x, torch.float32, FIXED)[:32]
    )


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64, 128, 512, -1])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 33, 640), (100, 70, 1000), (300, 32, 77)])
def test_quantized_weights(bits, group, m, n, k):
    torch.manual_seed(k)
    for with_offsets in (False, True):
        values, scales, offsets, weight = random_quantized(random.Random(0), n, k, bits, group, with_offsets)
        linear, x = (
            QuantizedLinear.from_values(values, scales, offsets, bits, group, None),
            torch.randn(m, k).bfloat16(),
        )
        error = (linear(x, torch.float32, path=3).double() - x.double() @ weight.T) / _norms(x, weight)
        assert error.pow(2).mean().sqrt() < 3e-5 and error.abs().max() < 3e-4
        if m >= 96:
            assert torch.equal(linear(x), linear(x, path=3)) and not torch.equal(linear(x), linear(x, path=1))


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One request, its keys and values in blocks of 16."""
    length, heads, head_dim = k.shape
    blocks = -(-length // 16)
    caches = [torch.zeros(blocks, 16, heads, head_dim, dtype=torch.bfloat16) for _ in range(2)]
    for cache, x in zip(caches, (k, v)):
        cache.view(-1, heads, head_dim)[:length] = x
    return cpu_ops.paged_attention(
        q,
        *caches,
        torch.arange(blocks)[None].int(),
        torch.tensor([length]).int(),
        torch.tensor([0, len(q)]).int(),
        head_dim**-0.5,
    )


@pytest.mark.parametrize("of", [_gaussian, _heavy_tailed])
@pytest.mark.parametrize(
    ("tokens", "length", "group", "head_dim"),
    [(16, 16, 2, 32), (40, 300, 1, 64), (200, 333, 3, 128), (50, 130, 8, 288)],
)
def test_attention_is_as_exact_as_its_results_can_be(attention, of, tokens, length, group, head_dim):
    """Beside the rounding of the results to bfloat16, that of keys, values and their weights hardly shows."""
    torch.manual_seed(tokens)
    q, k, v = (
        torch.randn(tokens, 2 * group, head_dim).bfloat16(),
        torch.randn(length, 2, head_dim).bfloat16(),
        of(length, 2, head_dim).bfloat16(),
    )
    want = dense_attention(q, k, v, head_dim**-0.5, None, None)
    error, rounding = (_attend(q, k, v).double() - want), want.bfloat16().double() - want
    assert error.pow(2).mean().sqrt() < 1.02 * rounding.pow(2).mean().sqrt()


def test_attention_to_values_of_any_size(attention):
    """An entry a thousand times as large as others takes from the precision of its column's, and is not lost; nor is
    what is tiny throughout.
    """
    torch.manual_seed(0)
    for scale in (1e-15, 1.0, 1e15):
        q, k, v = (
            torch.randn(60, 4, 64).bfloat16(),
            torch.randn(200, 2, 64).bfloat16(),
            (_with_outliers(200, 2, 64) * scale).bfloat16(),
        )
        error = (_attend(q, k, v).double() - dense_attention(q, k, v, 0.125, None, None)).abs()
        assert (error <= 2**-8 * v.double().abs().amax(0).repeat_interleave(2, 0)).all()
    v[3, 1, 5] = float("inf")
    got = _attend(q, k, v)
    assert not got[:, 2:, 5].isfinite().any() and got[:, :2].isfinite().all() and got[:, 2:, 6:].isfinite().all()


def test_attention_goes_by_fixed_point_from_32_rows_on(attention):
    """What 128 keys share shows where one value, that counts for nothing, is 2^24 times as large as the others: 32 rows
    lose these, 24 rows, as floats, do not.
    """
    torch.manual_seed(0)
    q, k, v = torch.ones(16, 2, 64).bfloat16(), torch.randn(60, 1, 64).bfloat16(), 1 + torch.rand(60, 1, 64).bfloat16()
    k[0], v[0] = -1000, 2.0**24
    assert (_attend(q, k, v) == 0).all()
    assert (_attend(q[:12], k, v) >= 1).all()
