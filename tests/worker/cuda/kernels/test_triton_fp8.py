"""Products on tensor cores for 8-bit floats under Triton's interpreter (compiled on a GPU): rounding bit for bit as the
torch twin, products as those of the rounded numbers.
"""

from functools import partial

import pytest
import torch
from torch import nn

pytest.importorskip("triton")
from quire.worker.cuda import quantized
from quire.worker.cuda.install import TritonOps
from quire.worker.cuda.kernels import triton_experts_fp8, triton_fp8, triton_ops
from quire.worker.cuda.kernels.triton_quantized import StoredGroups
from quire.worker.cuda.quantized import Float8Blocks, Float8Channels
from quire.worker.layers.activation import silu_and_mul
from quire.worker.layers.linear import ColumnParallelLinear, GateUpParallelLinear, Shard
from quire.worker.layers.moe import run_experts
from quire.worker.layers.norm import RMSNorm
from quire.worker.layers.quantization.int_groups import Groups, dequantize, give_groups
from quire.worker.layers.rounding import Rounded, Rounding, attached, round_rows
from quire.worker.transformer.blocks import rounding_of
from tests.worker.cuda.kernels.test_triton_quantized import DEVICE, NARROW, random, random_floats8

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
BLOCKS, ROWS = Rounding(128), Rounding()


def widened(x: Rounded) -> torch.Tensor:
    size = x.rounding.group or x.values.shape[1]
    return x.values.float() * x.scales.repeat_interleave(size, 1)


def equal(found: Rounded, wanted: Rounded) -> bool:
    same = torch.equal(found.values.view(torch.uint8), wanted.values.view(torch.uint8))
    return same and torch.equal(found.scales, wanted.scales) and found.rounding == wanted.rounding


def uneven(rows: int, size: int) -> torch.Tensor:
    """Rows with zeros, subnormal numbers of e4m3 and magnitudes from 2^-14 to 2^3."""
    x = random(rows, size) * torch.exp2(torch.arange(rows, device=DEVICE) % 18 - 14.0)[:, None]
    x[:, ::3] *= 2.0**-7
    x[1] = 0
    return x.to(NARROW)


@pytest.mark.parametrize("rounding, size", [(BLOCKS, 1152), (BLOCKS, 128), (ROWS, 200), (ROWS, 1500)])
def test_rounding_is_that_of_the_twin(rounding, size):
    x = uneven(5, size)
    assert equal(triton_fp8.round_rows(x, rounding), round_rows(x, rounding))
    error = (widened(round_rows(x, rounding)) - x.float()).abs().max()
    assert 0 < error < x.abs().max() / 16


@pytest.mark.parametrize("rounding, size", [(BLOCKS, 384), (ROWS, 200)])
def test_norms_and_activations_attach_what_they_give_rounded(rounding, size, monkeypatch):
    monkeypatch.setattr(triton_ops, "LEAST_ROWS", 4)
    x, weight = uneven(5, size), random(size).to(NARROW)
    normed = triton_ops.rms_norm(x, weight, 1e-6, rounding)
    added, _ = triton_ops.add_rms_norm(x, x.clone(), weight, 1e-6, rounding)
    activated = triton_ops.silu_and_mul(torch.cat([x, x], 1), rounding)
    for result in (normed, added, activated):
        assert equal(attached(result, rounding), round_rows(result, rounding))
        assert attached(result[:4], rounding) is None and attached(result, Rounding(64)) is None
    torch.testing.assert_close(normed, triton_ops.rms_norm(x, weight, 1e-6))
    torch.testing.assert_close(activated, silu_and_mul(torch.cat([x, x], 1)), atol=1e-3, rtol=1e-3)
    few = triton_ops.rms_norm(x[:3], weight, 1e-6, rounding)
    assert attached(few, rounding) is None


