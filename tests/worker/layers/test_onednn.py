"""Weights that oneDNN arranged multiply as the weights do."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from quire.worker.layers import onednn
from quire.worker.layers.linear import ColumnParallelLinear, Shard, product
from quire.worker.layers.onednn import Arranged
from quire.worker.layers.quantization.blocks import PlainBlocks, Rows

pytestmark = pytest.mark.skipif(
    not torch.backends.cpu.get_cpu_capability().startswith("AVX512"), reason="oneDNN arranges bfloat16 for AVX-512 only"
)


@pytest.fixture(autouse=True)
def _everywhere(monkeypatch):
    monkeypatch.setattr(onednn, "_takes_arranged", lambda: True)
    monkeypatch.setattr(onednn.host, "memory", lambda: (10 << 30, 10 << 30))


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).bfloat16()


def _layer(rows: int, columns: int, bias: bool) -> ColumnParallelLinear:
    layer = ColumnParallelLinear(columns, [Shard("w", rows, 0, rows)], bias)
    layer.weight = torch.nn.Parameter(_random(rows, columns), requires_grad=False)
    layer.bias = torch.nn.Parameter(_random(rows), requires_grad=False) if bias else None
    return layer


@pytest.mark.parametrize(("rows", "columns"), [(96, 64), (10, 7), (1, 300)])
@pytest.mark.parametrize("tokens", [0, 1, 2, 40])
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_multiplies_as_by_its_weight(rows, columns, tokens, bias):
    layer, x = _layer(rows, columns, bias), _random(tokens, 2 * columns)[:, ::2]
    want = F.linear(x.double(), layer.weight.double(), layer.bias.double() if bias else None)
    torch.testing.assert_close(layer(x).double(), want, rtol=2**-7, atol=0.05)
    assert bool(layer._arranged) == (tokens > 1)  # one row is multiplied by the weight itself


def test_a_new_weight_is_arranged_anew():
    layer, x = _layer(96, 64, False), _random(3, 64)
    layer(x)
    layer.weight.data.mul_(-2)
    layer.finalize()
    torch.testing.assert_close(layer(x), product(x, layer.weight))


def test_it_needs_memory_to_spare(monkeypatch):
    monkeypatch.setattr(onednn.host, "memory", lambda: (10 << 30, 5 << 30))
    layer = _layer(96, 64, False)
    assert Arranged.of(layer.weight) is None
    assert layer(_random(3, 64)).shape == (3, 96)


def test_other_types_are_not_arranged():
    assert Arranged.of(torch.randn(96, 64)) is None
    layer = _layer(96, 64, False)
    assert layer.arranged(torch.float32) is None and layer.arranged(torch.bfloat16) is not None


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_blocks_keep_one_copy_for_each_number_of_rows(kind):
    gguf = pytest.importorskip("gguf")
    stored = gguf.quants.quantize(_random(96, 64).float().numpy(), gguf.GGMLQuantizationType[kind])
    weight = torch.from_numpy(np.asarray(gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[kind])))
    layer = _layer(96, 64, False)
    layer.method = PlainBlocks(layer, [Rows(torch.from_numpy(stored), kind)], torch.bfloat16)
    for tokens in (1, 2, 40):
        x = _random(tokens, 64)
        torch.testing.assert_close(layer(x).double(), x.double() @ weight.double().T, rtol=2**-6, atol=0.1)
    (kept,) = layer.method._kept
    assert kept.arranged is not None and (kept.whole is None) == (kind == "Q4_1")
