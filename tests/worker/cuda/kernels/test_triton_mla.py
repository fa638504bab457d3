"""The Triton kernels over latent caches, and over values of another size than keys, under Triton's interpreter against
dense float32 attention.
"""

import pytest
import torch

from quire.worker.attention.scaled import FP8, ScaledLatents, store
from quire.worker.cuda.kernels.triton_mla import latent_attention
from quire.worker.cuda.kernels.triton_paged import paged_attention
from quire.worker.cuda.triton_backend import TritonPagedBackend
from tests.helpers.worker.attention_cases import dense, make_case
from tests.helpers.worker.interpreter import needs_loops
from tests.worker.attention.test_scaled_cache import latents_in_8_bits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.slow, *([pytest.mark.gpu] if DEVICE == "cuda" else [needs_loops])]

CASES = [
    # query lens, context lens, heads, rank, rope dim, page size, splits
    ([3, 2, 5], [0, 0, 0], 4, 32, 8, 2, None),
    ([1, 40, 1, 7], [130, 3, 0, 64], 20, 48, 16, 16, None),  # two programs of heads, a padded rank
    ([1, 1, 1], [0, 129, 300], 3, 32, 16, 16, 3),
]


def _arguments(case):
    meta = case.meta
    return meta.block_table, meta.query_start_loc, meta.seq_lens, meta.max_query_len, 0.3


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_latent_attention_equals_dense_attention(case, dtype):
    query_lens, context_lens, heads, rank, rope_dim, page, splits = case
    sizes = {"num_heads": heads, "num_kv_heads": 1, "head_dim": rank + rope_dim, "v_head_dim": rank, "latent": True}
    case = make_case(None, query_lens, context_lens, **sizes, block_size=page, dtype=dtype, device=DEVICE)
    got = latent_attention(case.q, case.k_cache, rank, *_arguments(case), splits)
    tolerance = 2e-5 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(got.float().cpu(), dense(case, 0.3), atol=tolerance, rtol=1e-3)
    if splits is None:  # the backend takes this kernel
        chosen = TritonPagedBackend().forward(case.q, case.k_cache, case.v_cache, case.meta, 0.3)
        assert torch.equal(chosen, got)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", [torch.int8, FP8])
@pytest.mark.parametrize("constant", [False, True])
def test_latents_in_8_bits(case, kind, constant):
    query_lens, context_lens, heads, rank, rope_dim, page, splits = case
    sizes = {"num_heads": heads, "num_kv_heads": 1, "head_dim": rank + rope_dim, "v_head_dim": rank, "latent": True}
    plain = make_case(None, query_lens, context_lens, **sizes, block_size=page, device=DEVICE)
    case = latents_in_8_bits(plain, kind, rank, constant)
    got = latent_attention(case.q, case.k_cache, rank, *_arguments(case), splits)
    torch.testing.assert_close(got.cpu(), dense(case, 0.3), atol=2e-5, rtol=1e-3)
    if splits is None:
        assert torch.equal(TritonPagedBackend().forward(case.q, case.k_cache, case.v_cache, case.meta, 0.3), got)


@pytest.mark.parametrize("kind", [torch.int8, FP8])
def test_the_bits_that_are_stored(kind):
    """Both parts of latents, whose sizes differ."""
    x, slots = torch.randn(9, 1, 40, device=DEVICE), torch.randperm(20, device=DEVICE)[:9]
    x[..., 32:] *= 30
    values = torch.full((2, 5, 4, 1, 40), 99, dtype=torch.int8, device=DEVICE)
    scales = torch.full((2, 5, 4, 1, 2), 7.0, device=DEVICE)
    ours, twin = (ScaledLatents(v.view(kind), s, 32) for v, s in zip(values, scales))
    TritonPagedBackend().write_kv(x[..., :32], x[..., 32:], ours.latent, ours.rope, slots)
    store(twin, slots, x)
    assert torch.equal(*values) and torch.equal(*scales)


@pytest.mark.parametrize("splits", [None, 2])
def test_values_of_another_size_than_keys(splits):
    query_lens = [1, 1, 1] if splits else [33, 1, 5]
    sizes = {"head_dim": 24, "v_head_dim": 40, "block_size": 4}
    case = make_case(None, query_lens, [12, 70, 0], **sizes, device=DEVICE)
    got = paged_attention(case.q, case.k_cache, case.v_cache, *_arguments(case), num_splits=splits)
    torch.testing.assert_close(got.cpu(), dense(case, 0.3), atol=2e-5, rtol=1e-3)
