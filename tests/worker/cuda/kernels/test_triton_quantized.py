"""The Triton products of quantized weights under Triton's interpreter (compiled on a GPU) against the torch twins."""

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
from quire.worker.cuda.install import TritonOps
from quire.worker.cuda.kernels import triton_experts
from quire.worker.cuda.kernels.triton_quantized import StoredGroups, multiply_blocks, multiply_groups
from quire.worker.cuda.quantized import Float8Channels, TritonBlocks, TritonGroups
from quire.worker.cuda.stacks import grouped_experts
from quire.worker.layers.linear import PLAIN_WEIGHTS, ColumnParallelLinear, Shard
from quire.worker.layers.moe import ListedExperts, run_experts
from quire.worker.layers.quantization.blocks import PlainBlocks, Rows
from quire.worker.layers.quantization.gguf_blocks import BLOCK_TYPES, dequantize
from quire.worker.layers.quantization.int_at_load import QuantizeAtLoad
from quire.worker.layers.quantization.int_groups import Groups, Reordered, give_groups, pack_int4
from quire.worker.layers.quantization.int_groups import dequantize as dequantize_groups
from quire.worker.layers.quantization.mxfp4_experts import mxfp4_groups
from quire.worker.layers.quantization.packing import E2M1_TABLE
from quire.worker.spec.moe import MoESpec, RoutingSpec
from tests.worker.cuda.test_no_sync import NoWaiting

gguf = pytest.importorskip("gguf")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NARROW = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # Triton's interpreter multiplies no bfloat16
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, NARROW])
@pytest.mark.parametrize("group", [32, 128, None])
@pytest.mark.parametrize("bits", [4, 8])
def test_groups(bits, group, dtype):
    n, k = 40, 200  # neither is a multiple of a tile, nor 200 of a group
    low = -(1 << (bits - 1))
    values = torch.randint(low, -low, (n, k), dtype=torch.int8, generator=torch.Generator().manual_seed(bits))
    num_groups = 1 if group is None else -(-k // group)
    scales = random(n, num_groups).abs().to(torch.float16) * 0.01
    stored = (pack_int4(values) if bits == 4 else values).to(DEVICE)
    shifts = torch.randint(0, 4, scales.shape).to(scales)
    for rows, zeros, bias in ((3, None, None), (37, None, None), (70, shifts, random(n).to(dtype))):
        x = random(rows, k).to(dtype)
        weight = dequantize_groups(values.to(DEVICE), scales, zeros, group or k).to(dtype)
        expected = x.float() @ weight.float().T + (0 if bias is None else bias.float())
        found = multiply_groups(x, StoredGroups(stored, scales, zeros, bits, group or k), bias)
        assert found.dtype == dtype
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=tolerance)


def random_floats8(n: int, k: int) -> torch.Tensor:
    """Every e4m3 but NaN."""
    codes = torch.randint(0, 256, (n, k), dtype=torch.uint8, generator=torch.Generator().manual_seed(n))
    return torch.where(codes & 127 == 127, 0, codes).to(DEVICE).view(torch.float8_e4m3fn)


@pytest.mark.parametrize("group", [32, None])
def test_floats_of_8_bits(group):
    n, k = 48, 96
    values, scales, x = random_floats8(n, k), random(n, 1 if group is None else 3).abs() * 0.01, random(5, k)
    weight = dequantize_groups(values, scales, None, group or k)
    found = multiply_groups(x, StoredGroups(values, scales, None, 8, group or k))
    torch.testing.assert_close(found, x @ weight.T, atol=1e-3, rtol=1e-4)


NF4 = tuple(value.item() for value in random(16).sort().values)
CODES = ["mxfp4", "nvfp4", "nf4"]


def random_codes(kind: str, n: int, k: int) -> Groups:
    """Every code, and scales of every kind that a format has."""
    codes = torch.randint(0, 16, (n, k), generator=torch.Generator().manual_seed(n)).to(DEVICE)
    group, table = {"mxfp4": 32, "nvfp4": 16, "nf4": 64}[kind], NF4 if kind == "nf4" else E2M1_TABLE
    scales, row_scales = random(n, -(-k // group)).abs(), None
    if kind == "mxfp4":
        exponents = torch.randint(120, 130, scales.shape, generator=torch.Generator().manual_seed(k)).byte()
        scales = exponents.to(DEVICE).view(torch.float8_e8m0fnu)
    if kind == "nvfp4":
        scales, row_scales = scales.to(torch.float8_e4m3fn), random(n).abs().double() * 0.1
    return Groups(codes.to(torch.int8) - 8, scales, None, 4, group, None, table, row_scales)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, NARROW])
