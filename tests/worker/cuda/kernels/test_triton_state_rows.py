"""What state mixers compute for each row, under Triton's interpreter (compiled on a GPU), against the torch twins."""

import pytest
import torch

pytest.importorskip("triton")
from quire.worker.cuda.kernels import triton_state_rows as kernels
from quire.worker.layers import rowwise
from quire.worker.layers.norm import rms_norm
from quire.worker.layers.states import delta_rule
from quire.worker.layers.states.delta_rule import DeltaHeads

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


@pytest.mark.parametrize("tiled", [False, True])
def test_delta_inputs(tiled):
    """The inputs are parts of wider rows; small and large gates keep their precision."""
    heads = DeltaHeads(2, 24, 6, tiled, 2.0)
    x, gates = random(5, 2 * 2 * 24 + 30), random(5, 20)[:, :12] * 12
    rates, bias = random(6), random(6)
    found = kernels.delta_inputs(x, gates, rates, bias, heads)
    for one, expected in zip(found, delta_rule.delta_inputs(x, gates, rates, bias, heads), strict=True):
        torch.testing.assert_close(one, expected, rtol=2e-5, atol=1e-7)
    alone = kernels.delta_inputs(x[3:4], gates[3:4], rates, bias, heads)
    for one, all_rows in zip(alone, found):
        assert torch.equal(one, all_rows[3:4])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gated_norm(dtype):
    x, z, weight = random(5, 3, 20), random(5, 100)[:, 17:77].to(dtype), random(20)
    found = kernels.gated_norm(x, z, weight, 1e-6)
    assert found.dtype == dtype
    torch.testing.assert_close(found, delta_rule.gated_norm(x, z, weight, 1e-6), rtol=1e-3, atol=1e-5)
    assert torch.equal(kernels.gated_norm(x[2:3], z[2:3], weight, 1e-6), found[2:3])


def test_norms_and_sums():
    x, weight = random(4, 7, 90)[:, 1:5, 3:], random(87)
    torch.testing.assert_close(kernels.state_norm(x, weight, 1e-5), rms_norm(x, weight, 1e-5))
    torch.testing.assert_close(kernels.state_norm(x, None, 1e-5), rms_norm(x, None, 1e-5))
    torch.testing.assert_close(kernels.l2_norm(x), rowwise.l2_norm(x))
    torch.testing.assert_close(kernels.square_sums(x), x.square().sum(-1, keepdim=True))
