"""worker/cuda/kernels/triton_ops.py under Triton's interpreter (compiled on a GPU) against float32
formulas.
"""

import pytest
import torch

pytest.importorskip("triton")
from quire.worker.cuda.kernels import triton_ops

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def reference_norm(x, weight, eps):
    return x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps) * weight.float()


@pytest.mark.parametrize(("tokens", "size"), [(1, 64), (5, 96), (3, 1000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_norms(tokens, size, dtype):
    x, residual, weight = (
        randn(tokens, size, dtype=dtype),
        randn(tokens, size, dtype=dtype, seed=1),
        randn(size, dtype=dtype, seed=2),
    )
    tolerance = dict(atol=1e-5, rtol=1e-5) if dtype == torch.float32 else dict(atol=4e-3, rtol=4e-3)
    torch.testing.assert_close(
        triton_ops.rms_norm(x, weight, 1e-6).float(), reference_norm(x, weight, 1e-6), **tolerance
    )
    total = (x.float() + residual.float()).to(dtype)
    normed, kept = triton_ops.add_rms_norm(x, residual, weight, 1e-6)
    assert kept is residual
    torch.testing.assert_close(kept, total)
    torch.testing.assert_close(normed.float(), reference_norm(total, weight, 1e-6), **tolerance)


@pytest.mark.parametrize(("tokens", "size"), [(1, 32), (4, 1100)])
def test_silu_and_mul(tokens, size):
    gate_up = randn(tokens, 2 * size)
    gate, up = gate_up.chunk(2, -1)
    torch.testing.assert_close(
        triton_ops.silu_and_mul(gate_up), torch.nn.functional.silu(gate) * up, atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "page"), [(4, 2, 16, 4), (3, 1, 24, 5)])
def test_qk_norm_rope_write(norm, heads, kv_heads, dim, page):
    tokens, blocks = 6, 7
    qkv = randn(tokens, (heads + 2 * kv_heads) * dim)
    q, k, v = (
        part.clone().view(tokens, -1, dim) for part in qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], -1)
    )
    weights = (randn(dim, seed=3), randn(dim, seed=4)) if norm else (None, None)
    positions = torch.tensor([0, 1, 9, 30, 2, 17], device=DEVICE)
    slots = torch.tensor([page, page + 1, 3 * page - 1, 5 * page, 6 * page + 1, 2 * page], device=DEVICE)
    angles = torch.outer(torch.arange(40, dtype=torch.float32), 0.5 ** torch.arange(dim // 2)).to(DEVICE)
    cos_sin = torch.cat([angles.cos(), angles.sin()], -1)
    k_cache, v_cache = (
        torch.zeros(blocks, page, kv_heads, dim, device=DEVICE),
        torch.zeros(blocks, page, kv_heads, dim, device=DEVICE),
    )

    got_q = triton_ops.qk_norm_rope_write(qkv, *weights, 1e-6, cos_sin, positions, k_cache, v_cache, slots, heads)

    if norm:
        q, k = reference_norm(q, weights[0], 1e-6), reference_norm(k, weights[1], 1e-6)
    cos, sin = (angle[positions].repeat(1, 2)[:, None] for angle in (angles.cos(), angles.sin()))
    rotate = lambda x: torch.cat([-x[..., dim // 2 :], x[..., : dim // 2]], -1)  # noqa: E731
    want_q, want_k = (x * cos + rotate(x) * sin for x in (q, k))
    torch.testing.assert_close(got_q, want_q, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(k_cache.view(-1, kv_heads, dim)[slots], want_k, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(v_cache.view(-1, kv_heads, dim)[slots], v)
    untouched = torch.ones(blocks * page, dtype=torch.bool)
    untouched[slots.cpu()] = False
    assert not k_cache.view(-1, kv_heads, dim)[untouched].any() and not v_cache.view(-1, kv_heads, dim)[untouched].any()
