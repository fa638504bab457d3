"""Compares the native attention kernels with attention in float64, at every instruction-set level of this CPU."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from quire.worker.cpu import ops as cpu_ops
from tests.helpers.worker.native_kernels import DTYPES, ROUNDING, assert_near, nan_cache


def dense_attention(q, k, v, scale, window, soft_cap, sinks=None):
    """Attention of one request in float64: q [n, H, D] holds the last n of the L tokens of k and v [L, Hk, D]."""
    n, length, group = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    k, v = k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    positions = torch.arange(length - n, length)[:, None]
    seen = torch.arange(length) <= positions
    if window:
        seen &= torch.arange(length) > positions - window
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, n, 1)), -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :length], v)


def _paged_case(
    rng: random.Random,
    dtype: torch.dtype,
    query_lens: list[int],
    contexts: list[int],
    head_dim: int,
    group: int | None = None,
    block_size: int | None = None,
    v_dim: int | None = None,
    latent: bool = False,
):
    """Arguments of `cpu_ops.paged_attention` and its result; `latent`: one KV head, values are columns of keys."""
    kv_heads, group, block_size = (
        1 if latent else rng.choice([1, 2, 3]),
        group or rng.choice([1, 2, 4, 5, 7]),
        block_size or rng.choice([1, 5, 16, 16, 32]),
    )
    window, soft_cap = rng.choice([None, None, 1, 20, 150]), rng.choice([None, None, 5.0])
    lengths = [q + c for q, c in zip(query_lens, contexts)]
    width = max(-(-n // block_size) for n in lengths)
    num_blocks = sum(-(-n // block_size) for n in lengths) + 3
    layout = rng.choice(["tokens first", "heads first"])
    v_dim = v_dim or head_dim
    k_cache, v_cache = (nan_cache(num_blocks, block_size, kv_heads, d, dtype, layout) for d in (head_dim, v_dim))
    if latent:
        v_cache = k_cache[..., :v_dim]
    free = list(range(1, num_blocks))
    rng.shuffle(free)
    table = torch.zeros(len(lengths), width + 2, dtype=torch.int32)[:, : width + 1]
    q = torch.randn(sum(query_lens), group * kv_heads + 1, head_dim).to(dtype)[:, : group * kv_heads]
    scale, want, start = head_dim**-0.5 * rng.choice([1.0, 3.0]), [], 0
    sinks = rng.choice([None, 3 * torch.randn(q.shape[1]).to(dtype)])
    for i, (n, length) in enumerate(zip(query_lens, lengths)):
        k, v = (torch.randn(length, kv_heads, d).to(dtype) for d in (head_dim, v_dim))
        v = k[..., :v_dim] if latent else v
        first_seen = max(0, length - n - window + 1) if window else 0
        for b in range(-(-length // block_size)):
            table[i, b] = free.pop()
            # positions outside the window may be overwritten, so leave them NaN
            part = slice(max(b * block_size, first_seen), min((b + 1) * block_size, length))
            if part.start < part.stop:
                k_cache[table[i, b], part.start - b * block_size : part.stop - b * block_size] = k[part]
                v_cache[table[i, b], part.start - b * block_size : part.stop - b * block_size] = v[part]
        want.append(dense_attention(q[start : start + n], k, v, scale, window, soft_cap, sinks))
        start += n
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    arguments = (q, k_cache, v_cache, table, torch.tensor(lengths).int(), starts, scale, window, soft_cap, sinks)
    return arguments, torch.cat(want)


def _check_attention(rng, dtype, query_lens, contexts, head_dim):
    arguments, want = _paged_case(rng, dtype, query_lens, contexts, head_dim)
    for path in range(4):
        assert_near(cpu_ops.paged_attention(*arguments, path=path), want, max(3 * ROUNDING[dtype], 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128])
def test_attention_decode(kernels, rng, dtype, head_dim):
    _check_attention(
        rng, dtype, [1] * 5, [rng.choice([0, 1, 15, 16, 63, 255, 256, 300, 700]) for _ in range(5)], head_dim
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "sizes", [(32, 16, False), (192, 128, False), (32, 64, False), (96, 64, True), (576, 512, True)]
)
def test_attention_to_values_of_another_size(kernels, rng, dtype, sizes):
    head_dim, v_dim, latent = sizes
    for query_lens, contexts in (([1] * 3, [0, 130, 300]), ([1, 40, 3], [200, 5, 140])):
        group = rng.choice([1, 4, 16, 40]) if latent else None
        arguments, want = _paged_case(
            rng, dtype, query_lens, contexts, head_dim, group, rng.choice([5, 16]), v_dim, latent
        )
        for path in range(4):
            assert_near(cpu_ops.paged_attention(*arguments, path=path), want, max(3 * ROUNDING[dtype], 1e-5))


@pytest.mark.parametrize("group", [4, 5, 8, 16, 17])
@pytest.mark.parametrize("head_dim", [32, 96, 128])
def test_attention_decode_with_many_query_heads(kernels, rng, group, head_dim):
    """A request alone, whose work is split by heads to occupy all threads, gives the same bits as in a batch."""
    contexts = [rng.choice([0, 1, 15, 16, 63, 127, 128, 300]) for _ in range(5)]
    (q, k_cache, v_cache, table, lengths, starts, *rest), want = _paged_case(
        rng, torch.bfloat16, [1] * 5, contexts, head_dim, group, rng.choice([16, 48])
    )
    got = cpu_ops.paged_attention(q, k_cache, v_cache, table, lengths, starts, *rest)
    assert_near(got, want, 3 * ROUNDING[torch.bfloat16])
    for i in range(5):
        assert torch.equal(
            cpu_ops.paged_attention(
                q[i : i + 1], k_cache, v_cache, table[i : i + 1], lengths[i : i + 1], starts[:2], *rest
            ),
            got[i : i + 1],
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 64, 96, 128])
def test_attention_prefill_and_mixed(kernels, rng, dtype, head_dim):
    query_lens = [rng.choice([1, 1, 2, 3, 9, 30, 70, 130]) for _ in range(4)]
    _check_attention(rng, dtype, query_lens, [rng.choice([0, 0, 1, 40, 200, 513]) for _ in range(4)], head_dim)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_to_scores_of_any_size(kernels, rng, dtype):
    """The running maximum of the scores grows many times, by more than the range of a float's exponent; in the end only
    the last keys have weight.
    """
    query_len, length, heads, head_dim = rng.choice([1, 8, 40]), 700, 2, 64
    k, v = (torch.randn(length, heads, head_dim).to(dtype) for _ in range(2))
    k = k * torch.logspace(-3, 2, length)[:, None, None].to(dtype)
    q = torch.randn(query_len, 2 * heads, head_dim).to(dtype)
    table, starts = torch.randperm(length // 4 + 1)[None].int(), torch.tensor([0, query_len]).int()
    k_cache, v_cache = (torch.zeros(length // 4 + 1, 4, heads, head_dim, dtype=dtype) for _ in range(2))
    k_cache[table[0, : length // 4].long()], v_cache[table[0, : length // 4].long()] = (
        k.view(-1, 4, heads, head_dim),
        v.view(-1, 4, heads, head_dim),
    )
    for path in range(4):
        got = cpu_ops.paged_attention(
            q, k_cache, v_cache, table, torch.tensor([length]).int(), starts, 0.125, path=path
        )
        assert_near(got, dense_attention(q, k, v, 0.125, None, None), max(3 * ROUNDING[dtype], 1e-4))


def test_attention_to_scores_that_overflow(kernels):
    """NaN appears for the affected token and head and for no other."""
    torch.manual_seed(0)
    q, k_cache, v_cache = (
        torch.randn(40, 4, 64).bfloat16(),
        torch.randn(4, 16, 2, 64).bfloat16(),
        torch.randn(4, 16, 2, 64).bfloat16(),
    )
    q[7, 2, 5] = float("inf")
    for path in range(4):
        got = cpu_ops.paged_attention(
            q,
            k_cache,
            v_cache,
            torch.arange(4)[None].int(),
            torch.tensor([50]).int(),
            torch.tensor([0, 40]).int(),
            0.125,
            path=path,
        )
        assert got[7, 2].isnan().all() and int(got.isnan().sum()) == 64


def _sharing_requests(rng: random.Random) -> list[tuple[list[tuple[object, int]], int]]:
    """For each request: the (name, length) of each piece of its context, and its number of query tokens. Requests may
    share all pieces but the last.
    """
    systems = {("system", i): rng.choice([5, 128, 129, 300, 513]) for i in range(rng.choice([1, 2, 3]))}
    examples = {("example", i): rng.choice([100, 128, 260]) for i in range(2)}
    query_lens, requests = rng.choice([[1], [1, 2, 3], [1, 1, 2, 5, 40, 130]]), []
    for i in range(rng.choice([2, 5, 12, 20])):
        pieces = [rng.choice(list(systems.items()))] if rng.random() < 0.9 else []
        if pieces and rng.random() < 0.5:
            pieces.append(rng.choice(list(examples.items())))
        requests.append(([*pieces, (("own", i), rng.choice([0, 0, 1, 7, 130]))], rng.choice(query_lens)))
    return requests


def _sharing_case(rng: random.Random, dtype: torch.dtype, head_dim: int):
    """Requests with common prefixes: (arguments in which they share blocks, the same with private blocks for each
    request, the result of dense attention).
    """
    kv_heads, group, block_size = (
        rng.choice([1, 2, 3]),
        rng.choice([1, 2, 4, 5, 9]),
        rng.choice([1, 5, 16, 16, 32, 200]),
    )
    window, soft_cap = rng.choice([None, None, None, 400, 2000]), rng.choice([None, None, 5.0])
    requests = _sharing_requests(rng)
    query_lens = [n for _, n in requests]
    lengths = [n + sum(length for _, length in pieces) for pieces, n in requests]
    q, scale = (
        torch.randn(sum(query_lens), group * kv_heads, head_dim).to(dtype),
        head_dim**-0.5 * rng.choice([1.0, 3.0]),
    )
    content, blocks, want, start = {}, {}, [], 0
    sinks = rng.choice([None, 3 * torch.randn(q.shape[1]).to(dtype)])
    tables = [torch.zeros(len(requests), -(-max(lengths) // block_size), dtype=torch.int32) for _ in range(2)]
    filled = []
    for i, (pieces, n) in enumerate(requests):
        names = [tuple(name for name, _ in pieces[: j + 1]) for j in range(len(pieces))] + [("query", i)]
        sizes = [*(size for _, size in pieces), n]
        for name, size in zip(names, sizes):
            content.setdefault(name, [torch.randn(size, kv_heads, head_dim).to(dtype) for _ in range(2)])
        k, v = (torch.cat([content[name][side] for name in names]) for side in range(2))
        ends = torch.tensor(sizes).cumsum(0)
        for b in range(-(-lengths[i] // block_size)):
            part = slice(b * block_size, min((b + 1) * block_size, lengths[i]))
            piece = int((ends < (b + 1) * block_size).sum())  # the piece that contains the block's last position
            shared = piece < len(pieces) - 1  # the block is full and everything before it is equal
            for table, key in ((tables[0], (names[piece], b) if shared else (i, b)), (tables[1], (i, b, "private"))):
                table[i, b] = blocks.setdefault(key, len(blocks))
                filled.append((int(table[i, b]), k[part], v[part]))
        want.append(dense_attention(q[start : start + n], k, v, scale, window, soft_cap, sinks))
        start += n
    order = torch.randperm(len(blocks)).int()
    k_cache, v_cache = (nan_cache(len(blocks), block_size, kv_heads, head_dim, dtype, "tokens first") for _ in range(2))
    for block, k, v in filled:
        k_cache[order[block], : len(k)], v_cache[order[block], : len(v)] = k, v
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    shared, private = (
        (q, k_cache, v_cache, order[table], torch.tensor(lengths).int(), starts, scale, window, soft_cap, sinks)
        for table in tables
    )
    return shared, private, torch.cat(want)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [32, 64, 80, 128])
def test_attention_over_shared_keys(kernels, rng, dtype, head_dim):
    """Every path is correct; the fixed-order paths, used by --deterministic, give the same bits as private blocks."""
    shared, private, want = _sharing_case(rng, dtype, head_dim)
    for path in range(4):
        got = cpu_ops.paged_attention(*shared, path=path)
        assert_near(got, want, max(3 * ROUNDING[dtype], 1e-5))
        if path & 2:
            assert torch.equal(got, cpu_ops.paged_attention(*private, path=path))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_of_wanted_tokens(kernels, rng, dtype):
    """Results of the wanted tokens are correct even if no token of some request is wanted."""
    shared, _, want = _sharing_case(rng, dtype, 64)
    ends = shared[5].tolist()
    wanted = torch.tensor(
        [token for a, b in pairwise(ends) if rng.random() < 0.6 for token in range(rng.randrange(a, b), b)] or [0]
    )
    for path in range(4):
        got = cpu_ops.paged_attention(*shared, path=path, wanted=wanted)
        assert_near(got[wanted], want[wanted], max(3 * ROUNDING[dtype], 1e-5))


def test_attention_of_one_token_depends_on_its_keys_alone(kernels):
    """A token's bits do not depend on the batch: on fixed-order paths (2, 3) for any split of the prompt into chunks;
    on path 0 for the same chunk, if AMX computes it. Vector code rounds values together with those of the other keys of
    a task, and the split into tasks depends on the batch.
    """
    rng = random.Random(1)
    for dtype, head_dim in ((torch.bfloat16, 64), (torch.bfloat16, 80), (torch.float32, 64), (torch.float16, 128)):
        torch.manual_seed(1)
        (q, k_cache, v_cache, table, lengths, starts, *rest), _ = _paged_case(
            rng, dtype, [1, 30, 1, 7], [700, 100, 40, 300], head_dim
        )
        for path in (0, 2, 3) if kernels == "amx" and dtype == torch.bfloat16 and head_dim == 64 else (2, 3):
            together = cpu_ops.paged_attention(q, k_cache, v_cache, table, lengths, starts, *rest, path=path)
            for i in range(4):
                a, b = int(starts[i]), int(starts[i + 1])
                for size in (b - a, 1, 2, 5) if path else (b - a,):
                    for start in range(a, b, size):
                        end = min(start + size, b)
                        alone = cpu_ops.paged_attention(
                            q[start:end],
                            k_cache,
                            v_cache,
                            table[i : i + 1],
                            lengths[i : i + 1] - (b - end),
                            torch.tensor([0, end - start]).int(),
                            *rest,
                            path=path,
                        )
                        assert torch.equal(alone, together[start:end])


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_of_a_chunk_is_that_of_its_tokens_one_by_one(kernels, rng, dtype):
    """On the fixed-order path, which `--deterministic` uses."""
    (q, k_cache, v_cache, table, lengths, starts, *rest), _ = _paged_case(rng, dtype, [1, 70, 9], [200, 500, 5], 64)
    request = torch.repeat_interleave(torch.arange(3), starts.diff())
    seen = (lengths[request] - starts[1:][request] + torch.arange(len(q)) + 1).int()
    one_by_one = table[request], seen, torch.arange(len(q) + 1).int()
    alone = cpu_ops.paged_attention(q, k_cache, v_cache, *one_by_one, *rest, path=2)
    together = cpu_ops.paged_attention(q, k_cache, v_cache, table, lengths, starts, *rest, path=2)
    assert torch.equal(together, alone)


def test_attention_reasons():
    assert cpu_ops.attention_reason(64, 64, torch.float16) is None
    assert "head_dim 24" in cpu_ops.attention_reason(24, 16, torch.float32)
    assert "v_dim 528" in cpu_ops.attention_reason(576, 528, torch.float32)
    assert "float64" in cpu_ops.attention_reason(32, 32, torch.float64)
