"""What adapters add, computed by the native kernels, against plain torch; and in one call for all layers, against the
same layers called one by one.
"""

from __future__ import annotations

import pytest
import torch

from quire.worker.attention.torch_paged import CpuPagedAttention
from quire.worker.cpu.attention import CpuNativeAttention
from quire.worker.cpu.fixed_order_attention import CpuFixedAttention
from quire.worker.cpu.fixed_order_linear import fix_order
from quire.worker.cpu.lora import add_native
from quire.worker.cpu.native_linear import PackedLinear, QuantizedLinear
from quire.worker.cpu.packed_linear import PackedMethod
from quire.worker.layers.linear import LinearMethod
from quire.worker.layers.lora import LoraRows, LoraWeights, add_lora
from tests.worker.cpu.test_segments import STEPS, _model, _play


def random_weights(rank, k, widths, dtype, generator):
    """An adapter of modules of `widths` rows each, side by side; None is a module without matrices."""
    parts, start, first = [], 0, 0
    for width in (width for width in widths if width):
        b = torch.randn(abs(width), rank, generator=generator) / rank**0.5
        if width > 0:
            parts.append((slice(first, first + rank), slice(start, start + width), b.to(dtype)))
            first += rank
        start += abs(width)
    a = torch.randn(first, k, generator=generator) / k**0.5
    return LoraWeights(a.to(dtype), parts)


def some_rows(key, num_rows, chosen, generator):
    index = torch.tensor(sorted(chosen))
    scales = torch.rand(len(index), generator=generator) if key == "1" else None
    return LoraRows(key, index, scales, len(index) == num_rows)


@pytest.mark.parametrize("out_dtype", [None, torch.float32], ids=["same", "float32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("num_rows", "ranks", "k", "widths"),
    [(1, (16,), 64, (64, 32, 32)), (40, (3, 64, 1), 50, (37, -20, 24)), (9, (5, 300), 640, (700,))],
)
def test_native_products_equal_torchs(native_kernels, num_rows, ranks, k, widths, dtype, out_dtype):
    """Odd sizes, ranks that are no multiple of a block, rows with two adapters and none, modules without matrices."""
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, k, generator=generator).to(dtype)
    out = torch.randn(num_rows, sum(map(abs, widths)) + 3, generator=generator).to(out_dtype or dtype)
    groups = []
    for i, rank in enumerate(ranks):
        chosen = range(num_rows) if i == 0 and len(ranks) == 1 else range(i, num_rows, i + 2)
        rows = some_rows(str(i), num_rows, chosen, generator)
        groups.append((rows, random_weights(rank, k, widths, dtype, generator)))
    expected, got = out.clone(), out.clone()
    add_lora(x, expected, groups)
    add_native(x, got, groups)
    tolerance = 2e-2 if out.dtype == torch.bfloat16 else 4e-3 if out.dtype == torch.float16 else 1e-4
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)
    assert not torch.equal(got, out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("num_rows", "ranks", "k", "widths"),
    [(1, (16,), 64, (64, 32, 32)), (37, (3, 20, 1), 50, (37, -20, 24)), (5, (5,), 130, (100,))],
)
def test_triton_products_equal_torchs(num_rows, ranks, k, widths, dtype):
    """Under the interpreter (compiled on a GPU): tiles of several adapters, and rows with two."""
    pytest.importorskip("triton")
    from quire.worker.cuda.kernels import triton_lora

    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, k, generator=generator).to(device, dtype)
    out = torch.randn(num_rows, sum(map(abs, widths)) + 3, generator=generator).to(device, dtype)
    groups = []
    for i, rank in enumerate(ranks):
        chosen = range(num_rows) if len(ranks) == 1 else range(0, num_rows, 3) if i == 2 else range(i, num_rows, 2)
        rows = some_rows(str(i), num_rows, chosen, generator)
        scales = None if rows.scales is None else rows.scales.to(device)
        rows = LoraRows(rows.key, rows.index.to(device), scales, rows.is_all, overlaps=i == 2)
        groups.append((rows, random_weights(rank, k, widths, dtype, generator).to(torch.device(device))))
    expected, got = out.clone(), out.clone()
    add_lora(x, expected, groups)
    triton_lora.add(x, got, groups)
    tolerance = 1e-2 if dtype == torch.float16 else 1e-4
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)
    assert not torch.equal(got, out)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("num_rows", "ranks", "k", "widths"),
    [
        (33, (16,), 64, (64, 32, 32)),
        (70, (3, 33, 64), 50, (48, -16, 37)),
        (100, (20, 96), 1056, (300,)),
        (64, (17,) * 12, 96, (40,)),
    ],
)
def test_products_of_many_rows_equal_torchs(native_kernels, num_rows, ranks, k, widths, out_dtype):
    """Tiles of AMX: steps of 32 and of 16 ranks, pairs of tiles without rows of an adapter, rows with two, and adapters
    with too few rows for tiles.
    """
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, k, generator=generator).bfloat16()
    out = torch.randn(num_rows, sum(map(abs, widths)) + 3, generator=generator).to(out_dtype)
    groups = []
    for i, rank in enumerate(ranks):
        chosen = range(i, num_rows, len(ranks)) if i else range(num_rows // 2)
        rows = some_rows(str(i), num_rows, chosen, generator)
        groups.append((rows, random_weights(rank, k, widths, torch.bfloat16, generator)))
    expected, got = out.clone(), out.clone()
    add_lora(x, expected, groups)
    add_native(x, got, groups)
    tolerance = 1e-2 if out_dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)
    for _, weights in groups:
        assert bool(weights.packed.many.tiles) == (native_kernels.level == "amx")
        assert not weights.packed.alone.tiles


