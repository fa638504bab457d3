"""Products with 4-bit weights in tiles, sums over splits and the dequantization for many rows, under Triton's
interpreter (compiled on a GPU) against the torch twins.
"""

from unittest import mock

import pytest
import torch

pytest.importorskip("triton")
from quire.worker.cuda import quantized
from quire.worker.cuda.install import TritonOps
from quire.worker.cuda.kernels import limits, triton_dequantize, triton_quantized, triton_split, triton_tiles
from quire.worker.cuda.kernels.triton_quantized import StoredGroups, multiply_blocks, multiply_groups
from quire.worker.cuda.kernels.triton_split import Tiles
from quire.worker.cuda.kernels.triton_tiles import StoredTiles, half_of, in_tiles, multiply_tiles, rows_of
from quire.worker.cuda.quantized import TritonBlocks, TritonGroups
from quire.worker.layers.linear import ColumnParallelLinear, Shard
from quire.worker.layers.quantization.blocks import Rows
from quire.worker.layers.quantization.gguf_blocks import dequantize
from quire.worker.layers.quantization.int_groups import Groups, give_groups, pack_int4
from quire.worker.layers.quantization.packing import E2M1_TABLE
from tests.worker.cuda.kernels.test_triton_quantized import DEVICE, NARROW, random

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


