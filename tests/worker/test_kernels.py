"""Compares the native CPU kernels with references in plain torch, on random shapes including odd ones, at every
instruction-set level that this CPU supports.
"""

from __future__ import annotations

import os
import random
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from quire.checkpoints.gguf.header import BLOCKS
from quire.worker.cpu import build, native, native_linear
from quire.worker.cpu import ops as cpu_ops
from quire.worker.layers.activation import silu_and_mul
from quire.worker.layers.norm import add_rms_norm, rms_norm
from quire.worker.layers.quantization.gguf_blocks import dequantize
from quire.worker.layers.rotary import apply_rotary
from quire.worker.platforms.cpu import CpuPlatform
from quire.worker.sampling import arithmetic as sampling_math
from quire.worker.sampling import logprobs
from tests.gguf_files import blocks_of

LEVELS = list(build.LEVELS)
TINY_MODEL = Path(__file__).parents[2] / "configs" / "quire-tiny"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Relative error of one rounding, with a margin for a different order of summation.
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}


def usable_levels() -> list[str]:
    best = build.cpu_level()
    return LEVELS[LEVELS.index(best) :] if best and build.compiler() else []


@contextmanager
def installed(level: str, library: Path):
    """Make `library` the process's kernels within the context."""
    kernels, loaded = native.KERNELS, native.Kernels()
    loaded.level = level
    assert loaded._open(str(library)), loaded.status
    saved = kernels.lib, kernels.level
    kernels.lib, kernels.level = loaded.lib, level
    yield
    kernels.lib, kernels.level = saved


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(level, marks=[] if level == build.cpu_level() else pytest.mark.slow) for level in usable_levels()
    ],
)
def kernels(request):
    """Install the kernels of each level in turn, and return the level.

    They are compiled on first use (seconds) and cached.
    """
    with installed(request.param, build.build(request.param, build.cache_folder())):
        yield request.param


@pytest.fixture(params=range(6))
def rng(request):
    torch.manual_seed(request.param)
    return random.Random(request.param)


def assert_near(got: torch.Tensor, want: torch.Tensor, relative: float, scale: float | None = None) -> None:
    """Assert that each element's error is within 2 * `relative` times the sum of its own size and a typical element's.
    The typical size allows for cancellation, which makes small elements less exact.
    """
    got, want = got.float(), want.float()
    typical = want.abs().mean().item() if scale is None else scale
    excess = (got - want).abs() - 2 * relative * (want.abs() + typical)
    assert not torch.isnan(got).any() and excess.max() <= 0, (
        f"off by {(got - want).abs().max().item():.3g}, typical value {typical:.3g}"
    )


# --- matrix product
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [1, 2, 3, 5, 8, 13, 16, 17, 32, 33, 64, 100, 290])
def test_packed_linear(kernels, m):
    rng = random.Random(m)
    torch.manual_seed(m)
    for _ in range(3):
        # k = 2200 with 290 rows exceeds what a product computes in one pass
        n, k = rng.choice([1, 5, 31, 32, 33, 64, 200, 1000]), rng.choice([1, 2, 7, 31, 32, 33, 96, 333, 2200])
        weight, x = torch.randn(n, k).bfloat16(), torch.randn(m, k + 3).bfloat16()[:, :k]
        bias = torch.randn(n).bfloat16() if rng.random() < 0.5 else None
        linear = native_linear.PackedLinear(weight, bias)
        want = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        plain = native_linear.PackedLinear(weight, bias, compact=False)
        for got, path in ((linear, 0), (linear, 3), (plain, 0), (plain, 1), (plain, 3)):
            error = 2e-5 if kernels != "amx" and path == 0 and m > 32 else 1e-6  # test_fixed_point.py tests this
            assert_near(got(x, torch.float32, path), want, error * k**0.5, scale=k**0.5)
            assert_near(got(x, path=path), want, 2**-8)
        ids = torch.randint(0, n, (7,), dtype=rng.choice([torch.int32, torch.int64]))
        assert torch.equal(linear.rows(ids), weight[ids])


@pytest.mark.parametrize("m", [1, 3, 16, 20, 33, 300])
@pytest.mark.parametrize(
    "n,k,gated", [(64, 64, None), (33, 100, None), (1000, 2100, None), (90, 333, "silu"), (608, 1024, "silu")]
)
def test_compact_weights_change_no_bit(kernels, m, n, k, gated):
    torch.manual_seed(n + m)
    weight, x = torch.randn(n, k).bfloat16() * 0.02, torch.randn(m, k).bfloat16()
    # these exponents are far from the others
    weight[torch.randint(n, (9,)), torch.randint(k, (9,))] *= 2.0 ** torch.randint(-30, 30, (9,))
    weight[torch.randint(n, (5,)), torch.randint(k, (5,))] = torch.tensor([0.0, -0.0, 1e-30, 3e4, -1e9]).bfloat16()
    bias = torch.randn(n).bfloat16()
    plain, compact = (native_linear.PackedLinear(weight, bias, gated, compact) for compact in (False, True))
    assert plain.compact is None and compact.compact is not None
    for dtype in (torch.bfloat16,) if gated else (torch.bfloat16, torch.float32):
        # without AMX, path 0 multiplies many rows by compact weights in fixed point
        for path in (0, 3) if kernels == "amx" else (3,):
            assert torch.equal(plain(x, dtype, path), compact(x, dtype, path))
    if not gated:
        assert torch.equal(compact.rows(torch.arange(n)).view(torch.int16), weight.view(torch.int16))


def test_compact_storage(kernels):
    weight = torch.randn(96, 640).bfloat16()
    weight[32:64] = 0  # a whole block
    linear = native_linear.PackedLinear(weight)
    assert linear.packed.nbytes == weight.nbytes * 3 // 4 and len(linear.compact.exceptions) < 0.002 * weight.numel()
    assert torch.equal(linear.rows(torch.arange(96)), weight)
    assert torch.equal(linear(torch.randn(5, 640).bfloat16())[:, 32:64], torch.zeros(5, 32).bfloat16())


