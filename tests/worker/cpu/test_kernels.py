"""Compares the native matrix products with plain torch, on random shapes including odd ones, at every instruction-set
level that this CPU supports.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from quire.checkpoints.gguf.header import BLOCKS
from quire.worker.cpu import native_linear
from quire.worker.layers.activation import silu_and_mul
from quire.worker.layers.quantization.gguf_blocks import dequantize
from tests.helpers.models.gguf_files import blocks_of
from tests.helpers.worker.native_kernels import assert_near

TINY_MODEL = Path(__file__).parents[3] / "configs" / "quire-tiny"


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


@pytest.mark.slow
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