def weight_of(kind: str, n: int, k: int, group: int | None) -> Groups:
    """A random weight: int4, int4 with zero points ("zeros"), e2m1 with float or power-of-two scales, int8 or e4m3."""
    generator = torch.Generator().manual_seed(n + k)
    num, size = (1, k) if group is None else (-(-k // group), group)
    scales = torch.rand(n, num, generator=generator).add_(0.1).mul_(0.05).half()
    values = torch.randint(-8, 8, (n, k), dtype=torch.int8, generator=generator)
    zeros = torch.randint(-3, 4, scales.shape, generator=generator).half() if kind == "zeros" else None
    if kind == "e8m0":
        scales = torch.randint(120, 124, scales.shape, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    table = E2M1_TABLE if kind in ("e2m1", "e8m0") else None
    row_scales = torch.rand(n, generator=generator).double() if kind == "e2m1" else None
    if kind == "e4m3":
        values = torch.randn(n, k, generator=generator).to(torch.float8_e4m3fn)
    bits = 8 if kind in ("int8", "e4m3") else 4
    tensors = (None if t is None else t.to(DEVICE) for t in (values, scales, zeros))
    row_scales = None if row_scales is None else row_scales.to(DEVICE)
    return Groups(*tensors, bits, size, table=table, row_scales=row_scales)


def stored(weight: Groups) -> StoredGroups:
    values = pack_int4(weight.values) if weight.bits == 4 else weight.values
    row_scales = None if weight.row_scales is None else weight.row_scales.float()
    return StoredGroups(values, weight.scales, weight.zeros, weight.bits, weight.group, weight.table, row_scales)


def tiled(weight: Groups) -> StoredTiles:
    groups = stored(weight)
    half, form = half_of(groups), "e2m1" if weight.table else "int4"
    assert half is not None
    values = in_tiles(groups.values, half)
    return StoredTiles(values, groups.scales, groups.zeros, weight.group, form, groups.row_scales)


@pytest.mark.parametrize(
    "kind, k, group, rows, splits, dtype",
    [
        ("int4", 256, 32, 3, None, torch.float32),
        ("int4", 384, 128, 19, 2, NARROW),
        ("int4", 640, None, 3, 4, NARROW),
        ("zeros", 256, 64, 70, 1, NARROW),
        ("e2m1", 128, 32, 3, 1, NARROW),
        ("e8m0", 192, 32, 35, 2, torch.float32),
    ],
)
def test_tiles(kind, k, group, rows, splits, dtype):
    weight, n = weight_of(kind, 80, k, group), 80  # not a multiple of a program's 64 outputs
    x, bias = random(rows, k).to(dtype), random(n).to(dtype) if splits else None
    expected = x.float() @ weight.dequantized().T + (0 if bias is None else bias.float())
    found = multiply_tiles(x, tiled(weight), bias, splits)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=tolerance)


def test_a_weight_fits_tiles_only_if_they_divide_it():
    sizes = [(80, 256, 32), (80, 128, 64), (80, 640, None), (72, 256, 32), (80, 96, 32), (80, 256, 16), (80, 288, 96)]
    assert [half_of(stored(weight_of("int4", *size))) for size in sizes] == [32, 64, 64, None, None, None, None]
    assert half_of(stored(weight_of("int8", 80, 256, 32))) is None
    weight = stored(weight_of("int4", 80, 256, 32))
    ids = torch.tensor([79, 0, 16, 33], device=DEVICE)
    assert torch.equal(rows_of(in_tiles(weight.values, 32), ids), weight.values[ids])


@pytest.mark.slow
@pytest.mark.parametrize("kind, num", [("int4", 2), ("e4m3", 8), ("Q4_K", 2)])
def test_splits_sum_all_columns_once(kind, num):
    """Also where a split has no step left, and again with the counters that the first product left."""
    n, k, rows = 20, 768, 5
    x = random(rows, k)
    if kind == "Q4_K":
        generator = torch.Generator().manual_seed(1)
        blocks = torch.randint(0, 90, (n, 432), dtype=torch.uint8, generator=generator).to(DEVICE)
        expected = x @ dequantize(blocks, kind)[:, :k].T
        found = x.new_empty(rows, n)
        for _ in range(2):
            multiply_blocks(x, blocks, kind, found, num_splits=num)
            torch.testing.assert_close(found, expected, atol=1e-3 * expected.abs().max().item(), rtol=1e-3)
        return
    weight = weight_of(kind, n, k, 128)
    for _ in range(2):
        found = multiply_groups(x, stored(weight), None, num)
        torch.testing.assert_close(found, x @ weight.dequantized().T, atol=1e-3, rtol=1e-3)
    assert not triton_split.counters_of(x.device).any()


def tiles_of(n, k, rows, kind):
    """Return the tiles of a product of so many rows with a weight `[n, k]`, as the kernel of its kind has them."""
    seen, device = [], torch.device("meta")
    x = torch.empty(rows, k, dtype=torch.bfloat16, device=device)
    if kind == "int4":
        values = torch.empty(n // 16, k // 128, 16, 64, dtype=torch.uint8, device=device)
        weight = StoredTiles(values, torch.empty(n, k // 128, device=device), None, 128, "int4")
    else:
        values = torch.empty(n, k, dtype=torch.float8_e4m3fn, device=device)
        weight = StoredGroups(values, torch.empty(n, 1, device=device), None, 8, k)
    multiply = multiply_tiles if kind == "int4" else multiply_groups
    module = triton_tiles if kind == "int4" else triton_quantized

    def stop(tiles, device, num):
        seen.append(tiles)
        raise InterruptedError

    with mock.patch.object(module, "splits_of", stop), pytest.raises(InterruptedError):
        multiply(x, weight)
    return seen[0]


SHAPES = [  # outputs and inputs of the products of Llama-3.1-8B and Qwen3-0.6B
    (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336),
    (4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072),
]  # fmt: skip


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("kind", ["int4", "fp8"])
@pytest.mark.parametrize("rows", [1, 8, 16, 32])
def test_splits_reach_the_limit_of_the_bytes(capability, kind, rows):
    """By the model of their cost; all products of 8B together are read at 0.8 of the memory's speed."""
    limit = limits.KNOWN[capability]
    read = spent = 0.0
    for n, k in SHAPES:
        tiles = tiles_of(n, k, rows, kind)
        num_bytes = tiles.num * tiles.steps * tiles.step_bytes
        assert num_bytes == pytest.approx(n * k * (0.5 if kind == "int4" else 1))
        best = tiles.cost(tiles.best(limit), limit)
        assert best == min(tiles.cost(num, limit) for num in (1, 2, 4, 8) if num == 1 or tiles.steps >= 4 * num)
        assert tiles.cost(1, limit) >= best >= num_bytes
        if k >= 4096:
            read, spent = read + num_bytes, spent + best
    assert read / spent >= 0.8


def test_few_outputs_have_splits_and_many_have_none():
    limit = limits.KNOWN[90]
    assert Tiles(64, 64, 4096, 3, 1, 1).best(limit) >= 4
    assert Tiles(600, 64, 4096, 3, 1, 1).best(limit) == 1
    assert Tiles(8, 7, 4096, 3, 1, 1).best(limit) == 1  # few steps
    assert Tiles(1, 1000, 4096, 3, 1, 1).best(limit) == 8
    assert Tiles(100, 8, 4096, 3, 1, 10**6).best(limit) == 1  # more partial sums than weights


def make_layer(weight: Groups) -> ColumnParallelLinear:
    n, k = weight.values.shape
    layer = ColumnParallelLinear(k, [Shard("a", n, 0, n)], bias=False)
    layer.weight, layer.ops = None, TritonOps()
    give_groups(layer, weight, NARROW)
    return layer.to(DEVICE)


@pytest.mark.slow
@pytest.mark.parametrize("kind, group", [("int4", 32), ("zeros", 128), ("e2m1", 16), ("e8m0", 32), ("int8", None)])
def test_many_rows_are_multiplied_by_dequantized_pieces(kind, group, monkeypatch):
    """Of 64 outputs each; and few rows before and after, and rows of a tied embedding."""
    monkeypatch.setattr(quantized, "MANY_ROWS", 8)
    monkeypatch.setattr(triton_dequantize, "_PIECE", 1)
    weight = weight_of(kind, 144, 256, group)
    layer, dense = make_layer(weight), weight.dequantized()
    assert isinstance(layer.method, TritonGroups)
    ids = torch.tensor([1, 143, 17], device=DEVICE)
    assert torch.equal(layer.method.rows(ids), dense[ids].to(NARROW))
    for rows in (3, 9):
        x = random(rows, 256).to(NARROW)
        torch.testing.assert_close(layer(x).float(), x.float() @ dense.T, atol=3e-2, rtol=2e-2)
    assert torch.equal(layer.method.rows(ids), dense[ids].to(NARROW))
    assert (layer.quantized.dim() == 4) == (weight.bits == 4 and group >= 32)


def test_many_rows_of_blocks(monkeypatch):
    monkeypatch.setattr(quantized, "MANY_ROWS", 4)
    monkeypatch.setattr(triton_dequantize, "_PIECE", 1)
    x, parts = random(5, 256).to(NARROW), []
    for kind, rows, size in (("Q4_K", 70, 144), ("Q6_K", 10, 210)):
        generator = torch.Generator().manual_seed(rows)
        parts.append(Rows(torch.randint(0, 50, (rows, size), dtype=torch.uint8, generator=generator).to(DEVICE), kind))
    layer = ColumnParallelLinear(256, [Shard("a", 96, 0, 96)], bias=False)
    layer.bias = torch.nn.Parameter(random(96).to(NARROW), requires_grad=False)
    layer.method = TritonBlocks(parts, NARROW)
    dense = torch.cat([dequantize(part.blocks, part.type) for part in parts])
    expected = x.float() @ dense.T + layer.bias[:80].float()
    found = layer(x)
    scale = expected.abs().max().item()
    torch.testing.assert_close(found[:, :80].float(), expected, atol=1e-2 * scale, rtol=1e-2)
    assert not found[:, 80:].any()
