"""Makes random paged batches, and dense float32 attention as their reference."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from quire.worker.attention.base import AttentionBackend, AttentionMetadata


@dataclass
class Case:
    """Holds a batch whose keys and values are already in the cache, in shuffled blocks. Unused slots hold NaN, the null
    block zeros.
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    meta: AttentionMetadata
    query_lens: list[int]
    keys: list[torch.Tensor]  # per request [seq_len, kv_heads, head_dim]
    values: list[torch.Tensor]


def make_case(
    backend: AttentionBackend | None,
    query_lens: list[int],
    context_lens: list[int],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    v_head_dim: int | None = None,
    latent: bool = False,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    heads_first: bool = True,
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    seq_lens = [q + c for q, c in zip(query_lens, context_lens)]
    counts = [-(-length // block_size) for length in seq_lens]
    order = (torch.randperm(sum(counts), generator=generator) + 1).tolist()
    v_dim, order_of_sizes = (
        v_head_dim or head_dim,
        (num_kv_heads, block_size) if heads_first else (block_size, num_kv_heads),
    )
    caches = []
    for dim in (head_dim, v_dim):
        cache = torch.full((sum(counts) + 1, *order_of_sizes, dim), float("nan"), dtype=dtype, device=device)
        cache[0] = 0
        caches.append(cache.transpose(1, 2) if heads_first else cache)
    k_cache, v_cache = caches[0], caches[0][..., :v_dim] if latent else caches[1]
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    keys, values = [], []
    for i, (length, count) in enumerate(zip(seq_lens, counts)):
        blocks = torch.tensor([order.pop() for _ in range(count)])
        table[i, :count] = blocks
        k, v = (torch.randn(length, num_kv_heads, dim, generator=generator).to(dtype) for dim in (head_dim, v_dim))
        v = k[..., :v_dim] if latent else v
        positions = torch.arange(length)
        for cache, entries in ((v_cache, v), (k_cache, k)):
            cache[blocks[positions // block_size].to(device), positions.to(device) % block_size] = entries.to(device)
        keys.append(k.float())
        values.append(v.float())
    q = torch.randn(sum(query_lens), num_heads, head_dim, generator=generator).to(dtype)
    starts = torch.tensor([0, *itertools.accumulate(query_lens)], dtype=torch.int32)
    meta = AttentionMetadata(
        backend,
        torch.zeros(sum(query_lens), dtype=torch.int64),
        starts.to(device),
        torch.tensor(seq_lens, dtype=torch.int32).to(device),
        table.to(device),
        max(query_lens),
        max(seq_lens),
    )
    return Case(q.to(device), k_cache, v_cache, meta, query_lens, keys, values)


def dense(
    case: Case, scale: float, window: int | None = None, soft_cap: float | None = None, chunk: int | None = None
) -> torch.Tensor:
    """Compute attention by its definition: one request, one score matrix, one mask."""
    outputs = []
    for q, k, v in zip(case.q.cpu().float().split(case.query_lens), case.keys, case.values):
        group = q.shape[1] // k.shape[1]
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * scale
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        query = torch.arange(len(k) - len(q), len(k))[:, None]
        key = torch.arange(len(k))[None, :]
        seen = key <= query
        if window:
            seen &= key > query - window
        if chunk:
            seen &= key >= query // chunk * chunk
        outputs.append(
            torch.einsum(
                "hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v.repeat_interleave(group, 1)
            )
        )
    return torch.cat(outputs)