def test_a_trained_model_is_compact(kernels):
    for name, weight in load_file(TINY_MODEL / "model.safetensors").items():
        if weight.dim() == 2:
            linear = native_linear.PackedLinear(weight)
            assert linear.compact is not None and len(linear.compact.exceptions) < 0.005 * weight.numel(), name
            assert torch.equal(linear.rows(torch.arange(len(weight))), weight)


@pytest.mark.parametrize("spoil", [float("nan"), float("inf"), 1e-39])
def test_weights_that_are_not_compacted(kernels, spoil):
    weight, x = torch.randn(40, 64).bfloat16(), torch.randn(3, 64).bfloat16()
    weight[7, 9] = spoil
    assert native_linear.PackedLinear(weight).compact is None
    spread = torch.randn(40, 64).bfloat16() * 2.0 ** torch.randint(-12, 12, (40, 64))
    linear = native_linear.PackedLinear(spread.bfloat16())
    plain = native_linear.PackedLinear(spread.bfloat16(), compact=False)
    assert linear.compact is None and torch.equal(linear(x), plain(x))


def test_packed_linear_with_a_long_sum_and_leading_dimensions(kernels):
    weight, x = torch.randn(70, 5000).bfloat16(), torch.randn(3, 11, 5000).bfloat16()  # k spans several runs
    linear = native_linear.PackedLinear(weight)
    got = linear(x, torch.float32, path=3)
    assert got.shape == (3, 11, 70)
    assert_near(got, x.double() @ weight.double().T, 1e-4, scale=70.0)


# 2100: rows are padded; 2112: rows are multiplied in place; 2048: rows are 4 KiB apart and therefore copied
@pytest.mark.parametrize("k", [2100, 2112, 2048])
def test_packed_linear_rows_do_not_depend_on_each_other(kernels, k):
    # k spans several runs, the rows several groups
    weight, x = torch.randn(96, k).bfloat16(), torch.randn(1100, k).bfloat16()
    linear = native_linear.PackedLinear(weight)
    together = linear(x, torch.float32, path=3)
    assert_near(together, x.double() @ weight.double().T, 1e-6 * k**0.5, scale=k**0.5)
    for m in (1, 2, 3, 4, 7, 8, 13, 16, 17, 40, 300, 1099):
        assert torch.equal(linear(x[:m], torch.float32, path=3), together[:m])


@pytest.mark.parametrize("m", [1, 6, 16, 40])
@pytest.mark.parametrize("inter,with_bias", [(16, False), (5, True), (48, True), (200, False)])
def test_packed_gate_up(kernels, m, inter, with_bias):
    torch.manual_seed(inter)
    weight, x = torch.randn(2 * inter, 100).bfloat16() * 0.1, torch.randn(m, 100).bfloat16()
    bias = torch.randn(2 * inter).bfloat16() if with_bias else None
    want = silu_and_mul(F.linear(x.float(), weight.float(), None if bias is None else bias.float()))
    for path in (0, 1):
        assert_near(native_linear.PackedLinear(weight, bias, gated="silu", compact=False)(x, path=path), want, 2**-8)


def test_packed_linear_refuses_other_types(kernels):
    with pytest.raises(ValueError, match="bfloat16"):
        native_linear.PackedLinear(torch.randn(4, 4))
    with pytest.raises(ValueError, match="gate"):
        native_linear.PackedLinear(torch.randn(5, 4).bfloat16(), gated="silu")


def random_quantized(rng: random.Random, n: int, k: int, bits: int, group: int, with_offsets: bool):
    """A random quantized weight: (values, scales, offsets or None, the weight it stands for in float64)."""
    groups = -(-k // group) if group > 0 else 1
    values = (
        torch.randint(-8, 8, (n, k), dtype=torch.int8)
        if bits == 4
        else torch.randint(-128, 128, (n, k), dtype=torch.int8)
    )
    scales = (torch.rand(n, groups) + 0.5).bfloat16() * 2**-bits
    offsets = torch.randn(n, groups).bfloat16() if with_offsets else None
    weight = values.double() * scales.double().repeat_interleave(group if group > 0 else k, 1)[:, :k]
    if with_offsets:
        weight = weight + offsets.double().repeat_interleave(group if group > 0 else k, 1)[:, :k]
    return values, scales, offsets, weight


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 7, 16, 17, 40, 290])
def test_quantized_linear(kernels, bits, m):
    rng = random.Random(m)
    torch.manual_seed(m)
    for _ in range(3):
        n, k, group = (
            rng.choice([1, 5, 32, 33, 200]),
            rng.choice([5, 31, 32, 33, 96, 333, 1100]),
            rng.choice([32, 64, 128, 256, 512, -1]),
        )
        values, scales, offsets, weight = random_quantized(rng, n, k, bits, group, rng.random() < 0.5)
        bias = torch.randn(n).bfloat16() if rng.random() < 0.5 else None
        linear = native_linear.QuantizedLinear.from_values(values, scales, offsets, bits, group, bias)
        x = torch.randn(m, k + 3).bfloat16()[:, :k] * torch.rand(m, 1).bfloat16()
        want = x.double() @ weight.T + (0 if bias is None else bias.double())
        # the total of the terms' relative errors is a fraction of this
        terms = (x.double().square() @ weight.T.square()).sqrt()
        for path in (0, 1, 2, 3):
            # each weight is rounded to bf16
            assert ((linear(x, torch.float32, path) - want).abs() <= 6 * 2**-9 * terms + 1e-5).all()
        largest = x.double().abs().amax(1, keepdim=True) @ weight.T.square().sum(0, keepdim=True).sqrt()
        for path in (1, 2):
            # each x is rounded to 1/32767 of the largest
            assert ((linear(x, torch.float32, path) - want).abs() <= 4 * 2**-16 * largest + 1e-5).all()
        ids = torch.randint(0, n, (7,))
        assert_near(linear.rows(ids), weight[ids], 2**-8, 0.0)