@pytest.mark.parametrize("kind", CODES)
def test_4_bit_codes(kind, dtype):
    n, k = 40, 200  # the last group is shorter
    groups = random_codes(kind, n, k)
    tables = groups.scales, None, 4, groups.group, groups.table
    row_scales = None if groups.row_scales is None else groups.row_scales.float()
    stored = StoredGroups(pack_int4(groups.values), *tables, row_scales)
    weight = groups.dequantized()
    if kind == "nf4":  # its numbers times a scale are rounded to the rows' type, where those of the others are exact
        weight = weight.to(dtype).float()
    for rows, bias in ((3, None), (19, None), (70, random(n).to(dtype))):
        x = random(rows, k).to(dtype)
        expected = x.float() @ weight.T + (0 if bias is None else bias.float())
        found = multiply_groups(x, stored, bias)
        assert found.dtype == dtype
        tolerance = 1e-4 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kind", CODES)
def test_a_layer_of_4_bit_codes_takes_its_bits(kind):
    n, k = 48, 128
    groups, layer = random_codes(kind, n, k), layer_of(n, k, True)
    layer.use(TritonOps())
    layer.weight = None
    give_groups(layer, groups, torch.float32)
    assert isinstance(layer.method, TritonGroups)
    bits = {"mxfp4": 4.25, "nvfp4": 4.5 + 32 / k, "nf4": 4.5}[kind]  # and a scale per row
    assert layer.method.num_bytes(layer) == bits / 8 * n * k + layer.bias.nbytes
    x, ids = random(5, k), torch.tensor([3, 0, 47], device=DEVICE)
    torch.testing.assert_close(layer(x), x @ groups.dequantized().T + layer.bias, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(layer.method.rows(ids), groups.dequantized()[ids])


def test_the_groups_of_mxfp4_blocks_are_the_same_numbers():
    blocks = random_blocks("MXFP4", 24, 256, np.random.default_rng(3))
    blocks[0, 0] = 0  # the smallest power of two
    weight = torch.from_numpy(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.MXFP4))
    assert torch.equal(mxfp4_groups(Rows(torch.from_numpy(blocks), "MXFP4")).dequantized(), weight)


def test_floats_of_8_bits_multiply_many_rows_as_such():
    """With one scale per output: the inputs of more than 16 rows are rounded to 8 bits, those of fewer are not."""
    n, k = 64, 96
    groups = Groups(random_floats8(n, k), random(n, 1).abs() * 0.01, None, 8, k)
    layer, x = layer_of(n, k, True), random(40, k)
    assert Float8Channels.fits(groups)
    assert not Float8Channels.fits(replace(groups, scales=random(n, 3)))  # scales per group
    assert not Float8Channels.fits(replace(groups, values=groups.values[:40].view(torch.int8)))
    layer.method = Float8Channels(layer, groups, torch.float32)
    expected = x @ groups.dequantized().T + layer.bias
    scale = expected.abs().max()
    torch.testing.assert_close(layer(x[:5]), expected[:5], atol=1e-3, rtol=1e-4)
    error = (layer(x) - expected).abs().max() / scale
    assert 1e-4 < error < 0.03


@pytest.mark.slow
@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_blocks(kind):
    n, k = 24, 512
    quantization = getattr(gguf.GGMLQuantizationType, kind)
    generator = np.random.default_rng(0)
    blocks = random_blocks(kind, n, k, generator)
    weight = dequantize(torch.from_numpy(blocks), kind)
    assert np.array_equal(gguf.quants.dequantize(blocks, quantization), weight.numpy())
    x, bias = random(5, k), random(n)
    out = torch.full((5, n + 3), 7.0, device=DEVICE)
    multiply_blocks(x, torch.from_numpy(blocks).to(DEVICE), kind, out, 2, bias)
    expected = x.cpu() @ weight.T + bias.cpu()
    torch.testing.assert_close(out[:, 2 : n + 2].cpu(), expected, atol=1e-4, rtol=1e-4)
    assert bool((out[:, :2] == 7).all()) and bool((out[:, n + 2 :] == 7).all())


