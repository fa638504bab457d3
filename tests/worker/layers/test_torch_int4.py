"""Weights of 4 bits in torch's own packed product."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.worker.layers.linear import ColumnParallelLinear, Shard
from quire.worker.layers.quantization import blocks as blocks_module
from quire.worker.layers.quantization import torch_int4
from quire.worker.layers.quantization.blocks import PlainBlocks, Rows
from quire.worker.layers.quantization.gguf_blocks import NIBBLE_TYPES, dequantize, nibbles
from quire.worker.layers.quantization.torch_int4 import PackedNibbles

pytestmark = pytest.mark.skipif(
    not torch.backends.cpu.get_cpu_capability().startswith("AVX"), reason="torch has reference loops only"
)


def random_blocks(rows: int, values: int, kind: str, seed: int = 0) -> torch.Tensor:
    """Blocks with random codes, and scales like those of a weight."""
    generator = np.random.default_rng(seed)
    size, count = {"Q4_0": 18, "Q4_1": 20, "Q4_K": 144}[kind], values // (256 if kind == "Q4_K" else 32)
    stored = generator.integers(0, 256, (rows, count, size), dtype=np.uint8)
    halves = generator.uniform(0.001, 0.01, (rows, count, 2)).astype(np.float16)
    if kind == "Q4_1":
        halves[..., 1] = -8 * halves[..., 0]  # symmetrical, nearly
    width = 2 if kind == "Q4_0" else 4
    stored[..., :width] = halves.view(np.uint8)[..., :width]
    return torch.from_numpy(stored.reshape(rows, -1))


@pytest.mark.parametrize("kind", NIBBLE_TYPES)
def test_codes_scales_and_offsets_are_the_weight(kind):
    stored = random_blocks(8, 512, kind)
    codes, scales, offsets = nibbles(stored, kind)
    weight = codes.unflatten(1, (-1, 32)) * scales.unsqueeze(-1) + offsets.unsqueeze(-1)
    torch.testing.assert_close(weight.flatten(1), dequantize(stored, kind))


@pytest.mark.parametrize("kind", NIBBLE_TYPES)
@pytest.mark.parametrize("rows", [16, 48, 208])
def test_the_product_is_that_of_the_weight(monkeypatch, kind, rows):
    monkeypatch.setattr(torch_int4, "_PIECE", 64 * 512)  # several pieces
    stored = random_blocks(rows, 512, kind)
    packed, weight = PackedNibbles.from_blocks(stored, kind, torch.bfloat16), dequantize(stored, kind)
    scales = nibbles(stored, kind)[1].repeat_interleave(32, 1)
    got = packed.product(torch.eye(512).bfloat16()).float().T
    rounded_away = 0.29 * scales.pow(2).mean().sqrt()  # by 4 bits
    assert (got - weight).pow(2).mean().sqrt() < 0.1 * rounded_away
    x = torch.randn(3, 5, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    want = x.float() @ weight.T
    assert packed.product(x).shape == (3, 5, rows)
    assert (packed.product(x) - want).norm() < 0.01 * want.norm()
    assert packed.product(x[:0]).shape == (0, 5, rows)


def test_what_torch_has_no_fast_product_for(monkeypatch):
    stored = random_blocks(32, 256, "Q4_0")
    assert PackedNibbles.from_blocks(stored, "Q4_0", torch.float32) is None
    assert PackedNibbles.from_blocks(stored[:20], "Q4_0", torch.bfloat16) is None
    assert PackedNibbles.from_blocks(stored, "Q8_0", torch.bfloat16) is None
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert PackedNibbles.from_blocks(stored, "Q4_0", torch.bfloat16) is None


@pytest.mark.parametrize("rows", [1, 70])
def test_a_layer_of_several_types(monkeypatch, rows):
    monkeypatch.setattr(blocks_module.host, "memory", lambda: (10 << 30, 10 << 30))
    kinds = ("Q4_K", "Q4_0", "Q4_1", "Q4_1")
    parts = [Rows(random_blocks(32, 256, kind, seed), kind) for seed, kind in enumerate(kinds)]
    parts[1] = Rows(parts[1].blocks[:20], "Q4_0")  # not packed: torch wants a multiple of 16
    layer = ColumnParallelLinear(256, [Shard("w", 116, 0, 116)], False)
    layer.method = PlainBlocks(layer, parts, torch.bfloat16)
    packed, product = [], PackedNibbles.product
    monkeypatch.setattr(PackedNibbles, "product", lambda self, x: packed.append(self) or product(self, x))
    x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    want = x.float() @ torch.cat([part.dequantized() for part in parts]).T
    got = layer.method.apply(layer, x)
    assert got.shape == want.shape and (got - want).norm() < 0.01 * want.norm()
    assert len(packed) == (2 if rows == 1 else 0)  # neighbours of one type are one product