@pytest.mark.parametrize("bits,relative_error", [(8, 0.0067), (4, 0.095)])
def test_quantize(kernels, bits, relative_error):
    """Gaussian weights have the error that the step size predicts; zeros stay zero and tiny groups finite."""
    torch.manual_seed(0)
    weight = (torch.randn(96, 640) * torch.rand(96, 1)).bfloat16()
    weight[3, 64:128] = 0
    weight[4, 64:128] *= 1e-20
    linear = native_linear.QuantizedLinear.quantize(weight, bits, 64)
    got = linear.rows(torch.arange(96)).double()
    error = (got - weight.double()).square().sum(1).sqrt() / weight.double().square().sum(1).sqrt()
    assert error.max() < 1.3 * relative_error and error.mean() < relative_error
    assert not got[3, 64:128].any() and torch.isfinite(got).all()
    x = torch.randn(3, 640).bfloat16()
    assert_near(linear(x, torch.float32), x.double() @ got.T, 2**-7, scale=10.0)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("m", [1, 6, 40])
def test_quantized_gate_up(kernels, bits, m):
    rng = random.Random(m)
    torch.manual_seed(m)
    values, scales, offsets, weight = random_quantized(rng, 2 * 37, 100, bits, 32, True)
    scales, offsets, weight, bias = scales / 8, offsets / 8, weight / 8, torch.randn(74).bfloat16()
    linear = native_linear.QuantizedLinear.from_values(values, scales, offsets, bits, 32, bias, gated="silu")
    x = torch.randn(m, 100).bfloat16()
    assert_near(linear(x), silu_and_mul(F.linear(x.float(), weight.float(), bias.float())), 2**-6)


