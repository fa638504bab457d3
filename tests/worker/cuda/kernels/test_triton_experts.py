"""worker/cuda/kernels/triton_experts.py under Triton's interpreter (compiled on a GPU) against torch, for
any routing.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")
from quire.worker.cuda.kernels import triton_experts
from quire.worker.layers.moe import fused_experts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NARROW = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # Triton's interpreter multiplies no bfloat16
SHAPES = (2, 48, 40), (2, 40, 24)  # of the stacks of two experts of 24
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


def check(ids, hidden, size, num, activation, biases, first=0, weigh_inputs=False):
    generator = torch.Generator().manual_seed(0)
    shapes = (num, 2 * size, hidden), (num, hidden, size), (num, 2 * size), (num, hidden)
    parameters = [torch.randn(shape, generator=generator).to(DEVICE) * 0.2 for shape in shapes]
    if not biases:
        parameters[2:] = None, None
    x = torch.randn(len(ids), hidden, generator=generator).to(DEVICE)
    weights = torch.rand(ids.shape, generator=generator).to(DEVICE)
    args = x, weights, ids.to(DEVICE), *parameters, activation, first, weigh_inputs
    torch.testing.assert_close(triton_experts.fused_experts(*args), fused_experts(*args), atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh", "clamped_silu"])
@pytest.mark.parametrize("weigh_inputs", [False, True])
def test_forms(activation, weigh_inputs):
    ids = torch.rand(11, 4, generator=torch.Generator().manual_seed(1)).topk(2).indices
    check(ids, 72, 40, 4, activation, activation == "clamped_silu", weigh_inputs=weigh_inputs)


def test_wide_tiles():
    """More than 16 rows per expert."""
    ids = torch.rand(40, 2, generator=torch.Generator().manual_seed(2)).topk(1).indices
    check(ids, 40, 24, 2, "silu", True)


@pytest.mark.slow
def test_tiles_of_prompts(monkeypatch):
    """More than 96 rows per expert, whose tiles have 128 rows in 16 bits; results of other ranks' experts are never
    read, whatever the memory held before.
    """
    generator, empty = torch.Generator().manual_seed(3), torch.empty
    ids = torch.rand(150, 3, generator=generator).topk(2).indices
    x = torch.randn(150, 40, generator=generator).to(DEVICE, NARROW)
    stacks = [torch.randn(shape, generator=generator).to(DEVICE, NARROW) * 0.2 for shape in SHAPES]
    args = x, torch.rand(150, 2, generator=generator).to(DEVICE), ids.to(DEVICE), *stacks, None, None, "silu", 1
    want = fused_experts(*args)

    def used_before(*shape, **kwargs):
        tensor = empty(*shape, **kwargs)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor.fill_(2**30)

    monkeypatch.setattr(torch, "empty", used_before)
    torch.testing.assert_close(triton_experts.fused_experts(*args), want, atol=2e-2, rtol=2e-2)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_routing(data):
    """Experts without tokens, all tokens on one, an expert chosen twice, and experts of other ranks."""
    num, tokens, top_k = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 20)), data.draw(st.integers(1, 3))
    chosen = data.draw(st.lists(st.integers(0, 6), min_size=tokens * top_k, max_size=tokens * top_k))
    check(torch.tensor(chosen).view(tokens, top_k), 16, 8, num, "silu", False, data.draw(st.integers(0, 3)))