def test_the_sums_of_a_row_have_one_order(native_kernels):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 96, generator=generator).bfloat16()
    weights = random_weights(24, 96, (256,), torch.bfloat16, generator)
    together = torch.zeros(50, 256)
    add_native(x, together, [(LoraRows("a", torch.arange(50), None, True), weights)], fixed_order=True)
    for i in (0, 3, 49):
        alone = torch.zeros(1, 256)
        add_native(x[i : i + 1], alone, [(LoraRows("a", torch.arange(1), None, True), weights)], fixed_order=True)
        assert torch.equal(alone[0], together[i])


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("half", [16, 40, 96])
@pytest.mark.parametrize("kind", ["bfloat16", "int8", "int4"])
def test_halves_of_a_gated_native_product(kind, half, rows, native_kernels):
    """The gate and up without the activation are those of the same weight without one."""
    weight = torch.randn(2 * half, 64, generator=torch.Generator().manual_seed(half)).bfloat16()
    bias = torch.linspace(-1, 1, 2 * half).bfloat16()
    x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows)).bfloat16()

    def linear(gated):
        if kind == "bfloat16":
            return PackedLinear(weight, bias, gated)
        return QuantizedLinear.quantize(weight, int(kind[3:]), 64, bias, gated)

    plain = linear(None)(x, torch.float32)
    torch.testing.assert_close(linear("silu").halves(x), plain, rtol=1e-4, atol=1e-4)


def adapt(model, ranks, fixed_order=False):
    """Give the model random adapters "0", "1" ... of `ranks` for all its linear layers but those of the MLP of layer 0.
    Returns a function that chooses the rows of steps: every other token has one of the adapters, some both.
    """
    from quire.worker.cpu.device import CpuPlatform
    from quire.worker.lora.adapters import Adapters, LoraLimits

    adapters = Adapters(model, CpuPlatform(), LoraLimits(64, 8, 8), fixed_order)
    generator = torch.Generator().manual_seed(1)
    linears = [
        layer for layer in model.modules() if getattr(layer, "lora", None) is not None and hasattr(layer, "in_features")
    ]
    for i, rank in enumerate(ranks):
        adapted = []
        for layer in linears:
            widths = [shard.length for shard in layer.shards] if hasattr(layer, "shards") else [layer.out_features]
            weights = random_weights(rank, layer.in_features, widths, torch.bfloat16, generator)
            parts = [(ranks, columns, b.to(model.dtype)) for ranks, columns, b in weights.parts]
            adapted.append((layer, LoraWeights(weights.a.to(model.dtype), parts)))
            layer.lora.weights[str(i)] = adapted[-1][1]
        adapters.step.active[str(i)] = adapted
    step, forward = adapters.step, model.forward

    def run(input_ids, positions, attn, hidden=None, needed_rows=None, *rest):
        step.num_tokens = len(input_ids)
        kept = range(len(input_ids)) if needed_rows is None else needed_rows.tolist()
        generator.manual_seed(len(input_ids))
        step.rows, step.needed = [], []
        for i in range(len(ranks)):
            # the last position of a step is 2 or more, so that single tokens have an adapter
            chosen = [t for t in range(len(input_ids)) if (t + len(input_ids)) % 3 != i]
            if chosen:
                step.rows.append(some_rows(str(i), len(input_ids), chosen, generator))
                scale = dict(zip(chosen, step.rows[-1].scales.tolist() if step.rows[-1].scales is not None else ()))
                places = [place for place, t in enumerate(kept) if t in chosen]
                if places:
                    scales = torch.tensor([scale[kept[p]] for p in places]) if scale else None
                    index = torch.tensor(places)
                    step.needed.append(LoraRows(str(i), index, scales, len(index) == len(kept)))
        return forward(input_ids, positions, attn, hidden, needed_rows, *rest)

    model.forward = run
    return step