@pytest.mark.parametrize("kind", native_linear.PACKED_BLOCKS)
def test_packed_blocks(kernels, kind):
    """Blocks of GGUF files, in two parts and with missing rows, as the reference dequantizes them."""
    cases = [(1, 33, 512), (2, 70, 256), (3, 10, 256), (5, 64, 768), (13, 40, 512), (130, 45, 256)]
    if BLOCKS[kind][0] == 32:
        cases.append((3, 9, 320))
    for seed, (m, n, k) in enumerate(cases):
        torch.manual_seed(seed)
        blocks = torch.from_numpy(blocks_of((torch.randn(n, k) * torch.rand(n, 1)).numpy(), kind))
        weight, bias = dequantize(blocks, kind), torch.randn(n + 3)
        parts = [blocks[: n // 3].contiguous(), blocks[n // 3 :].contiguous()]
        linear = native_linear.QuantizedLinear.from_blocks(parts, kind, (n + 3, k), bias)
        held = [t.nbytes for t in (linear.packed, linear.scales, linear.offsets) if t is not None]
        assert sum(held) <= blocks.nbytes / n * linear.columns
        assert torch.equal(linear.rows(torch.arange(n)), weight.bfloat16())
        assert not linear.rows(torch.tensor([n + 2])).any()
        x = torch.randn(m, k).bfloat16()
        x[m // 2] = 0
        want = x.double() @ F.pad(weight, (0, 0, 0, 3)).double().T + bias.double()
        for path in (1, 2):  # 15 bits per entry of x
            assert (linear(x, torch.float32, path) - want).norm() < 1e-4 * want.norm()
        for path in (0, 3):  # with AMX bf16 weights
            assert (linear(x, torch.float32, path) - want).norm() < 4e-3 * want.norm()
        alone = torch.cat([linear(x[i : i + 1], torch.float32, 2) for i in range(m)])
        assert torch.equal(alone, linear(x, torch.float32, 2))


def rounded_to_8_bits(x: torch.Tensor, group: int) -> torch.Tensor:
    """x `[m, k]` in float64, each `group` of k rounded to multiples of 1/127 of its largest entry."""
    groups = F.pad(x.float(), (0, -x.shape[1] % group)).unflatten(1, (-1, group))
    top = groups.abs().amax(2, keepdim=True)
    integers = (groups * torch.where(top > 0, torch.full_like(top, 127) / top, 0)).round()
    return (integers.double() * (top / 127).double()).flatten(1)[:, : x.shape[1]]


def check_narrow(kernels, linear, x, want, tolerance=2e-6) -> None:
    """The products of `linear` are `want`, and the same bits for any number of rows."""
    assert (linear(x, torch.float32, 1) - want).norm() < tolerance * want.norm()
    together = linear(x, path=1)
    assert torch.equal(torch.cat([linear(x[i : i + 1], path=1) for i in range(len(x))]), together)
    if kernels != "amx":
        assert all(torch.equal(linear(x, path=path), together) for path in (0, 2, 3))


@pytest.mark.parametrize("kind", native_linear.PACKED_BLOCKS)
@pytest.mark.parametrize("m", [1, 2, 4, 7, 13, 30, 100])
def test_activations_in_8_bits(kernels, kind, m):
    torch.manual_seed(m)
    n, k = 45, 768
    blocks = torch.from_numpy(blocks_of((torch.randn(n, k) * torch.rand(n, 1)).numpy(), kind))
    bias, x = torch.randn(n), (torch.randn(m, k) * torch.rand(m, 1)).bfloat16()
    x[m // 2] = 0
    x[0, 5] = 40  # an outlier
    linear = native_linear.QuantizedLinear.from_blocks([blocks], kind, (n, k), bias, narrow=True)
    group = 256 if BLOCKS[kind][0] == 256 else 32  # as in llama.cpp
    want = rounded_to_8_bits(x, group) @ dequantize(blocks, kind).double().T + bias.double()
    check_narrow(kernels, linear, x, want)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("m", "k", "group"), [(1, 100, 32), (3, 333, 64), (40, 1100, 128), (9, 700, -1), (6, 1024, 512)]
)
def test_activations_in_8_bits_of_integers(kernels, bits, m, k, group):
    torch.manual_seed(k)
    for with_offsets in (False, True):
        values, scales, offsets, weight = random_quantized(random.Random(0), 70, k, bits, group, with_offsets)
        linear = native_linear.QuantizedLinear.from_values(values, scales, offsets, bits, group, narrow=True)
        x = torch.randn(m, k).bfloat16()
        check_narrow(kernels, linear, x, rounded_to_8_bits(x, min(group, 256) if group > 0 else 256) @ weight.T)


@pytest.mark.parametrize("kind", ["Q3_K", "Q6_K", "MXFP4", "Q5_1"])
@pytest.mark.parametrize("m", [1, 6, 40])
def test_packed_blocks_of_gate_and_up(kernels, kind, m):
    torch.manual_seed(m)
    blocks = torch.from_numpy(blocks_of(torch.randn(74, 256).mul_(0.1).numpy(), kind))
    weight, bias, x = dequantize(blocks, kind), torch.randn(74), torch.randn(m, 256).bfloat16()
    parts = [blocks[:37].contiguous(), blocks[37:].contiguous()]
    linear = native_linear.QuantizedLinear.from_blocks(parts, kind, (74, 256), bias, gated="silu")
    assert_near(linear(x), silu_and_mul(F.linear(x.float(), weight, bias)), 2**-6)


@pytest.mark.parametrize(("m", "group"), [(1, 128), (4, -1), (5, 32), (13, 256), (130, 128)])
def test_weights_of_8_bit_floats(kernels, m, group):
    """All codes but NaN, those without a leading one included, with scales that float16 cannot hold."""
    torch.manual_seed(m)
    n, k = 70, 333
    values = torch.randn(n, k).mul(100).clamp(-448, 448).to(torch.float8_e4m3fn)
    codes = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8)
    values.view(torch.uint8)[1, : len(codes)] = codes
    scales = torch.rand(n, 1 if group < 0 else -(-k // group)) * 1e-6
    weight, bias = values.float() * scales.repeat_interleave(k if group < 0 else group, 1)[:, :k], torch.randn(n) * 1e-4
    linear = native_linear.QuantizedLinear.from_values(values, scales, None, 8, group, bias)
    assert torch.equal(linear.rows(torch.arange(n)), weight.bfloat16())
    x = torch.randn(m, k).bfloat16()
    want = x.double() @ weight.double().T + bias.double()
    for path in (1, 2):  # floats
        assert (linear(x, torch.float32, path) - want).norm() < 1e-5 * want.norm()
    for path in (0, 3):  # fixed point; with AMX bf16 weights
        assert (linear(x, torch.float32, path) - want).norm() < 4e-3 * want.norm()
    alone = torch.cat([linear(x[i : i + 1], torch.float32, 2) for i in range(m)])
    assert torch.equal(alone, linear(x, torch.float32, 2))


def test_quantized_linear_refuses_what_it_cannot_do(kernels):
    for arguments, message in [((3, 64), "3 bits"), ((4, 96), "group size 96"), ((8, 300), "group size 300")]:
        with pytest.raises(ValueError, match=message):
            native_linear.QuantizedLinear.quantize(torch.randn(4, 64).bfloat16(), *arguments)
    with pytest.raises(ValueError, match="bfloat16"):
        native_linear.QuantizedLinear.quantize(torch.randn(4, 64), 4)


def test_onednn_and_the_kernels_leave_each_others_tiles_alone(kernels):
    weight, x = torch.randn(256, 512).bfloat16(), torch.randn(48, 512).bfloat16()
    linear, want = native_linear.PackedLinear(weight), F.linear(x, weight)
    for _ in range(5):
        assert_near(linear(x), want, 2**-7)
        assert torch.equal(F.linear(x, weight), want)


def test_the_thread_count_is_torchs(kernels):
    x, linear = torch.randn(20, 640).bfloat16(), native_linear.PackedLinear(torch.randn(640, 640).bfloat16())
    F.linear(x, torch.randn(640, 640).bfloat16())
    linear(x)
    before = len(_threads())
    for _ in range(3):
        linear(x)
        F.linear(x, torch.randn(640, 640).bfloat16())
    assert len(_threads()) == before  # the kernels share torch's thread pool


def _threads() -> list[str]:
    return os.listdir("/proc/self/task")


# --- element-wise
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wide", [False, True], ids=["same type", "float32 weight"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms(kernels, rng, dtype, wide):
    rows, h = rng.choice([1, 3, 40, 70]), rng.choice([1, 7, 16, 33, 1024, 1500])
    x, residual, weight = (
        torch.randn(rows, h + 5).to(dtype)[:, :h],
        torch.randn(rows, h).to(dtype),
        torch.randn(h).to(torch.float32 if wide else dtype),
    )
    assert_near(cpu_ops.rms_norm(x, weight, 1e-6), rms_norm(x, weight, 1e-6), 2 * ROUNDING[dtype])
    want, want_sum = add_rms_norm(x, residual, weight, 1e-6)
    got, got_sum = cpu_ops.add_rms_norm(x, residual, weight, 1e-6)
    assert got_sum is residual and torch.equal(got_sum, want_sum)
    assert_near(got, want, 2 * ROUNDING[dtype])
    heads = torch.randn(rows, 3, h + 5).to(dtype)[..., :h]
    assert_near(cpu_ops.rms_norm(heads, weight, 1e-6), rms_norm(heads, weight, 1e-6), 2 * ROUNDING[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_mul(kernels, rng, dtype):
    rows, width = rng.choice([1, 3, 50]), rng.choice([1, 15, 16, 100, 3072])
    x = torch.randn(rows, 2 * width).to(dtype) * 20
    assert_near(cpu_ops.silu_and_mul(x), silu_and_mul(x.float()), 2 * ROUNDING[dtype])


def _cache(num_blocks: int, block_size: int, heads: int, dim: int, dtype: torch.dtype, layout: str) -> torch.Tensor:
    """A cache full of NaN, which exposes any read of an unwritten slot, even one that is multiplied by 0."""
    if layout == "heads first":
        return torch.full((num_blocks, heads, block_size, dim), float("nan"), dtype=dtype).transpose(1, 2)
    return torch.full((num_blocks, block_size, heads, dim), float("nan"), dtype=dtype)


@pytest.mark.parametrize("wide", [False, True], ids=["same type", "float32 weight"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_qk_norm_rope_write(kernels, rng, dtype, wide):
    tokens, heads, kv_heads, dim = (
        rng.choice([1, 5, 33]),
        rng.choice([4, 6]),
        rng.choice([1, 2]),
        rng.choice([2, 10, 16, 64, 128]),
    )
    block_size, layout = rng.choice([1, 3, 16]), rng.choice(["tokens first", "heads first"])
    k_cache, v_cache = (_cache(40, block_size, kv_heads, dim, dtype, layout) for _ in range(2))
    slots = torch.randperm(40 * block_size)[:tokens]
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim).to(dtype)
    q, k, v = (t.reshape(tokens, -1, dim) for t in qkv.clone().split([heads * dim, kv_heads * dim, kv_heads * dim], 1))
    positions, table = torch.randint(0, 100, (tokens,)), torch.randn(100, dim)
    q_weight, k_weight = (
        (torch.randn(2, dim).to(torch.float32 if wide else dtype)) if rng.random() < 0.6 else (None, None)
    )
    if q_weight is not None:
        q, k = rms_norm(q, q_weight, 1e-6), rms_norm(k, k_weight, 1e-6)
    want_q, want_k = apply_rotary(q, table[positions]), apply_rotary(k, table[positions])
    got = cpu_ops.qk_norm_rope_write(qkv, q_weight, k_weight, 1e-6, table, positions, k_cache, v_cache, slots, heads)
    blocks, offsets = slots // block_size, slots % block_size
    assert_near(got, want_q, 3 * ROUNDING[dtype])
    assert_near(k_cache[blocks, offsets], want_k, 3 * ROUNDING[dtype])
    assert torch.equal(v_cache[blocks, offsets], v)
    assert int((~k_cache.isnan()).sum()) == int((~v_cache.isnan()).sum()) == tokens * kv_heads * dim


@pytest.mark.parametrize("dtype", DTYPES)
def test_write_kv(kernels, rng, dtype):
    tokens, kv_heads, dim, block_size = (
        rng.choice([1, 40]),
        rng.choice([1, 3]),
        rng.choice([5, 64]),
        rng.choice([1, 5, 16]),
    )
    k_cache, v_cache = (
        _cache(50, block_size, kv_heads, dim, dtype, rng.choice(["tokens first", "heads first"])) for _ in range(2)
    )
    both = torch.randn(tokens, 2 * kv_heads, dim).to(dtype)
    slots = torch.randperm(50 * block_size)[:tokens]
    cpu_ops.write_kv(both[:, :kv_heads], both[:, kv_heads:], k_cache, v_cache, slots)
    assert torch.equal(k_cache[slots // block_size, slots % block_size], both[:, :kv_heads])
    assert torch.equal(v_cache[slots // block_size, slots % block_size], both[:, kv_heads:])


# --- sampling
# ----------------------------------------------------------------------------------------------------

# top_k, top_p, min_p
FILTERS = [
    (0, 1.0, 0.0),
    (5, 1.0, 0.0),
    (40, 0.8, 0.0),
    (0, 0.9, 0.0),
    (0, 1.0, 0.1),
    (700, 0.7, 0.02),
    (0, 1e-9, 0.0),
    (3000, 1.0, 0.0),
    (0, 0.999, 1e-4),
    (1, 0.5, 0.5),
]


def _sampling_case(seed: int, size: int) -> tuple[torch.Tensor, ...]:
    """Arguments of `cpu_ops.sample`: a greedy row, then one row for each of FILTERS. The rows of logits are not
    adjacent in memory.
    """
    generator = torch.Generator().manual_seed(seed)
    n = 1 + len(FILTERS)
    logits = (torch.randn(n, size + 5, generator=generator) * torch.rand(n, 1, generator=generator) * 6)[
        :, 2 : 2 + size
    ]
    if seed % 3 == 1:
        logits = logits.bfloat16().float()  # ties
    if seed % 3 == 2:
        logits = logits.masked_fill(torch.rand(n, size, generator=generator) < 0.9, float("-inf"))
        logits[:, size // 2] = 0
    floats, ints = torch.zeros(3, n + 3, dtype=torch.float64), torch.zeros(2, n + 3, dtype=torch.int64)
    rows = torch.randperm(n + 3, generator=generator)[:n]
    # a greedy row ignores the top_p, min_p, top_k and seed that an earlier request left
    floats[:, rows[0]], ints[:, rows[0]] = torch.tensor([0, 0.5, 0.5]).double(), torch.tensor([1, 7])
    for row, (top_k, top_p, min_p) in zip(rows[1:].tolist(), FILTERS):
        floats[:, row] = torch.tensor(
            [float(torch.rand(1, generator=generator)) * 2 + 0.1, top_p, min_p], dtype=torch.float64
        )
        ints[:, row] = torch.tensor([top_k if top_k < size else 0, sampling_math.seed_state(seed + row)])
    return logits, rows, torch.randint(0, 2000, (n,), generator=generator), floats, ints


def _sample_by_twin(
    logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, floats: torch.Tensor, ints: torch.Tensor
) -> list[int]:
    """Tokens of the twin, computed row by row."""
    tokens = [int(sampling_math.best(logits[:1])[1])]
    for i, row in enumerate(rows[1:].tolist(), 1):
        (temperature, top_p, min_p), (top_k, state) = floats[:, row : row + 1], ints[:, row : row + 1]
        params = sampling_math.RandomRows(
            temperature.float(),
            top_p,
            min_p.float(),
            top_k,
            sampling_math.uniform(state, positions[i : i + 1]),
            int(top_k),
            bool(top_k),
            bool(top_p < 1),
            bool(top_p < 1),
            bool(min_p > 0),
        )
        tokens.append(int(sampling_math.pick(logits[i : i + 1], params)[1]))
    return tokens


@pytest.mark.parametrize("size", [1, 15, 100, 1003, 8192, 33000, 151936])
def test_sample(kernels, size):
    """Each draw gives the twin's token. At most one may differ, because the last bit of exp moves a boundary."""
    others = 0
    rounds = 3 if size > 100_000 else 12
    for seed in range(rounds):
        case = _sampling_case(seed, size)
        others += sum(a != b for a, b in zip(cpu_ops.sample(*case).tolist(), _sample_by_twin(*case)))
    assert others <= 1


@pytest.mark.parametrize("size", [1, 15, 100, 1003, 8192, 33000])
def test_logprobs(kernels, size, monkeypatch):
    """Values, order and ranks equal the twin's; the order of equal logits is unspecified."""
    for seed in range(9):
        logits, *_ = _sampling_case(seed, size)
        tokens = torch.randint(0, size, (len(logits),))
        for num in {0, 1, min(5, size), min(200, size), size}:
            for normalize in (True, False):
                ids, values, ranks = cpu_ops.logprobs(logits, tokens, num, normalize)
                with monkeypatch.context() as patch:
                    patch.setattr(native.KERNELS, "lib", None)
                    want = logprobs.entries(logits, tokens, num, normalize, CpuPlatform())
                assert torch.equal(ranks, want.ranks) and torch.equal(ids[:, 0], tokens)
                torch.testing.assert_close(values, want.values, atol=1e-5, rtol=1e-6)
                assert torch.equal(logits.gather(1, ids), logits.gather(1, want.token_ids)) and all(
                    len(set(row[1:])) == num for row in ids.tolist()
                )


def test_logprobs_of_what_is_not_finite(kernels):
    logits = torch.randn(3, 700)
    logits[0, 699], logits[1] = float("nan"), float("-inf")
    ids, values, ranks = cpu_ops.logprobs(logits, torch.tensor([3, 4, 5]), 6, True)
    assert (
        values[:2].isnan().all()
        and ids[:2, 1:].eq(0).all()
        and ids[:, 0].tolist() == [3, 4, 5]
        and ranks[:2].tolist() == [1, 1]
    )
    assert values[2].isfinite().all()


def test_sample_without_a_token(kernels):
    for size in (40, 8192):
        logits = torch.randn(6, size)
        logits[0, 5], logits[1], logits[2, 7], logits[3, size - 1], logits[4, :-1] = (
            float("nan"),
            float("-inf"),
            float("inf"),
            float("nan"),
            float("-inf"),
        )
        for temperature in (0.0, 1.0):
            floats, ints = (
                torch.tensor([[temperature] * 6, [0.9] * 6, [0] * 6], dtype=torch.float64),
                torch.zeros(2, 6, dtype=torch.int64),
            )
            got = cpu_ops.sample(logits, torch.arange(6), torch.arange(6), floats, ints).tolist()
            assert got[:4] == [-1] * 4 and got[4] == size - 1 and got[5] >= 0


# --- attention
# ----------------------------------------------------------------------------------------------------


def dense_attention(q, k, v, scale, window, soft_cap, sinks=None):
    """Attention of one request in float64: q [n, H, D] holds the last n of the L tokens of k and v [L, Hk, D]."""
    n, length, group = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    k, v = k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    positions = torch.arange(length - n, length)[:, None]
    seen = torch.arange(length) <= positions
    if window:
        seen &= torch.arange(length) > positions - window
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, n, 1)), -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :length], v)


def _paged_case(
    rng: random.Random,
    dtype: torch.dtype,
    query_lens: list[int],
    contexts: list[int],
    head_dim: int,
    group: int | None = None,
    block_size: int | None = None,
    v_dim: int | None = None,
    latent: bool = False,
):
    """Arguments of `cpu_ops.paged_attention` and its result; `latent`: one KV head, values are columns of keys."""
    kv_heads, group, block_size = (
        1 if latent else rng.choice([1, 2, 3]),
        group or rng.choice([1, 2, 4, 5, 7]),
        block_size or rng.choice([1, 5, 16, 16, 32]),
    )
    window, soft_cap = rng.choice([None, None, 1, 20, 150]), rng.choice([None, None, 5.0])
    lengths = [q + c for q, c in zip(query_lens, contexts)]
    width = max(-(-n // block_size) for n in lengths)
    num_blocks = sum(-(-n // block_size) for n in lengths) + 3
    layout = rng.choice(["tokens first", "heads first"])
    v_dim = v_dim or head_dim
    k_cache, v_cache = (_cache(num_blocks, block_size, kv_heads, d, dtype, layout) for d in (head_dim, v_dim))
    if latent:
        v_cache = k_cache[..., :v_dim]
    free = list(range(1, num_blocks))
    rng.shuffle(free)
    table = torch.zeros(len(lengths), width + 2, dtype=torch.int32)[:, : width + 1]
    q = torch.randn(sum(query_lens), group * kv_heads + 1, head_dim).to(dtype)[:, : group * kv_heads]
    scale, want, start = head_dim**-0.5 * rng.choice([1.0, 3.0]), [], 0
    sinks = rng.choice([None, 3 * torch.randn(q.shape[1]).to(dtype)])
    for i, (n, length) in enumerate(zip(query_lens, lengths)):
        k, v = (torch.randn(length, kv_heads, d).to(dtype) for d in (head_dim, v_dim))
        v = k[..., :v_dim] if latent else v
        first_seen = max(0, length - n - window + 1) if window else 0
        for b in range(-(-length // block_size)):
            table[i, b] = free.pop()
            # positions outside the window may be overwritten, so leave them NaN
            part = slice(max(b * block_size, first_seen), min((b + 1) * block_size, length))
            if part.start < part.stop:
                k_cache[table[i, b], part.start - b * block_size : part.stop - b * block_size] = k[part]
                v_cache[table[i, b], part.start - b * block_size : part.stop - b * block_size] = v[part]
        want.append(dense_attention(q[start : start + n], k, v, scale, window, soft_cap, sinks))
        start += n
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    arguments = (q, k_cache, v_cache, table, torch.tensor(lengths).int(), starts, scale, window, soft_cap, sinks)
    return arguments, torch.cat(want)


def _check_attention(rng, dtype, query_lens, contexts, head_dim):
    arguments, want = _paged_case(rng, dtype, query_lens, contexts, head_dim)
    for path in range(4):
        assert_near(cpu_ops.paged_attention(*arguments, path=path), want, max(3 * ROUNDING[dtype], 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128])
def test_attention_decode(kernels, rng, dtype, head_dim):
    _check_attention(
        rng, dtype, [1] * 5, [rng.choice([0, 1, 15, 16, 63, 255, 256, 300, 700]) for _ in range(5)], head_dim
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "sizes", [(32, 16, False), (192, 128, False), (32, 64, False), (96, 64, True), (576, 512, True)]
)
def test_attention_to_values_of_another_size(kernels, rng, dtype, sizes):
    head_dim, v_dim, latent = sizes
    for query_lens, contexts in (([1] * 3, [0, 130, 300]), ([1, 40, 3], [200, 5, 140])):
        group = rng.choice([1, 4, 16, 40]) if latent else None
        arguments, want = _paged_case(
            rng, dtype, query_lens, contexts, head_dim, group, rng.choice([5, 16]), v_dim, latent
        )
        for path in range(4):
            assert_near(cpu_ops.paged_attention(*arguments, path=path), want, max(3 * ROUNDING[dtype], 1e-5))


@pytest.mark.parametrize("group", [4, 5, 8, 16, 17])
@pytest.mark.parametrize("head_dim", [32, 96, 128])
def test_attention_decode_with_many_query_heads(kernels, rng, group, head_dim):
    """A request alone, whose work is split by heads to occupy all threads, gives the same bits as in a batch."""
    contexts = [rng.choice([0, 1, 15, 16, 63, 127, 128, 300]) for _ in range(5)]
    (q, k_cache, v_cache, table, lengths, starts, *rest), want = _paged_case(
        rng, torch.bfloat16, [1] * 5, contexts, head_dim, group, rng.choice([16, 48])
    )
    got = cpu_ops.paged_attention(q, k_cache, v_cache, table, lengths, starts, *rest)
    assert_near(got, want, 3 * ROUNDING[torch.bfloat16])
    for i in range(5):
        assert torch.equal(
            cpu_ops.paged_attention(
                q[i : i + 1], k_cache, v_cache, table[i : i + 1], lengths[i : i + 1], starts[:2], *rest
            ),
            got[i : i + 1],
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 64, 96, 128])
def test_attention_prefill_and_mixed(kernels, rng, dtype, head_dim):
    query_lens = [rng.choice([1, 1, 2, 3, 9, 30, 70, 130]) for _ in range(4)]
    _check_attention(rng, dtype, query_lens, [rng.choice([0, 0, 1, 40, 200, 513]) for _ in range(4)], head_dim)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_to_scores_of_any_size(kernels, rng, dtype):
    """The running maximum of the scores grows many times, by more than the range of a float's exponent; in the end only
    the last keys have weight.
    """
    query_len, length, heads, head_dim = rng.choice([1, 8, 40]), 700, 2, 64
    k, v = (torch.randn(length, heads, head_dim).to(dtype) for _ in range(2))
    k = k * torch.logspace(-3, 2, length)[:, None, None].to(dtype)
    q = torch.randn(query_len, 2 * heads, head_dim).to(dtype)
    table, starts = torch.randperm(length // 4 + 1)[None].int(), torch.tensor([0, query_len]).int()
    k_cache, v_cache = (torch.zeros(length // 4 + 1, 4, heads, head_dim, dtype=dtype) for _ in range(2))
    k_cache[table[0, : length // 4].long()], v_cache[table[0, : length // 4].long()] = (
        k.view(-1, 4, heads, head_dim),
        v.view(-1, 4, heads, head_dim),
    )
    for path in range(4):
        got = cpu_ops.paged_attention(
            q, k_cache, v_cache, table, torch.tensor([length]).int(), starts, 0.125, path=path
        )
        assert_near(got, dense_attention(q, k, v, 0.125, None, None), max(3 * ROUNDING[dtype], 1e-4))


def test_attention_to_scores_that_overflow(kernels):
    """NaN appears for the affected token and head and for no other."""
    torch.manual_seed(0)
    q, k_cache, v_cache = (
        torch.randn(40, 4, 64).bfloat16(),
        torch.randn(4, 16, 2, 64).bfloat16(),
        torch.randn(4, 16, 2, 64).bfloat16(),
    )
    q[7, 2, 5] = float("inf")
    for path in range(4):
        got = cpu_ops.paged_attention(
            q,
            k_cache,
            v_cache,
            torch.arange(4)[None].int(),
            torch.tensor([50]).int(),
            torch.tensor([0, 40]).int(),
            0.125,
            path=path,
        )
        assert got[7, 2].isnan().all() and int(got.isnan().sum()) == 64


def _sharing_requests(rng: random.Random) -> list[tuple[list[tuple[object, int]], int]]:
    """For each request: the (name, length) of each piece of its context, and its number of query tokens. Requests may
    share all pieces but the last.
    """
    systems = {("system", i): rng.choice([5, 128, 129, 300, 513]) for i in range(rng.choice([1, 2, 3]))}
    examples = {("example", i): rng.choice([100, 128, 260]) for i in range(2)}
    query_lens, requests = rng.choice([[1], [1, 2, 3], [1, 1, 2, 5, 40, 130]]), []
    for i in range(rng.choice([2, 5, 12, 20])):
        pieces = [rng.choice(list(systems.items()))] if rng.random() < 0.9 else []
        if pieces and rng.random() < 0.5:
            pieces.append(rng.choice(list(examples.items())))
        requests.append(([*pieces, (("own", i), rng.choice([0, 0, 1, 7, 130]))], rng.choice(query_lens)))
    return requests


def _sharing_case(rng: random.Random, dtype: torch.dtype, head_dim: int):
    """Requests with common prefixes: (arguments in which they share blocks, the same with private blocks for each
    request, the result of dense attention).
    """
    kv_heads, group, block_size = (
        rng.choice([1, 2, 3]),
        rng.choice([1, 2, 4, 5, 9]),
        rng.choice([1, 5, 16, 16, 32, 200]),
    )
    window, soft_cap = rng.choice([None, None, None, 400, 2000]), rng.choice([None, None, 5.0])
    requests = _sharing_requests(rng)
    query_lens = [n for _, n in requests]
    lengths = [n + sum(length for _, length in pieces) for pieces, n in requests]
    q, scale = (
        torch.randn(sum(query_lens), group * kv_heads, head_dim).to(dtype),
        head_dim**-0.5 * rng.choice([1.0, 3.0]),
    )
    content, blocks, want, start = {}, {}, [], 0
    sinks = rng.choice([None, 3 * torch.randn(q.shape[1]).to(dtype)])
    tables = [torch.zeros(len(requests), -(-max(lengths) // block_size), dtype=torch.int32) for _ in range(2)]
    filled = []
    for i, (pieces, n) in enumerate(requests):
        names = [tuple(name for name, _ in pieces[: j + 1]) for j in range(len(pieces))] + [("query", i)]
        sizes = [*(size for _, size in pieces), n]
        for name, size in zip(names, sizes):
            content.setdefault(name, [torch.randn(size, kv_heads, head_dim).to(dtype) for _ in range(2)])
        k, v = (torch.cat([content[name][side] for name in names]) for side in range(2))
        ends = torch.tensor(sizes).cumsum(0)
        for b in range(-(-lengths[i] // block_size)):
            part = slice(b * block_size, min((b + 1) * block_size, lengths[i]))
            piece = int((ends < (b + 1) * block_size).sum())  # the piece that contains the block's last position
            shared = piece < len(pieces) - 1  # the block is full and everything before it is equal
            for table, key in ((tables[0], (names[piece], b) if shared else (i, b)), (tables[1], (i, b, "private"))):
                table[i, b] = blocks.setdefault(key, len(blocks))
                filled.append((int(table[i, b]), k[part], v[part]))
        want.append(dense_attention(q[start : start + n], k, v, scale, window, soft_cap, sinks))
        start += n
    order = torch.randperm(len(blocks)).int()
    k_cache, v_cache = (_cache(len(blocks), block_size, kv_heads, head_dim, dtype, "tokens first") for _ in range(2))
    for block, k, v in filled:
        k_cache[order[block], : len(k)], v_cache[order[block], : len(v)] = k, v
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    shared, private = (
        (q, k_cache, v_cache, order[table], torch.tensor(lengths).int(), starts, scale, window, soft_cap, sinks)
        for table in tables
    )
    return shared, private, torch.cat(want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [32, 64, 80, 128])
def test_attention_over_shared_keys(kernels, rng, dtype, head_dim):
    """Every path is correct; the fixed-order paths, used by --deterministic, give the same bits as private blocks."""
    shared, private, want = _sharing_case(rng, dtype, head_dim)
    for path in range(4):
        got = cpu_ops.paged_attention(*shared, path=path)
        assert_near(got, want, max(3 * ROUNDING[dtype], 1e-5))
        if path & 2:
            assert torch.equal(got, cpu_ops.paged_attention(*private, path=path))


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_of_wanted_tokens(kernels, rng, dtype):
    """Results of the wanted tokens are correct even if no token of some request is wanted."""
    shared, _, want = _sharing_case(rng, dtype, 64)
    ends = shared[5].tolist()
    wanted = torch.tensor(
        [token for a, b in pairwise(ends) if rng.random() < 0.6 for token in range(rng.randrange(a, b), b)] or [0]
    )
    for path in range(4):
        got = cpu_ops.paged_attention(*shared, path=path, wanted=wanted)
        assert_near(got[wanted], want[wanted], max(3 * ROUNDING[dtype], 1e-5))


def test_attention_of_one_token_depends_on_its_keys_alone(kernels):
    """A token's bits do not depend on the batch: on fixed-order paths (2, 3) for any split of the prompt into chunks;
    on path 0 for the same chunk, if AMX computes it. Vector code rounds values together with those of the other keys of
    a task, and the split into tasks depends on the batch.
    """
    rng = random.Random(1)
    for dtype, head_dim in ((torch.bfloat16, 64), (torch.bfloat16, 80), (torch.float32, 64), (torch.float16, 128)):
        torch.manual_seed(1)
        (q, k_cache, v_cache, table, lengths, starts, *rest), _ = _paged_case(
            rng, dtype, [1, 30, 1, 7], [700, 100, 40, 300], head_dim
        )
        for path in (0, 2, 3) if kernels == "amx" and dtype == torch.bfloat16 and head_dim == 64 else (2, 3):
            together = cpu_ops.paged_attention(q, k_cache, v_cache, table, lengths, starts, *rest, path=path)
            for i in range(4):
                a, b = int(starts[i]), int(starts[i + 1])
                for size in (b - a, 1, 2, 5) if path else (b - a,):
                    for start in range(a, b, size):
                        end = min(start + size, b)
                        alone = cpu_ops.paged_attention(
                            q[start:end],
                            k_cache,
                            v_cache,
                            table[i : i + 1],
                            lengths[i : i + 1] - (b - end),
                            torch.tensor([0, end - start]).int(),
                            *rest,
                            path=path,
                        )
                        assert torch.equal(alone, together[start:end])


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_of_a_chunk_is_that_of_its_tokens_one_by_one(kernels, rng, dtype):
    """On the fixed-order path, which `--deterministic` uses."""
    (q, k_cache, v_cache, table, lengths, starts, *rest), _ = _paged_case(rng, dtype, [1, 70, 9], [200, 500, 5], 64)
    request = torch.repeat_interleave(torch.arange(3), starts.diff())
    seen = (lengths[request] - starts[1:][request] + torch.arange(len(q)) + 1).int()
    one_by_one = table[request], seen, torch.arange(len(q) + 1).int()
    alone = cpu_ops.paged_attention(q, k_cache, v_cache, *one_by_one, *rest, path=2)
    together = cpu_ops.paged_attention(q, k_cache, v_cache, table, lengths, starts, *rest, path=2)
    assert torch.equal(together, alone)


def test_attention_reasons():
    assert cpu_ops.attention_reason(64, 64, torch.float16) is None
    assert "head_dim 24" in cpu_ops.attention_reason(24, 16, torch.float32)
    assert "v_dim 528" in cpu_ops.attention_reason(576, 528, torch.float32)
    assert "float64" in cpu_ops.attention_reason(32, 32, torch.float64)
