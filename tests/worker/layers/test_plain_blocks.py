"""Weights of GGUF files without native kernels: dequantized once where there is memory, else for every product."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.worker.layers.linear import ColumnParallelLinear, Shard
from quire.worker.layers.quantization import blocks
from quire.worker.layers.quantization.blocks import PlainBlocks, Rows

gguf = pytest.importorskip("gguf")


@pytest.mark.parametrize(("available", "times"), [(10 << 30, 1), (5 << 30, 3)])
def test_weights_are_dequantized_once_if_half_of_the_memory_stays_free(monkeypatch, available, times):
    monkeypatch.setattr(blocks.host, "memory", lambda: (10 << 30, available))
    dequantize, calls = blocks.dequantize, []
    monkeypatch.setattr(blocks, "dequantize", lambda *args: calls.append(1) or dequantize(*args))
    generator = np.random.default_rng(0)
    parts, whole = [], []
    for rows, kind in ((96, "Q8_0"), (32, "Q4_1")):
        weight = generator.standard_normal((rows, 64), dtype=np.float32)
        stored = gguf.quants.quantize(weight, gguf.GGMLQuantizationType[kind])
        parts.append(Rows(torch.from_numpy(stored), kind))
        whole.append(torch.from_numpy(gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[kind])))
    layer = ColumnParallelLinear(64, [Shard("w", 128, 0, 128)], False)
    layer.method = PlainBlocks(layer, parts, torch.float32)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        torch.testing.assert_close(layer.method.apply(layer, x), x @ torch.cat(whole).T)
    assert len(calls) == times * len(parts)
