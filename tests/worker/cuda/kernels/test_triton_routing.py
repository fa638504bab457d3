"""worker/cuda/kernels/triton_routing.py under Triton's interpreter (compiled on a GPU) against torch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")
from quire.worker.cuda.kernels.triton_routing import route, sort_by_expert
from quire.worker.layers import routing
from quire.worker.spec.moe import RoutingSpec

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []

SPECS = {
    "Qwen3": RoutingSpec(128, 8, weights="normalized"),
    "Mixtral": RoutingSpec(8, 2, weights="normalized"),
    "60 experts": RoutingSpec(60, 4),
    "gpt-oss": RoutingSpec(32, 4, "logits", "softmax", bias=True),
    "Llama 4": RoutingSpec(16, 1, "logits", "sigmoid"),
    "DeepSeek V2": RoutingSpec(24, 6, scale=2.5, num_groups=3, top_groups=2),
    "DeepSeek V3": RoutingSpec(32, 5, "sigmoid", "normalized", 1.7, 1e-20, 4, 2, 2, correction=True),
    "Ernie": RoutingSpec(12, 3, weights="normalized", epsilon=1e-12, correction=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SPECS)
def test_routes_as_torch(name, dtype):
    spec, generator = SPECS[name], torch.Generator().manual_seed(0)
    order = torch.rand(5, spec.num_experts, generator=generator).argsort(1)
    logits = (order / 8 - 2).to(DEVICE, dtype)  # no two are equal, in bfloat16 either
    parts = [torch.randn(spec.num_experts, generator=generator).to(DEVICE) for _ in range(2)]
    correction, bias = (part if there else None for part, there in zip(parts, (spec.correction, spec.bias)))
    want, want_ids = routing.route(spec, logits, correction, bias)
    got, ids = route(spec, logits, correction, bias)
    assert torch.equal(ids, want_ids) and got.dtype == torch.float32 and ids.dtype == torch.int64
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)


def test_equals_and_numbers_that_are_none():
    """The first of equals, and experts that exist whatever the logits are."""
    logits = torch.zeros(3, 6, device=DEVICE)
    logits[1], logits[2, 4] = float("nan"), float("inf")
    weights, ids = route(RoutingSpec(6, 3), logits)
    assert ids[0].tolist() == [0, 1, 2] and weights[0].tolist() == pytest.approx([1 / 6] * 3)
    assert weights[1:].isnan().any(1).all() and ((ids >= 0) & (ids < 6)).all()


@pytest.mark.slow
@settings(max_examples=40)
@given(
    ids=st.lists(st.integers(0, 9), min_size=1, max_size=60) | st.just([3, 9, 1] * 430),
    first=st.integers(0, 3),
    num=st.integers(1, 8),
    tile=st.sampled_from([1, 4, 16]),
)
def test_tiles_hold_every_pair_once_in_order(ids, first, num, tile):
    pairs, experts, most = sort_by_expert(torch.tensor(ids, device=DEVICE)[:, None], first, num, tile)
    pairs, experts = pairs.tolist(), experts.tolist()
    num_tiles = experts[most]
    assert len(pairs) == most * tile and len(experts) == most + 1 and num_tiles <= most
    tiles = [(experts[i], pairs[i * tile : (i + 1) * tile]) for i in range(num_tiles)]
    found = [(expert, pair) for expert, tile in tiles for pair in tile if pair != len(ids)]
    assert found == sorted((e - first, i) for i, e in enumerate(ids) if first <= e < first + num)
    assert all(tile[0] != len(ids) for _, tile in tiles)  # no tile is empty
