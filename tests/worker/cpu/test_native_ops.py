"""The native norms, activations, cache writes and sampling against plain torch, at every instruction-set level
that this CPU supports.
"""

from __future__ import annotations

import pytest
import torch

from quire.worker.cpu import native
from quire.worker.cpu import ops as cpu_ops
from quire.worker.cpu.device import CpuPlatform
from quire.worker.layers.activation import silu_and_mul
from quire.worker.layers.norm import add_rms_norm, rms_norm
from quire.worker.layers.rotary import apply_rotary
from quire.worker.sampling import arithmetic as sampling_math
from quire.worker.sampling import logprobs
from tests.helpers.worker.native_kernels import DTYPES, ROUNDING, assert_near, nan_cache


@pytest.mark.parametrize("wide", [False, True], ids=["same type", "float32 weight"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms(kernels, rng, dtype, wide):
    rows, h = rng.choice([1, 3, 40, 70]), rng.choice([1, 7, 16, 33, 1024, 1500])
    x, residual, weight = (
        torch.randn(rows, h + 5).to(dtype)[:, :h],
        torch.randn(rows, h).to(dtype),
        torch.randn(h).to(torch.float32 if wide else dtype),
    )
    assert_near(cpu_ops.rms_norm(x, weight, 1e-6), rms_norm(x, weight, 1e-6), 2 * ROUNDING[dtype])
    want, want_sum = add_rms_norm(x, residual, weight, 1e-6)
    got, got_sum = cpu_ops.add_rms_norm(x, residual, weight, 1e-6)
    assert got_sum is residual and torch.equal(got_sum, want_sum)
    assert_near(got, want, 2 * ROUNDING[dtype])
    heads = torch.randn(rows, 3, h + 5).to(dtype)[..., :h]
    assert_near(cpu_ops.rms_norm(heads, weight, 1e-6), rms_norm(heads, weight, 1e-6), 2 * ROUNDING[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_mul(kernels, rng, dtype):
    rows, width = rng.choice([1, 3, 50]), rng.choice([1, 15, 16, 100, 3072])
    x = torch.randn(rows, 2 * width).to(dtype) * 20
    assert_near(cpu_ops.silu_and_mul(x), silu_and_mul(x.float()), 2 * ROUNDING[dtype])


@pytest.mark.parametrize("wide", [False, True], ids=["same type", "float32 weight"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_qk_norm_rope_write(kernels, rng, dtype, wide):
    tokens, heads, kv_heads, dim = (
        rng.choice([1, 5, 33]),
        rng.choice([4, 6]),
        rng.choice([1, 2]),
        rng.choice([2, 10, 16, 64, 128]),
    )
    block_size, layout = rng.choice([1, 3, 16]), rng.choice(["tokens first", "heads first"])
    k_cache, v_cache = (nan_cache(40, block_size, kv_heads, dim, dtype, layout) for _ in range(2))
    slots = torch.randperm(40 * block_size)[:tokens]
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim).to(dtype)
    q, k, v = (t.reshape(tokens, -1, dim) for t in qkv.clone().split([heads * dim, kv_heads * dim, kv_heads * dim], 1))
    positions, table = torch.randint(0, 100, (tokens,)), torch.randn(100, dim)
    q_weight, k_weight = (
        (torch.randn(2, dim).to(torch.float32 if wide else dtype)) if rng.random() < 0.6 else (None, None)
    )
    if q_weight is not None:
        q, k = rms_norm(q, q_weight, 1e-6), rms_norm(k, k_weight, 1e-6)
    want_q, want_k = apply_rotary(q, table[positions]), apply_rotary(k, table[positions])
    got = cpu_ops.qk_norm_rope_write(qkv, q_weight, k_weight, 1e-6, table, positions, k_cache, v_cache, slots, heads)
    blocks, offsets = slots // block_size, slots % block_size
    assert_near(got, want_q, 3 * ROUNDING[dtype])
    assert_near(k_cache[blocks, offsets], want_k, 3 * ROUNDING[dtype])
    assert torch.equal(v_cache[blocks, offsets], v)
    assert int((~k_cache.isnan()).sum()) == int((~v_cache.isnan()).sum()) == tokens * kv_heads * dim


@pytest.mark.parametrize("dtype", DTYPES)
def test_write_kv(kernels, rng, dtype):
    tokens, kv_heads, dim, block_size = (
        rng.choice([1, 40]),
        rng.choice([1, 3]),
        rng.choice([5, 64]),
        rng.choice([1, 5, 16]),
    )
    k_cache, v_cache = (
        nan_cache(50, block_size, kv_heads, dim, dtype, rng.choice(["tokens first", "heads first"])) for _ in range(2)
    )
    both = torch.randn(tokens, 2 * kv_heads, dim).to(dtype)
    slots = torch.randperm(50 * block_size)[:tokens]
    cpu_ops.write_kv(both[:, :kv_heads], both[:, kv_heads:], k_cache, v_cache, slots)
    assert torch.equal(k_cache[slots // block_size, slots % block_size], both[:, :kv_heads])
    assert torch.equal(v_cache[slots // block_size, slots % block_size], both[:, kv_heads:])


# --- sampling

# top_k, top_p, min_p
FILTERS = [
    (0, 1.0, 0.0),
    (5, 1.0, 0.0),
    (40, 0.8, 0.0),
    (0, 0.9, 0.0),
    (0, 1.0, 0.1),
    (700, 0.7, 0.02),
    (0, 1e-9, 0.0),
    (3000, 1.0, 0.0),
    (0, 0.999, 1e-4),
    (1, 0.5, 0.5),
]


def _sampling_case(seed: int, size: int) -> tuple[torch.Tensor, ...]:
    """Arguments of `cpu_ops.sample`: a greedy row, then one row for each of FILTERS. The rows of logits are not
    adjacent in memory.
    """
    generator = torch.Generator().manual_seed(seed)
    n = 1 + len(FILTERS)
    logits = (torch.randn(n, size + 5, generator=generator) * torch.rand(n, 1, generator=generator) * 6)[
        :, 2 : 2 + size
    ]
    if seed % 3 == 1:
        logits = logits.bfloat16().float()  # ties
    if seed % 3 == 2:
        logits = logits.masked_fill(torch.rand(n, size, generator=generator) < 0.9, float("-inf"))
        logits[:, size // 2] = 0
    floats, ints = torch.zeros(3, n + 3, dtype=torch.float64), torch.zeros(2, n + 3, dtype=torch.int64)
    rows = torch.randperm(n + 3, generator=generator)[:n]
    # a greedy row ignores the top_p, min_p, top_k and seed that an earlier request left
    floats[:, rows[0]], ints[:, rows[0]] = torch.tensor([0, 0.5, 0.5]).double(), torch.tensor([1, 7])
    for row, (top_k, top_p, min_p) in zip(rows[1:].tolist(), FILTERS):
        floats[:, row] = torch.tensor(
            [float(torch.rand(1, generator=generator)) * 2 + 0.1, top_p, min_p], dtype=torch.float64
        )
        ints[:, row] = torch.tensor([top_k if top_k < size else 0, sampling_math.seed_state(seed + row)])
    return logits, rows, torch.randint(0, 2000, (n,), generator=generator), floats, ints


def _sample_by_twin(
    logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, floats: torch.Tensor, ints: torch.Tensor
) -> list[int]:
    """Tokens of the twin, computed row by row."""
    tokens = [int(sampling_math.best(logits[:1])[1])]
    for i, row in enumerate(rows[1:].tolist(), 1):
        (temperature, top_p, min_p), (top_k, state) = floats[:, row : row + 1], ints[:, row : row + 1]
        params = sampling_math.RandomRows(
            temperature.float(),
            top_p,
            min_p.float(),
            top_k,
            sampling_math.uniform(state, positions[i : i + 1]),
            int(top_k),
            bool(top_k),
            bool(top_p < 1),
            bool(top_p < 1),
            bool(min_p > 0),
        )
        tokens.append(int(sampling_math.pick(logits[i : i + 1], params)[1]))
    return tokens


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 15, 100, 1003, 8192, 33000, 151936])
def test_sample(kernels, size):
    """Each draw gives the twin's token. At most one may differ, because the last bit of exp moves a boundary."""
    others = 0
    rounds = 3 if size > 100_000 else 12
    for seed in range(rounds):
        case = _sampling_case(seed, size)
        others += sum(a != b for a, b in zip(cpu_ops.sample(*case).tolist(), _sample_by_twin(*case)))
    assert others <= 1


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 15, 100, 1003, 8192, 33000])
def test_logprobs(kernels, size, monkeypatch):
    """Values, order and ranks equal the twin's; the order of equal logits is unspecified."""
    for seed in range(9):
        logits, *_ = _sampling_case(seed, size)
        tokens = torch.randint(0, size, (len(logits),))
        for num in {0, 1, min(5, size), min(200, size), size}:
            for normalize in (True, False):
                ids, values, ranks = cpu_ops.logprobs(logits, tokens, num, normalize)
                with monkeypatch.context() as patch:
                    patch.setattr(native.KERNELS, "lib", None)
                    want = logprobs.entries(logits, tokens, num, normalize, CpuPlatform())
                assert torch.equal(ranks, want.ranks) and torch.equal(ids[:, 0], tokens)
                torch.testing.assert_close(values, want.values, atol=1e-5, rtol=1e-6)
                assert torch.equal(logits.gather(1, ids), logits.gather(1, want.token_ids)) and all(
                    len(set(row[1:])) == num for row in ids.tolist()
                )


def test_logprobs_of_what_is_not_finite(kernels):
    logits = torch.randn(3, 700)
    logits[0, 699], logits[1] = float("nan"), float("-inf")
    ids, values, ranks = cpu_ops.logprobs(logits, torch.tensor([3, 4, 5]), 6, True)
    assert (
        values[:2].isnan().all()
        and ids[:2, 1:].eq(0).all()
        and ids[:, 0].tolist() == [3, 4, 5]
        and ranks[:2].tolist() == [1, 1]
    )
    assert values[2].isfinite().all()


def test_sample_without_a_token(kernels):
    for size in (40, 8192):
        logits = torch.randn(6, size)
        logits[0, 5], logits[1], logits[2, 7], logits[3, size - 1], logits[4, :-1] = (
            float("nan"),
            float("-inf"),
            float("inf"),
            float("nan"),
            float("-inf"),
        )
        for temperature in (0.0, 1.0):
            floats, ints = (
                torch.tensor([[temperature] * 6, [0.9] * 6, [0] * 6], dtype=torch.float64),
                torch.zeros(2, 6, dtype=torch.int64),
            )
            got = cpu_ops.sample(logits, torch.arange(6), torch.arange(6), floats, ints).tolist()
            assert got[:4] == [-1] * 4 and got[4] == size - 1 and got[5] >= 0