def block_weight(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    scales = random(-(-n // 128), k // 128).abs().add(0.1) * 0.01
    return random_floats8(n, k), scales.repeat_interleave(128, 0)[:n].contiguous()


@pytest.mark.parametrize("rows, n, k, splits", [(70, 72, 256, None), (3, 40, 640, 2), (20, 130, 128, 1)])
def test_products_of_rounded_numbers(rows, n, k, splits):
    values, scales = block_weight(n, k)
    x, bias = round_rows(random(rows, k).to(NARROW), BLOCKS), random(n).to(NARROW)
    expected = widened(x) @ dequantize(values, scales, None, 128).T + bias.float()
    found = triton_fp8.multiply_rounded(x, values, scales, bias, torch.float32, splits)
    torch.testing.assert_close(found, expected, atol=1e-2, rtol=1e-3)


def make_layer(cls, n: int, k: int, gated: bool = False):
    values, scales = block_weight(n, k)
    scales = scales if cls is Float8Blocks else scales[:, :1].contiguous()
    weight = Groups(values, scales, None, 8, 128 if cls is Float8Blocks else k)
    make = lambda: ColumnParallelLinear(k, [Shard("a", n, 0, n)], False)  # noqa: E731
    layer = GateUpParallelLinear(k, n // 2, False, "a") if gated else make()
    layer.weight, ops = None, TritonOps()
    ops._multiplies_floats8 = True
    layer.use(ops)
    give_groups(layer, weight, NARROW)
    assert type(layer.method) is cls and cls.fits(weight)
    return layer.to(DEVICE), weight.dequantized()


@pytest.mark.slow
@pytest.mark.parametrize("cls", [Float8Blocks, Float8Channels])
def test_what_feeds_a_product_rounds_for_it(cls, monkeypatch):
    """A norm, the product with an activation and the product after it take no launch for rounding, and few rows none of
    the rounding.
    """
    norm, part = RMSNorm(256, 1e-6).to(DEVICE), nn.Module()
    norm.use(TritonOps())
    norm.weight.data = random(256).to(NARROW)
    part.gate_up_proj, first = make_layer(cls, 512, 256, gated=True)
    down, second = make_layer(cls, 48, 256)
    norm.round_for(rounding_of(part))
    part.gate_up_proj.round_for(down)
    x = random(5, 256).to(NARROW)
    for module in (triton_ops, quantized):
        monkeypatch.setattr(module, "LEAST_ROWS", 4)
    monkeypatch.setattr(quantized, "round_rows", None)
    normed = norm(x)
    found = down(part.gate_up_proj(normed))
    inner = silu_and_mul(normed.float() @ first.T)
    expected = inner @ second.T
    error = (found.float() - expected).abs().max() / expected.abs().max()
    assert 1e-4 < error < 0.06
    few = down(part.gate_up_proj(normed[:3].contiguous()))
    assert (few.float() - expected[:3]).abs().max() / expected.abs().max() < 5e-3
    monkeypatch.setattr(quantized, "round_rows", triton_fp8.round_rows)
    again = down(part.gate_up_proj(normed.clone()))  # rounds by itself
    torch.testing.assert_close(again, found)


@pytest.mark.slow
@pytest.mark.parametrize("weigh_inputs", [False, True])
def test_experts(weigh_inputs):
    """Of whom some have no row, others more than a tile; those from 3 on are of another rank."""
    num, hidden, size, tokens, top_k = 3, 128, 128, 60, 2
    stacks, dense = [], []
    for n, k in ((2 * size, hidden), (hidden, size)):
        weights = [block_weight(n, k) for _ in range(num)]
        values = torch.stack([w.view(torch.uint8).roll(i, 0) for i, (w, _) in enumerate(weights)])
        scales = torch.stack([s * (1 + i) / 16 for i, (_, s) in enumerate(weights)])
        stacks.append(StoredGroups(values.view(torch.float8_e4m3fn), scales, None, 8, 128))
        dense.append([dequantize(v, s, None, 128) for v, s in zip(stacks[-1].values, scales)])
    assert all(map(triton_experts_fp8.fits, stacks)) and triton_experts_fp8.are_many(tokens * top_k, num)
    ids = torch.randint(2, 5, (tokens, top_k), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    ids[:3] = 1
    x, weights = random(tokens, hidden).to(NARROW), random(tokens, top_k).abs()

    def expert(i: int, rows: torch.Tensor) -> torch.Tensor:
        inner = silu_and_mul(widened(round_rows(rows, BLOCKS)) @ dense[0][i].T)
        return widened(round_rows(inner, BLOCKS)) @ dense[1][i].T

    experts = {2 + i: partial(expert, i) for i in range(num)}
    expected = run_experts(x, weights, ids, experts, weigh_inputs).float()
    found = triton_experts_fp8.fused_experts(x, weights, ids, *stacks, "silu", 2, weigh_inputs).float()
    # a weight multiplies the scale of its input, or the input before it is rounded, in bfloat16 with 8 bits
    eps = torch.finfo(NARROW).eps
    tolerance = max(0.03, 13 * eps) if weigh_inputs else max(3e-3, eps)
    tolerance *= expected.abs().max().item()
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)
    assert not found[:3].any()
