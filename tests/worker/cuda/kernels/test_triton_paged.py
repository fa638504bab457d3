"""The Triton kernel under Triton's interpreter against dense float32 attention.

On a GPU the same cases run compiled (marker gpu, in test_attention.py).
"""

import inspect
import itertools

import pytest
import torch

from quire.worker.cuda.kernels import triton_paged, triton_split
from tests.helpers.worker.interpreter import needs_loops

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.slow, *([pytest.mark.gpu] if DEVICE == "cuda" else [needs_loops])]


def dense(q, k_cache, v_cache, block_table, query_lens, seq_lens, scale, window, soft_cap, sinks=None):
    outs, start = [], 0
    group = q.shape[1] // k_cache.shape[2]
    for i, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens)):
        keys, values = (
            cache[block_table[i].long()].flatten(0, 1)[:seq_len].float().repeat_interleave(group, 1)
            for cache in (k_cache, v_cache)
        )
        scores = torch.einsum("qhd,khd->hqk", q[start : start + query_len].float(), keys) * scale
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        at, key = (
            torch.arange(seq_len - query_len, seq_len, device=q.device)[:, None],
            torch.arange(seq_len, device=q.device)[None],
        )
        visible = key <= at
        if window:
            visible &= key > at - window
        scores = scores.masked_fill(~visible, -torch.inf)
        if sinks is not None:  # one more key, whose value is 0
            scores = torch.cat((scores, sinks.float()[:, None, None].expand(-1, query_len, 1)), -1)
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :seq_len], values))
        start += query_len
    return torch.cat(outs)


CASES = [
    # query lens, context lens, heads, kv heads, head dim, page size, window, soft cap, splits
    ([3, 2, 5], [0, 0, 0], 4, 2, 16, 2, None, None, None),
    ([1, 1, 3], [3, 2, 5], 4, 2, 16, 2, None, None, None),
    ([1, 40, 1, 7], [130, 3, 0, 64], 8, 2, 32, 16, None, None, None),
    ([33, 70], [0, 21], 6, 2, 24, 7, 11, None, None),  # group of 3 and head_dim 24: padded heads and dims; odd pages
    ([5, 1], [60, 200], 4, 4, 16, 16, None, 5.0, None),
    ([1, 1, 1], [0, 129, 300], 4, 1, 32, 16, None, None, 3),
    ([1, 1], [250, 17], 8, 2, 16, 8, 40, 8.0, 4),
    ([1] * 5, [0, 1, 15, 16, 64], 14, 2, 16, 16, None, None, 2),  # group of 7, as Qwen2 0.5B has
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_equals_dense_attention(case, dtype, with_sinks=False):
    query_lens, context_lens, heads, kv_heads, dim, page, window, soft_cap, splits = case
    generator = torch.Generator().manual_seed(7)
    seq_lens = [q + c for q, c in zip(query_lens, context_lens)]
    width = max(-(-length // page) for length in seq_lens) + 1
    num_blocks = width * len(seq_lens) + 1
    table = (torch.randperm(num_blocks - 1, generator=generator) + 1).view(len(seq_lens), width).int().to(DEVICE)
    q = torch.randn(sum(query_lens), heads, dim, generator=generator).to(DEVICE, dtype)
    k, v = (torch.randn(num_blocks, page, kv_heads, dim, generator=generator).to(DEVICE, dtype) for _ in range(2))
    start_loc = torch.tensor([0, *itertools.accumulate(query_lens)], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE)
    sinks = (2 * torch.randn(heads, generator=generator)).to(DEVICE, dtype) if with_sinks else None
    got = triton_paged.paged_attention(
        q, k, v, table, start_loc, lengths, max(query_lens), dim**-0.5, window, soft_cap, splits, sinks
    )
    want = dense(q, k, v, table, query_lens, seq_lens, dim**-0.5, window, soft_cap, sinks)
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got.float(), want, atol=2e-5 if dtype == torch.float32 else 4e-3, rtol=1e-3)


@pytest.mark.parametrize("case", CASES[1:7])
def test_sinks(case):
    """Whole, in windows of which the sink is always a part, and split: one split has it."""
    test_equals_dense_attention(case, torch.float32, with_sinks=True)


def decode(kv_heads, splits):
    """Return attention of three requests with 8 heads."""
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(3, 8, 16, generator=generator).to(DEVICE)
    k, v = (torch.randn(61, 16, kv_heads, 16, generator=generator).to(DEVICE) for _ in range(2))
    table = (torch.randperm(60, generator=generator) + 1).view(3, 20).int().to(DEVICE)
    lengths, starts = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([1, 170, 311], [0, 1, 2, 3]))
    return triton_paged.paged_attention(q, k, v, table, starts, lengths, 1, 0.25, num_splits=splits)


@pytest.mark.parametrize("splits", [2, 5, 32])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_the_last_program_combines_splits_as_a_kernel_of_its_own_does(kv_heads, splits, monkeypatch):
    launched, launch = [], triton_paged._combine_kernel[3, 8]

    def combine(*args, **more):
        launched.append(1)
        launch(*args, **more)

    monkeypatch.setattr(triton_paged, "_combine_kernel", {(3, 8): combine})
    triton_paged._plan.cache_clear()
    got = decode(kv_heads, splits)
    assert not launched and not triton_split.counters_of(got.device).any()
    monkeypatch.setattr(triton_paged, "_COMBINED_AT_ONCE", 0)
    triton_paged._plan.cache_clear()
    assert torch.equal(decode(kv_heads, splits), got) and launched
    triton_paged._plan.cache_clear()
    torch.testing.assert_close(decode(kv_heads, 1), got, atol=2e-6, rtol=1e-5)


def test_reads_caches_of_any_layout():
    """A cache stored head-major and viewed as [blocks, block_size, kv_heads, head_dim] gives the same result."""
    generator = torch.Generator().manual_seed(1)
    # [blocks, kv_heads, block_size, head_dim]
    k, v = (torch.randn(9, 2, 4, 16, generator=generator).to(DEVICE) for _ in range(2))
    q = torch.randn(4, 4, 16, generator=generator).to(DEVICE)
    table = torch.tensor([[3, 5, 1], [2, 8, 4]], dtype=torch.int32, device=DEVICE)
    args = (
        table,
        torch.tensor([0, 1, 4], dtype=torch.int32, device=DEVICE),
        torch.tensor([9, 11], dtype=torch.int32, device=DEVICE),
        3,
        0.25,
    )
    views = [cache.transpose(1, 2) for cache in (k, v)]
    torch.testing.assert_close(
        triton_paged.paged_attention(q, *views, *args),
        triton_paged.paged_attention(q, *(view.contiguous() for view in views), *args),
    )


def test_the_number_of_splits_compiles_nothing():
    """The number of splits changes with the batch while serving: only whether keys are split at all is a compile-time
    parameter.
    """
    for kernel in (triton_paged._attend_kernel, triton_paged._combine_kernel):
        arguments = inspect.signature(kernel.fn).parameters
        constants = {name for name, parameter in arguments.items() if "constexpr" in str(parameter.annotation)}
        assert "num_splits" in arguments and not {name for name in constants if "splits" in name.lower()}
