"""The norm, rotation and storage of latents, and the rotation of queries, under Triton's interpreter (compiled on a
GPU) against the torch twins.
"""

import pytest
import torch

pytest.importorskip("triton")
from quire.worker.attention.scaled import store
from quire.worker.cuda.kernels.triton_mla import rotate_tails, write_latents
from quire.worker.layers.norm import rms_norm
from quire.worker.layers.rotary import apply_rotary

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


@pytest.mark.parametrize("rank, rope_dim", [(24, 8), (20, 12)])
def test_latents_are_stored_as_torch_stores_them(rank, rope_dim):
    latents, weight = random(5, 60)[:, 11 : 11 + rank + rope_dim], random(rank)
    cos_sin, positions = random(30, rope_dim), torch.tensor([7, 8, 0, 29, 3], device=DEVICE)
    slots = torch.tensor([9, 3, 14, 0, 6], device=DEVICE)
    found, expected = (torch.zeros(4, 4, 1, rank + rope_dim, device=DEVICE) for _ in range(2))
    write_latents(latents, weight, 1e-5, cos_sin, positions, found, slots)
    c, k_pe = latents.split([rank, rope_dim], -1)
    k_pe = apply_rotary(k_pe[:, None], cos_sin[positions])[:, 0]
    store(expected, slots, torch.cat([rms_norm(c, weight, 1e-5), k_pe], -1)[:, None])
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("heads", [3, 40])
def test_queries_are_rotated_in_place(heads):
    whole, cos_sin = random(4, heads * 20 + 7), random(30, 12)
    positions = torch.tensor([2, 0, 29, 3], device=DEVICE)
    q = whole[:, : heads * 20].unflatten(1, (heads, 20))
    still, turned = q.clone().split([8, 12], -1)
    expected, rest = torch.cat([still, apply_rotary(turned, cos_sin[positions])], -1), whole[:, heads * 20 :].clone()
    rotate_tails(q, cos_sin, positions)
    torch.testing.assert_close(q, expected)
    assert torch.equal(whole[:, heads * 20 :], rest)
