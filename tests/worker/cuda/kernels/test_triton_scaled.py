"""The Triton kernels for keys and values in 8 bits, under the interpreter (compiled on a GPU): they store what plain
torch stores, and attention is that of the numbers that the cache stands for.
"""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("triton")
from quire.worker.attention.scaled import FP8, ScaledCache, scale_of, store, to_8_bits, widened
from quire.worker.cuda.kernels import triton_ops, triton_paged
from quire.worker.cuda.kernels.triton_scaled import store_scaled
from quire.worker.platforms.ops import Ops
from tests.helpers.worker.interpreter import needs_loops
from tests.worker.cuda.kernels.test_triton_paged import dense

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
TYPES = [torch.int8, FP8]


def cache_of(shape: tuple[int, ...], kind: torch.dtype, constant: bool) -> ScaledCache:
    values = torch.full(shape, 99, dtype=torch.int8, device=DEVICE).view(kind)
    scales = (
        torch.tensor(0.02, device=DEVICE).expand(shape[:3]) if constant else torch.full(shape[:3], 7.0, device=DEVICE)
    )
    return ScaledCache(values, scales, constant)


def equal(a: ScaledCache, b: ScaledCache) -> bool:
    return torch.equal(a.scales, b.scales) and torch.equal(a.values.view(torch.int8), b.values.view(torch.int8))


@pytest.mark.slow
@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_bits_that_are_stored(dtype, kind, constant):
    """Entries of all sizes, heads of zeros, and more than a constant scale reaches."""
    torch.manual_seed(0)
    x = torch.randn(9, 3, 40) * torch.exp2(torch.randint(-14, 3, (9, 3, 1)).float())
    x[2, 1] = 0
    x[..., ::3] *= 2.0**-7  # subnormal in e4m3
    x, slots = x.to(DEVICE, dtype), torch.randperm(20)[:9].to(DEVICE)
    ours, twin = (cache_of((5, 4, 3, 40), kind, constant) for _ in range(2))
    store_scaled(ours, slots, x)
    store(twin, slots, x)
    assert equal(ours, twin)


@pytest.mark.slow
@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("norm", [False, True])
def test_qk_norm_rope_write(kind, constant, norm):
    """In one launch with norms and rotation, whose last bits may differ from the twin's."""
    torch.manual_seed(0)
    heads, kv_heads, dim = 4, 2, 24
    qkv, table = torch.randn(6, (heads + 2 * kv_heads) * dim, device=DEVICE), torch.randn(50, dim, device=DEVICE)
    slots, positions = torch.randperm(20)[:6].to(DEVICE), torch.arange(6, device=DEVICE) * 7
    weights = torch.randn(2, dim, device=DEVICE) if norm else (None, None)
    ours, twins = ([cache_of((5, 4, kv_heads, dim), kind, constant) for _ in range(2)] for _ in range(2))
    want = Ops().qk_norm_rope_write(qkv.clone(), *weights, 1e-6, table, positions, *twins, slots, heads)
    got = triton_ops.qk_norm_rope_write(qkv.clone(), *weights, 1e-6, table, positions, *ours, slots, heads)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    assert equal(ours[1], twins[1])
    read = [widened(c.values.view(kind), c.scales) for c in (ours[0], twins[0])]
    step = twins[0].scales[..., None] if kind == torch.int8 else read[1].abs() / 8
    assert ((read[0] - read[1]).abs() <= step * 1.01 + 1e-5).all()


CASES = [
    # query lens, context lens, heads, kv heads, head dim, page size, window, soft cap, splits
    ([1, 40, 1, 7], [130, 3, 0, 64], 8, 2, 32, 16, None, None, None),
    ([33, 20], [0, 21], 6, 2, 24, 7, 11, None, None),
    ([5, 1], [60, 200], 4, 4, 16, 16, None, 5.0, None),
    ([1, 1, 1], [0, 129, 300], 4, 1, 32, 16, None, None, 3),
]


@pytest.mark.slow
@needs_loops
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_attention(case, kind, dtype):
    query_lens, context_lens, heads, kv_heads, dim, page, window, soft_cap, splits = case
    torch.manual_seed(7)
    seq_lens = [q + c for q, c in zip(query_lens, context_lens)]
    blocks = max(-(-n // page) for n in seq_lens)
    table = (torch.randperm(len(seq_lens) * blocks) + 1).view(len(seq_lens), blocks).int().to(DEVICE)
    caches, numbers = [], []
    for _ in range(2):
        x = torch.randn(len(seq_lens) * blocks + 1, page, kv_heads, dim, device=DEVICE)
        scales, inverse = scale_of(x, kind)
        values = to_8_bits(x * inverse[..., None], kind)
        numbers.append(widened(values, scales))
        for row, length in zip(table, seq_lens):  # what is after the last token is never used
            after = torch.arange(blocks * page, device=DEVICE).view(blocks, page) >= length
            scales[row.long()] = scales[row.long()].masked_fill(after[..., None], torch.nan)
        caches.append(ScaledCache(values, scales))
    q = torch.randn(sum(query_lens), heads, dim, device=DEVICE).to(dtype)
    starts = torch.tensor([0, *itertools.accumulate(query_lens)], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE)
    out = triton_paged.paged_attention(
        q, *caches, table, starts, lengths, max(query_lens), dim**-0.5, window, soft_cap, splits
    )
    want = dense(q, *numbers, table, query_lens, seq_lens, dim**-0.5, window, soft_cap)
    tolerance = 1e-4 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(out.float(), want, rtol=tolerance, atol=tolerance)
