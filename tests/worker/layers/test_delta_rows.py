"""What a gated delta net computes for each token by itself: the native kernels, at every level, and the twins."""

from __future__ import annotations

import pytest
import torch

from quire.worker.cpu import states
from quire.worker.layers.states import delta_rule
from quire.worker.layers.states.delta_rule import DeltaHeads
from tests.helpers.worker.native_kernels import DTYPES, ROUNDING, assert_near


@pytest.mark.parametrize("tiled", [False, True])
def test_inputs(kernels, rng, tiled):
    heads = DeltaHeads(3, rng.choice([8, 16, 24, 128]), 6, tiled, rng.choice([1.0, 2.0]))
    rows, keys = rng.choice([1, 5, 90]), heads.num_k * heads.k_dim
    x, gates = torch.randn(rows, 2 * keys + 40) * 3, torch.randn(rows, 2 * heads.num_v) * 12
    a_log, dt_bias = torch.randn(heads.num_v), torch.randn(heads.num_v)
    found = states.delta_inputs(x, gates, a_log, dt_bias, heads)
    for one, expected in zip(found, delta_rule.delta_inputs(x, gates, a_log, dt_bias, heads), strict=True):
        assert one.shape == expected.shape and torch.allclose(one, expected, rtol=1e-5, atol=1e-6)
    # a token's results do not depend on the others
    alone = states.delta_inputs(x[-1:], gates[-1:], a_log, dt_bias, heads)
    assert all(torch.equal(one[-1:], other) for one, other in zip(found, alone, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_norm(kernels, rng, dtype):
    rows, heads, size = rng.choice([1, 5, 90]), rng.choice([1, 4]), rng.choice([8, 16, 24, 128])
    x, weight = torch.randn(rows, heads, size), torch.randn(size)
    z = (torch.randn(rows, heads * size + 8) * 20).to(dtype)[:, 8:]
    found = states.gated_norm(x, z, weight, 1e-6)
    expected = delta_rule.gated_norm(x, z, weight, 1e-6)
    assert found.dtype == expected.dtype == dtype
    assert_near(found, expected, 2 * ROUNDING[dtype])
    assert torch.equal(found[-1:], states.gated_norm(x[-1:], z[-1:], weight, 1e-6))