@pytest.mark.slow
@pytest.mark.parametrize("wanted", [None, lambda count: 1], ids=["all", "last"])
@pytest.mark.parametrize("backend", [CpuFixedAttention, CpuPagedAttention])
@pytest.mark.parametrize(
    ("name", "quantization"), [("qwen3", None), ("llama-bias", None), ("llama-tied", "int8"), ("qwen3", "int4")]
)
def test_same_bits_as_layer_by_layer(checkpoint, native_kernels, monkeypatch, name, quantization, backend, wanted):
    """Mixed steps of two adapters, both and none, with attention in the native call and between its segments."""
    model = _model(checkpoint(name, dtype="bfloat16"), quantization=quantization)
    fix_order(model)  # and of attention, too: otherwise the bits may depend on the number of rows
    base = _play(model, backend(), wanted)
    step = adapt(model, (4, 16), fixed_order=True)
    fused = model.model.fused_layers()
    monkeypatch.setattr(fused, "takes", lambda lora, takes=fused.takes: takes(lora) or pytest.fail("not fused"))
    got = _play(model, backend(), wanted)
    monkeypatch.setattr(model.model, "fused_layers", lambda: None)
    expected = _play(model, backend(), wanted)
    assert len(got) == len(STEPS) and step.rows
    for ours, theirs, plain in zip(got, expected, base):
        assert torch.equal(ours, theirs) and not torch.equal(ours, plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "quantization"), [("qwen3", None), ("llama-bias", None), ("llama-tied", "int8"), ("qwen3", "int4")]
)
def test_sums_of_products_take_adapters(checkpoint, native_kernels, monkeypatch, name, quantization):
    """Where products add the adapters to their sums, results are as near to those in float32 as if the adapters were
    added afterwards.
    """
    folder = checkpoint(name, dtype="bfloat16")
    model = _model(folder, quantization=quantization)
    base = _play(model, CpuNativeAttention())
    step = adapt(model, (4, 16))
    fused = model.model.fused_layers()
    got = _play(model, CpuNativeAttention())
    tables = [fused.lora._table(rows.key, step) for rows in step.rows]
    tiles = {bool(one.tiles) for table in tables for one in table if one.a}
    assert tiles == {native_kernels.level == "amx"}
    monkeypatch.setattr(model.model, "fused_layers", lambda: None)
    monkeypatch.setattr(PackedMethod, "apply_adapted", LinearMethod.apply_adapted)
    expected = _play(model, CpuNativeAttention())
    for ours, theirs, plain in zip(got, expected, base):
        assert (ours - theirs).norm() < 0.05 * (theirs - plain).norm()
    if quantization is None:
        exact = _model(folder, torch.float32)
        adapt(exact, (4, 16))
        errors = [[(out - one).norm() for out, one in zip(outs, _play(exact))] for outs in (got, expected)]
        assert sum(errors[0]) < 1.02 * sum(errors[1])


def test_an_adapter_of_other_layers_runs_layer_by_layer(checkpoint, native_kernels):
    model = _model(checkpoint("qwen3-moe", dtype="bfloat16"))
    _play(model, CpuNativeAttention(), steps=STEPS[-1:])
    step = adapt(model, (4,))
    step.rows = [LoraRows("0", torch.arange(1), None, True)]
    fused = model.model.fused_layers()
    assert fused.takes(step)
    step.active["0"] = [*step.active["0"], (model.lm_head, step.active["0"][0][1])]
    assert not fused.takes(step)
