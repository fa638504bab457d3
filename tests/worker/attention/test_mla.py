"""Latent attention equals its definition, whichever requests are absorbed or expanded."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.worker.attention.base import AttentionMetadata
from quire.worker.attention.scaled import FP8, ScaledLatents, store
from quire.worker.attention.torch_paged import CpuPagedAttention
from quire.worker.cache.allocation import allocate
from quire.worker.cache.storage import KVStorage
from quire.worker.cpu.device import CpuPlatform
from quire.worker.layers import mla
from quire.worker.layers.mla import LatentAttention, LatentSizes
from quire.worker.spec.cache import Latent, plan_cache

SIZES = LatentSizes(rank=32, nope_dim=16, rope_dim=8, v_dim=24)
HEADS, BLOCK_SIZE, SCALE = 3, 4, 0.4
requests = st.lists(st.tuples(st.integers(1, 30), st.integers(0, 60)), min_size=1, max_size=6)


def _definition(q_nope, q_pe, latents, kv_b):
    """Attention of one request, whose keys and values are those of its `latents` `[L, R + P]`, in float64."""
    w_k, w_v = kv_b.double().split([HEADS * SIZES.nope_dim, HEADS * SIZES.v_dim])
    c, k_pe = latents.double().split([SIZES.rank, SIZES.rope_dim], -1)
    k = torch.cat(((c @ w_k.T).unflatten(-1, (HEADS, -1)), k_pe[:, None].expand(-1, HEADS, -1)), -1)
    v = (c @ w_v.T).unflatten(-1, (HEADS, -1))
    scores = torch.einsum("qhd,khd->hqk", torch.cat((q_nope, q_pe), -1).double(), k) * SCALE
    n, length = scores.shape[1:]
    visible = torch.arange(length) <= torch.arange(length - n, length)[:, None]
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, float("-inf")).softmax(-1), v).flatten(1)


def _layer(num_blocks: int, dtype: torch.dtype) -> LatentAttention:
    layer, storage = LatentAttention(HEADS, SIZES, 0, SCALE), KVStorage(dtype)
    spec = layer.cache_spec(dtype.itemsize, storage.scale_bytes)
    assert spec == Latent(40, 8, *((4, 0) if dtype == torch.float32 else (1, 4)))
    allocate([layer], plan_cache([spec]), num_blocks, BLOCK_SIZE, storage, CpuPlatform())
    return layer


def _stored(latents: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The numbers that a cache of type `dtype` stands for after latents `[L, R + P]` were stored."""
    if dtype == torch.float32:
        return latents
    values, scales = torch.zeros(1, len(latents), 1, SIZES.width).to(dtype), torch.zeros(1, len(latents), 1, 2)
    cache = ScaledLatents(values, scales, SIZES.rank)
    store(cache, torch.arange(len(latents)), latents[:, None])
    return cache.widened(values, scales)[0, :, 0]


def check(batch: list[tuple[int, int]], dtype: torch.dtype = torch.float32) -> list[str]:
    """Compare a step of requests with (new tokens, tokens before them) over a cache of type `dtype`. Returns how each
    part attends.
    """
    generator = torch.Generator().manual_seed(0)
    lengths = [new + before for new, before in batch]
    counts = [-(-length // BLOCK_SIZE) for length in lengths]
    order = (torch.randperm(sum(counts), generator=generator) + 1).split(counts)
    table = torch.zeros(len(batch), max(counts), dtype=torch.int32)
    layer = _layer(sum(counts) + 1, dtype)
    # entries behind a request's last token
    (layer.k_cache if dtype == torch.float32 else layer.k_cache.scales)[1:] = float("nan")
    kv_b = torch.randn(HEADS * (SIZES.nope_dim + SIZES.v_dim), SIZES.rank, generator=generator) / SIZES.rank**0.5
    q = torch.randn(sum(new for new, _ in batch), HEADS, SIZES.nope_dim + SIZES.rope_dim, generator=generator)
    want, slots, starts = [], [], [0, *accumulate(new for new, _ in batch)]
    written = []
    for i, (_, before) in enumerate(batch):
        latents = torch.randn(lengths[i], SIZES.width, generator=generator)
        table[i, : counts[i]] = order[i]
        positions = torch.arange(lengths[i])
        slot = order[i][positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        store(layer.k_cache, slot[:before], latents[:before, None])
        slots.append(slot[before:])
        written.append(latents[before:])
        want.append(_definition(*q[starts[i] : starts[i + 1]].split([16, 8], -1), _stored(latents, dtype), kv_b))
    meta = AttentionMetadata(
        CpuPagedAttention(),
        torch.cat(slots),
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(lengths, dtype=torch.int32),
        table,
        max(new for new, _ in batch),
        max(lengths),
    )
    meta.backend.build(meta)
    layer.write(torch.cat(written), meta)
    out = layer.attend_latent(*q.split([16, 8], -1), kv_b, meta)
    torch.testing.assert_close(out.double(), torch.cat(want), rtol=1e-4, atol=1e-5)
    return ["absorbed" if part.blocks is None else "expanded" for part in layer._parts(meta, 4)]


@settings(max_examples=40, deadline=None)
@given(requests, st.sampled_from([torch.float32, torch.int8, FP8]))
def test_equals_its_definition(batch, dtype):
    check(batch, dtype)


def test_prompts_are_expanded_and_tokens_absorbed(monkeypatch):
    assert check([(1, 30), (1, 3)]) == ["absorbed"]
    assert check([(20, 0), (5, 0)]) == ["expanded"]
    assert check([(1, 9), (20, 0), (2, 60), (30, 7)]) == ["absorbed", "expanded"]
    # memory for 32 tokens of all heads: requests take turns, and of a long one the heads do
    monkeypatch.setattr(mla, "EXPANDED_BYTES", 32 * HEADS * 4 * (16 + 8 + 24))
    monkeypatch.setattr(mla, "_WIDENED_TOKENS", 10)
    for dtype in (torch.float32, torch.int8, FP8):
        parts = check([(20, 0), (1, 9), (14, 0), (30, 7)], dtype)
        assert parts == ["absorbed", "expanded", "expanded", "expanded"]


def test_the_way_follows_from_the_number_of_products():
    deepseek = LatentSizes(512, 128, 64, 128)
    assert not deepseek.expands(1, 100_000)
    assert deepseek.expands(2, 2) and deepseek.expands(2048, 2048)
    assert not deepseek.expands(100, 50_000) and deepseek.expands(400, 50_000)


@pytest.mark.parametrize("batch", [[(7, 3)], [(1, 12), (9, 0)]])
def test_the_comparison_sees_a_wrong_part(batch, monkeypatch):
    absorbed = LatentAttention._absorbed
    expanded = LatentAttention._expanded
    monkeypatch.setattr(
        LatentAttention, "_absorbed", lambda self, q, pe, k, v, part: absorbed(self, q, -pe, k, v, part)
    )
    monkeypatch.setattr(
        LatentAttention, "_expanded", lambda self, q, pe, k, v, part: expanded(self, q, -pe, k, v, part)
    )
    with pytest.raises(AssertionError):
        check(batch)
