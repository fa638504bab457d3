"""The native grouped products of experts against the torch reference, for any routing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.worker.cpu import build, native
from quire.worker.cpu.experts import NativeExperts
from quire.worker.cpu.native_linear import PackedLinear, QuantizedLinear
from quire.worker.cpu.packed_linear import PackedMethod
from quire.worker.layers.moe import fused_experts
from quire.worker.layers.quantization.gguf_blocks import dequantize
from tests.helpers.models.gguf_files import blocks_of

EXPERTS, HIDDEN, SIZE = 6, 96, 80


@pytest.fixture(scope="module", autouse=True)
def kernels():
    if build.cpu_level() is None or build.compiler() is None:
        pytest.skip("no native kernels here")
    native.KERNELS.load(background=False)


class Packed:
    """Has a native product where `NativeExperts` looks for it."""

    def __init__(self, linear: PackedLinear | QuantizedLinear):
        self.method = PackedMethod.__new__(PackedMethod)
        self.method.linear = linear


def weights(seed: int = 0, biases: bool = False, size: int = SIZE) -> list[torch.Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(EXPERTS, 2 * size, HIDDEN), (EXPERTS, HIDDEN, size), (EXPERTS, 2 * size), (EXPERTS, HIDDEN)]
    drawn = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    drawn[0] *= HIDDEN**-0.5
    drawn[1] *= SIZE**-0.5
    return drawn if biases else [*drawn[:2], None, None]


def stored_weight(kind: str, weight, bias, gated) -> tuple[QuantizedLinear, torch.Tensor]:
    """(the weight as checkpoints store it, what it stands for)."""
    if kind == "MXFP4":
        blocks = torch.from_numpy(blocks_of(weight.float().numpy(), kind))
        return QuantizedLinear.from_blocks([blocks], kind, tuple(weight.shape), bias, gated), dequantize(blocks, kind)
    values, scale = (100 * weight).to(torch.float8_e4m3fn), torch.full((len(weight), 1), 0.01)
    return QuantizedLinear.from_values(values, scale, None, 8, -1, bias, gated), values.float() * scale


def pack(
    kind: str, gate_up, down, gate_up_bias, down_bias, activation="silu", first=0, weigh_inputs=False, squares=False
):
    """(the native experts, their weights as they are stored)."""
    layers, stored = ([], []), ([], [])
    for i in range(len(gate_up)):
        for side, (weight, biases, gated) in enumerate(((gate_up, gate_up_bias, activation), (down, down_bias, None))):
            bias = None if biases is None else biases[i]
            if kind in ("MXFP4", "e4m3"):
                linear, dense = stored_weight(kind, weight[i], bias, gated)
                stored[side].append(dense)
            elif kind.startswith("int"):
                linear = QuantizedLinear.quantize(weight[i], int(kind[3:]), 32, bias, gated)
                plain = QuantizedLinear.quantize(weight[i], int(kind[3:]), 32)
                stored[side].append(plain.rows(torch.arange(weight.shape[1])))
            else:
                linear = PackedLinear(weight[i], bias, gated, compact=kind == "compact")
                stored[side].append(weight[i])
            layers[side].append(Packed(linear))
    run = NativeExperts.from_layers(*layers, first, weigh_inputs, squares)
    run.owners = layers  # it holds addresses only
    return run, *(torch.stack(side) for side in stored)


def expected(x, routing, ids, gate_up, down, gate_up_bias, down_bias, *options):
    floats = (None if t is None else t.float() for t in (gate_up, down, gate_up_bias, down_bias))
    return fused_experts(x.float(), routing, ids, *floats, *options)


def check(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == torch.bfloat16 and got.isfinite().all()
    error = (got.float() - want).norm() / want.norm().clamp(min=1e-6)
    assert error < 0.01, error


@pytest.mark.parametrize("kind", ["packed", "compact", "int8", "int4", "MXFP4", "e4m3"])
@pytest.mark.parametrize("tokens", [1, 5, 40, 300])
def test_formats(kind, tokens):
    parameters = weights(size=64 if kind == "MXFP4" else SIZE)
    run, gate_up, down = pack(kind, *parameters)
    x, routing = torch.randn(tokens, HIDDEN).bfloat16(), torch.rand(tokens, 2)
    ids = torch.rand(tokens, EXPERTS).topk(2).indices
    check(run(x, routing, ids), expected(x, routing, ids, gate_up, down, None, None, "silu"))


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh", "clamped_silu"])
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("weigh_inputs", [False, True])
def test_forms(activation, biases, weigh_inputs):
    parameters = weights(biases=biases)
    run, gate_up, down = pack("packed", *parameters, activation, weigh_inputs=weigh_inputs)
    x, routing = 3 * torch.randn(9, HIDDEN).bfloat16(), torch.rand(9, 2)
    ids = torch.rand(9, EXPERTS).topk(2).indices
    want = expected(x, routing, ids, gate_up, down, *parameters[2:], activation, 0, weigh_inputs)
    check(run(x, routing, ids), want)


@pytest.mark.parametrize("kind", ["packed", "int4"])
def test_without_a_gate(kind):
    up, down = weights()[0][:, :SIZE], weights()[1]
    run, up, down = pack(kind, up, down, None, None, None, squares=True)
    x, routing, ids = torch.randn(9, HIDDEN).bfloat16(), torch.rand(9, 2), torch.rand(9, EXPERTS).topk(2).indices
    each = torch.stack([(x.float() @ w.float().t()).relu().square() @ v.float().t() for w, v in zip(up, down)], 1)
    check(run(x, routing, ids), (each.gather(1, ids[..., None].expand(-1, -1, HIDDEN)) * routing[..., None]).sum(1))


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_routing(data):
    """Experts without tokens, all tokens on one expert, an expert chosen twice, and experts of other ranks."""
    tokens, top_k = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 3))
    chosen = data.draw(st.lists(st.integers(0, 2 * EXPERTS), min_size=tokens * top_k, max_size=tokens * top_k))
    ids = torch.tensor(chosen).view(tokens, top_k)
    x, routing = torch.randn(tokens, HIDDEN).bfloat16(), torch.rand(tokens, top_k)
    first = data.draw(st.integers(0, EXPERTS))
    run, gate_up, down = pack("packed", *weights(), first=first)
    want = expected(x, routing, ids, gate_up, down, None, None, "silu", first)
    check(run(x, routing, ids), want)


@pytest.mark.parametrize("threads", [1, 2])
def test_rows_do_not_depend_on_other_rows_on_one_path(threads):
    """Tokens get the same bits alone as among others if the products take the path that does not depend on the rows."""
    native.KERNELS.lib.quire_set_threads(threads)
    run, *_ = pack("packed", *weights())
    x, routing = torch.randn(200, HIDDEN).bfloat16(), torch.rand(200, 2)
    ids = torch.rand(200, EXPERTS).topk(2).indices
    together = run(x, routing, ids)
    alone = torch.cat([run(x[i : i + 1], routing[i : i + 1], ids[i : i + 1]) for i in range(50)])
    assert torch.equal(alone, together[:50])
    native.KERNELS.lib.quire_set_threads(torch.get_num_threads())