def random_blocks(kind: str, n: int, k: int, generator: np.random.Generator) -> np.ndarray:
    """Random bytes, so that every bit matters, but with scales of a sensible size."""
    values, size = gguf.GGML_QUANT_SIZES[getattr(gguf.GGMLQuantizationType, kind)]
    blocks = generator.integers(0, 256, (n, k // values, size), dtype=np.uint8)
    halves = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}.get(kind, (0, 2) if kind in WITH_MINIMA else (0,))
    if kind == "MXFP4":
        blocks[..., 0] = generator.integers(100, 130, blocks.shape[:-1])
    for at in () if kind == "MXFP4" else halves:
        scale = generator.uniform(0.001, 0.02, (*blocks.shape[:-1], 1)).astype(np.float16)
        blocks[..., at : at + 2] = scale.view(np.uint8)
    return blocks.reshape(n, -1)


WITH_MINIMA = ("Q4_1", "Q5_1", "Q4_K", "Q5_K")


def layer_of(n: int, k: int, bias: bool = False) -> ColumnParallelLinear:
    layer = ColumnParallelLinear(k, [Shard("w", n, 0, n)], bias).to(DEVICE)
    if bias:
        layer.bias.data.copy_(random(n))
    return layer


def random_groups(n: int, k: int, bits: int, zeros: bool, order: bool) -> Groups:
    low = -(1 << (bits - 1))
    values = torch.randint(low, -low, (n, k), dtype=torch.int8, generator=torch.Generator().manual_seed(n))
    scales = random(n, k // 32).abs() * 0.01
    own_zeros = torch.randint(-3, 4, scales.shape, generator=torch.Generator().manual_seed(k)).to(scales)
    permuted = torch.randperm(k, generator=torch.Generator().manual_seed(2))
    return Groups(
        values.to(DEVICE), scales, own_zeros if zeros else None, bits, 32, permuted.to(DEVICE) if order else None
    )


@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_layer_of_a_checkpoint_is_multiplied_by_the_kernel(bits, order):
    """With zero points, a bias and act-order: the numbers are those of the plain method."""
    groups, x = random_groups(48, 96, bits, True, order), random(5, 96)
    plain, layer = layer_of(48, 96, True), layer_of(48, 96, True)
    give_groups(plain, groups, torch.float32)
    layer.use(TritonOps())
    give_groups(layer, groups, torch.float32)
    method = layer.method.method if isinstance(layer.method, Reordered) else layer.method
    assert isinstance(method, TritonGroups) and isinstance(layer.method, Reordered) is order
    torch.testing.assert_close(layer(x), plain(x), atol=1e-4, rtol=1e-4)
    if not order:
        ids = torch.tensor([3, 0, 47], device=DEVICE)
        torch.testing.assert_close(layer.method.rows(ids), groups.dequantized()[ids])


def test_weights_are_rounded_at_load():
    plain, layer = layer_of(32, 80).bfloat16(), layer_of(32, 80).bfloat16()
    for one in (plain, layer):
        one.weight.data.copy_(random(32, 80))
        one.method = QuantizeAtLoad(4)
    layer.use(TritonOps())
    for one in (plain, layer):
        one.finalize()
    assert isinstance(layer.method, TritonGroups)
    ids = torch.arange(32, device=DEVICE)
    assert torch.equal(layer.method.rows(ids), plain.method.rows(ids))


def test_a_fused_layer_of_gguf_blocks():
    """Two parts of different types, and rows that pad the vocabulary."""
    generator = np.random.default_rng(1)
    parts = [
        Rows(torch.from_numpy(random_blocks(kind, n, 256, generator)).to(DEVICE), kind)
        for kind, n in (("Q4_K", 24), ("Q6_K", 10))
    ]
    plain, layer = layer_of(40, 256, True), layer_of(40, 256, True)
    layer.use(TritonOps())
    for one in (plain, layer):
        one.method = PlainBlocks(one, parts, torch.float32)
        one.method.finalize(one)
    assert isinstance(layer.method, TritonBlocks)
    x, ids = random(4, 256), torch.tensor([23, 1], device=DEVICE)
    torch.testing.assert_close(layer(x)[:, :34], plain(x)[:, :34], atol=1e-4, rtol=1e-4)
    layer.method = TritonBlocks(parts[:1], torch.float32)
    assert torch.equal(layer.method.rows(ids), parts[0].dequantized(ids))


STACKS = ["e4m3", "int4", "int8", "act-order", "some zeros", *CODES, "Q4_K", "IQ4_NL", "MXFP4", "plain"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "bias"), [*((kind, True) for kind in STACKS), *((kind, False) for kind in ("e4m3", "int4", "plain"))]
)
def test_experts_of_a_kind_are_one_call(kind, bias):
    # a block of Q4_K has 256 values: with as many experts as the others, the interpreter takes half a minute
    activation, k, count, rows = "clamped_silu" if bias else "silu", 64, 4, 7
    if kind == "Q4_K":
        k, count, rows = 256, 2, 2
    moe = MoESpec(RoutingSpec(num_experts=count, top_k=2), k, activation=activation, bias=bias)
    experts = ListedExperts(k, moe, "experts", PLAIN_WEIGHTS).to(DEVICE)
    for i, expert in experts.experts.items():
        for layer in (expert.gate_up_proj, expert.down_proj):
            if bias:
                layer.bias.data.copy_(random(layer.out_features) + int(i))
            layer.use(TritonOps())
            give_weight(layer, kind, int(i))
    by_id = {int(i): expert for i, expert in experts.experts.items()}
    x, weights = random(rows, k) * 0.1, random(rows, 2).abs()
    ids = torch.rand(rows, count, generator=torch.Generator().manual_seed(3)).topk(2).indices.to(DEVICE)
    expected = run_experts(x, weights, ids, by_id)
    scale = expected.abs().max()
    run = grouped_experts(experts)
    assert (run(x, weights, ids) - expected).abs().max() < 1e-4 * scale
    # the layers' weights are views of the stacks now, and multiply as before
    assert (run_experts(x, weights, ids, by_id) - expected).abs().max() < 1e-4 * scale
    experts.experts["0"].down_proj.method = None
    assert grouped_experts(experts) is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int4", "act-order", *CODES, "IQ4_NL", "plain"])
def test_the_call_does_not_wait_for_the_device(kind, monkeypatch):
    """So that a step can be recorded: tables are on the device after the first call."""

    class Launch:  # the interpreter copies
        def __getitem__(self, grid):
            return lambda *args, **constants: None

    for name in ("_gate_up_kernel", "_down_kernel", "_sum_kernel"):
        monkeypatch.setattr(triton_experts, name, Launch())
    experts = ListedExperts(64, MoESpec(RoutingSpec(num_experts=4, top_k=2), 64), "experts", PLAIN_WEIGHTS).to(DEVICE)
    for i, expert in experts.experts.items():
        for layer in (expert.gate_up_proj, expert.down_proj):
            layer.use(TritonOps())
            give_weight(layer, kind, int(i))
    experts.use(TritonOps())
    assert experts.packed()
    args = random(7, 64), random(7, 2).abs(), torch.tensor([[0, 1]] * 7, device=DEVICE)
    experts(*args)
    with NoWaiting():
        experts(*args)


def give_weight(layer, kind: str, i: int) -> None:
    """A random weight of a kind, different for each i."""
    n, k = layer.out_features, layer.in_features
    if kind == "plain":
        layer.weight.data.copy_(random(n, k).roll(i, 1) * 0.1)
        return
    layer.weight = None
    if kind in BLOCK_TYPES:
        sizes = (n // 2, n // 2) if layer.gated else (n,)
        blocks = [random_blocks(kind, size, k, np.random.default_rng(10 * i + j)) for j, size in enumerate(sizes)]
        layer.method = PlainBlocks(layer, [Rows(torch.from_numpy(b).to(DEVICE), kind) for b in blocks], torch.float32)
        return layer.method.finalize(layer)
    if kind in CODES:
        groups = random_codes(kind, n, k)
    elif kind == "e4m3":
        groups = Groups(random_floats8(n, k), random(n, k // 32).abs() * 1e-4, None, 8, 32)
    else:
        groups = random_groups(n, k, 8 if kind == "int8" else 4, kind != "some zeros" or i == 1, kind == "act-order")
    values = groups.values.view(torch.uint8).roll(i, 1).view(groups.values.dtype)
    order = None if groups.order is None else groups.order.roll(i)
    give_groups(layer, replace(groups, values=values, order=order), torch.float32)
