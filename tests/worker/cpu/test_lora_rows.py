"""The bits of a row of a packed layer with adapters do not depend on the other rows and their adapters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from quire.worker.cpu.fixed_order_linear import fix_order
from quire.worker.cpu.lora import PackedLora, run_adapted
from quire.worker.cpu.packed_linear import PackedMethod
from quire.worker.layers.activation import gated as activation
from quire.worker.layers.linear import ColumnParallelLinear, GateUpParallelLinear, Shard
from quire.worker.layers.lora import LoraRows, add_lora
from tests.worker.cpu.test_lora_kernels import random_weights

NUM_ROWS = 100
PIECES = [(0, 1), (4, 6), (17, 18), (31, 33), (40, 72), (41, 57), (96, 100)]


def packed_layer(gated: bool, k: int, size: int, scale: torch.Tensor):
    """A layer of `size` outputs, whose rows run with one algorithm, and its weight."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        if gated:
            layer = GateUpParallelLinear(k, size, False, "mlp")
        else:
            layer = ColumnParallelLinear(k, [Shard("proj", size, 0, size)], True)
            layer.bias.data = torch.linspace(-1, 1, size)
    finally:
        torch.set_default_dtype(torch.float32)
    generator = torch.Generator().manual_seed(size)
    weight = (torch.randn(layer.out_features, k, generator=generator) / k**0.5 * scale).bfloat16()
    layer.weight.data = weight
    layer.method = PackedMethod(layer)
    fix_order(nn.ModuleList([layer]))
    return layer, weight


def groups_of(begin: int, end: int, adapters, generator_seed: int = 5):
    """The groups of rows [begin, end): row r has adapter i if bit i of a hash of r is set."""
    generator = torch.Generator().manual_seed(generator_seed)
    scales = torch.rand(NUM_ROWS, generator=generator)
    groups = []
    for i, weights in enumerate(adapters):
        rows = [r for r in range(begin, end) if (r * 37 + r // 7) >> i & 1]
        if rows:
            of_rows = scales[rows] if i % 2 else None
            groups.append((LoraRows(str(i), torch.tensor(rows) - begin, of_rows, len(rows) == end - begin), weights))
    return groups


@pytest.mark.parametrize("spread", [1.0, 30.0], ids=["compact", "16 bits"])
@pytest.mark.parametrize(
    ("gated", "k", "size", "widths"),
    [
        (False, 96, 128, (64, 32, 32)),
        (False, 70, 100, (100,)),
        (False, 64, 75, (40, 35)),  # parts that begin inside a tile
        (True, 64, 80, (80, 80)),
        (True, 70, 50, (-50, 50)),
    ],
)
def test_alone_and_beside_others(native_kernels, gated, k, size, widths, spread):
    generator = torch.Generator().manual_seed(1)
    scale = torch.exp2(torch.rand(k, generator=generator) * spread - spread)
    layer, weight = packed_layer(gated, k, size, scale)
    assert (layer.method.linear.linear.compact is not None) == (spread == 1.0)
    adapters = [random_weights(rank, k, widths, torch.bfloat16, generator) for rank in (3, 16, 20, 48, 8)]
    adapters[-1].parts[-1][2][-1, 0] = torch.inf  # for the rows with this adapter only
    x = torch.randn(NUM_ROWS, k, generator=generator).bfloat16()

    def run(begin, end):
        return run_adapted(layer, x[begin:end], groups_of(begin, end, adapters))

    together = run(0, NUM_ROWS)
    for begin, end in PIECES:
        alone = run(begin, end)
        assert torch.equal(alone.view(torch.int16), together[begin:end].view(torch.int16)), (begin, end)

    full = x.float() @ weight.float().t() + (0.0 if layer.bias is None else layer.bias.float())
    add_lora(x, full, groups_of(0, NUM_ROWS, adapters))
    expected = activation("silu")(full) if gated else full
    finite = expected.isfinite()
    assert torch.equal(together.isfinite(), finite) and not finite.all()
    torch.testing.assert_close(together[finite].float(), expected[finite], atol=2e-2, rtol=2e-2)
    tiled = [bool(PackedLora.from_weights(one).args_in(layer).tiles) for one in adapters]
    has_tiles = native_kernels.level == "amx" and widths != (40, 35)
    assert tiled == [has_tiles] * 4 + [False]
