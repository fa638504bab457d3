"""Paged attention over a latent cache (`layers/mla.py`, absorbed) in Triton: like `triton_paged.py`, with one KV head
that all query heads share and whose values are the first columns of its keys, so that each cache entry is loaded once.
In 8 bits, its two parts have scales of their own.

One program serves BLOCK_Q consecutive tokens of one request for BLOCK_G of their heads.

Two more kernels compute what latent attention does beside its products: one normalises, rotates and stores a step's
latents, one rotates its queries.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.worker.attention.scaled import ScaledLatents, as_bytes
from quire.worker.cuda.kernels.triton_paged import (
    LOG2_E,
    MAX_SPLITS,
    _combine_kernel,
    _find_request,
    _first_block,
    default_num_splits,
)
from quire.worker.cuda.kernels.triton_scaled import kind_of, numbers_of

_HEADS = 16  # of a program that rotates queries
_ROWS = 32  # tokens x heads of a program: their results, 512 floats each, stay in registers


# These arguments change from step to step; specializing on them would recompile the kernel.
@triton.jit(
    do_not_specialize=["num_reqs", "table_stride", "num_splits"],
    do_not_specialize_on_alignment=["block_table", "query_start_loc", "seq_lens"],
)
def _attend_latent_kernel(
    q, cache, out, partial_out, partial_max, partial_sum, block_table, query_start_loc, seq_lens, qk_scale, num_reqs,
    num_splits, table_stride, q_token_stride, q_head_stride, out_token_stride, out_head_stride, page_stride,
    slot_stride, scales, rope_scales, scale_page_stride, scale_slot_stride,
    NUM_HEADS: tl.constexpr, RANK: tl.constexpr, BLOCK_R: tl.constexpr, ROPE_DIM: tl.constexpr,
    BLOCK_P: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    block, head_block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    request = _find_request(query_start_loc, block, num_reqs, BLOCK_Q)
    start = tl.load(query_start_loc + request)
    query_len = tl.load(query_start_loc + request + 1) - start
    first_query = (block - _first_block(start, request, BLOCK_Q)) * BLOCK_Q
    if first_query >= query_len:
        return
    seq_len = tl.load(seq_lens + request)
    context_len = seq_len - query_len

    # rows of the tile: BLOCK_Q tokens x BLOCK_G heads, token-major
    rows = tl.arange(0, BLOCK_Q * BLOCK_G)
    query, head = first_query + rows // BLOCK_G, head_block * BLOCK_G + rows % BLOCK_G
    row_mask = (query < query_len) & (head < NUM_HEADS)
    token, position = (start + query).to(tl.int64), context_len + query  # token x stride exceeds 32 bits
    ranks, ropes = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_P)
    rank_mask, rope_mask = ranks < RANK, ropes < ROPE_DIM
    q_at = q + (token * q_token_stride + head * q_head_stride)[:, None]
    q_latent = tl.load(q_at + ranks[None, :], mask=row_mask[:, None] & rank_mask[None, :], other=0.0)
    q_rope = tl.load(q_at + RANK + ropes[None, :], mask=row_mask[:, None] & rope_mask[None, :], other=0.0)

    first_key, last_key = 0, tl.minimum(context_len + first_query + BLOCK_Q, seq_len)
    if SPLIT:
        tiles_per_split = tl.cdiv(tl.cdiv(last_key, BLOCK_N), num_splits)
        first_key = split * tiles_per_split * BLOCK_N
        last_key = tl.minimum(last_key, first_key + tiles_per_split * BLOCK_N)

    running_max = tl.full([BLOCK_Q * BLOCK_G], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_Q * BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_Q * BLOCK_G, BLOCK_R], tl.float32)
    columns = tl.arange(0, BLOCK_N)
    PART: tl.constexpr = 256.0 if KIND == 2 else 1.0  # see numbers_of
    for key_start in range(first_key, last_key, BLOCK_N):
        key = key_start + columns
        key_mask = key < last_key
        page = tl.load(block_table + request * table_stride + key // PAGE_SIZE, mask=key_mask, other=0).to(tl.int64)
        slot = key % PAGE_SIZE
        entry = cache + (page * page_stride + slot * slot_stride)[:, None]
        latent = tl.load(entry + ranks[None, :], mask=key_mask[:, None] & rank_mask[None, :], other=0)
        rope = tl.load(entry + RANK + ropes[None, :], mask=key_mask[:, None] & rope_mask[None, :], other=0)
        if KIND == 0:
            scores = tl.dot(q_latent, tl.trans(latent), input_precision="ieee")
            scores = tl.dot(q_rope, tl.trans(rope), acc=scores, input_precision="ieee") * qk_scale
        else:  # 8 bits are exact in the type of the queries; their scales multiply columns of scores and weights
            latent, rope = numbers_of(latent, KIND, q.dtype.element_ty), numbers_of(rope, KIND, q.dtype.element_ty)
            scale_at = page * scale_page_stride + slot * scale_slot_stride
            scale = tl.load(scales + scale_at, mask=key_mask, other=0.0) * PART
            rope_scale = tl.load(rope_scales + scale_at, mask=key_mask, other=0.0) * PART
            scores = tl.dot(q_latent, tl.trans(latent), input_precision="ieee") * (scale * qk_scale)[None, :]
            scores += tl.dot(q_rope, tl.trans(rope), input_precision="ieee") * (rope_scale * qk_scale)[None, :]
        visible = (key[None, :] <= position[:, None]) & key_mask[None, :]
        scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores, 1))
        safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)  # a row that attends to none of these keys
        weights = tl.exp2(scores - safe_max[:, None])
        rescale = tl.exp2(running_max - safe_max)
        running_sum = running_sum * rescale + tl.sum(weights, 1)
        if KIND > 0:
            weights *= scale[None, :]
        acc = acc * rescale[:, None] + tl.dot(weights.to(latent.dtype), latent, input_precision="ieee")
        running_max = new_max

    if SPLIT:
        at = (token * NUM_HEADS + head) * num_splits + split
        tl.store(partial_max + at, running_max, mask=row_mask)
        tl.store(partial_sum + at, running_sum, mask=row_mask)
        tl.store(partial_out + at[:, None] * RANK + ranks[None, :], acc, mask=row_mask[:, None] & rank_mask[None, :])
    else:
        result = acc / tl.where(running_sum == 0.0, 1.0, running_sum)[:, None]
        out_at = out + token[:, None] * out_token_stride + head[:, None] * out_head_stride + ranks[None, :]
        tl.store(out_at, result.to(out.dtype.element_ty), mask=row_mask[:, None] & rank_mask[None, :])


def latent_attention(
    q: torch.Tensor,
    cache: torch.Tensor | ScaledLatents,
    rank: int,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    max_query_len: int,
    scale: float,
    num_splits: int | None = None,
    fixed_order: bool = False,
) -> torch.Tensor:
    """Return causal varlen attention of q `[T, num_heads, width]` over a latent cache `[num_blocks, block_size, 1,
    width]`, of q's type or in 8 bits, whose first `rank` columns are the values. Returns `[T, num_heads, rank]`.

    `num_splits` and `fixed_order` are as in `triton_paged.paged_attention`.
    """
    if fixed_order:
        max_query_len, num_splits = max(max_query_len, 2), 1
    num_tokens, num_heads, width = q.shape
    block_size, num_reqs = cache.shape[1], seq_lens.shape[0]
    block_g = min(16, triton.next_power_of_2(num_heads))
    block_q = max(1, _ROWS // block_g) if max_query_len > 1 else 1
    block_g = max(block_g, 16 // block_q)  # tl.dot needs 16 rows
    num_blocks = num_tokens if block_q == 1 else num_tokens // block_q + num_reqs
    head_blocks = triton.cdiv(num_heads, block_g)
    if num_splits is None:
        num_splits = default_num_splits(
            num_blocks * head_blocks, max_query_len, block_table.shape[1] * block_size, q.device
        )
    out = q.new_empty(num_tokens, num_heads, rank)
    partial_shape = (num_tokens, num_heads, num_splits) if num_splits > 1 else (0,)
    partial_max, partial_sum = (q.new_empty(partial_shape, dtype=torch.float32) for _ in range(2))
    partial_out = q.new_empty((*partial_shape, rank), dtype=torch.float32)
    values, scales = cache, [None, None, 0, 0]
    if isinstance(cache, ScaledLatents):
        values, both = as_bytes(cache.values), cache.scales[:, :, 0].unbind(-1)
        scales = [*both, *both[0].stride()]
    kind = kind_of(cache)  # converting 8 bits takes registers
    block_r, block_p = (max(16, triton.next_power_of_2(size)) for size in (rank, width - rank))
    _attend_latent_kernel[(num_blocks, head_blocks, num_splits)](
        q, values, out, partial_out, partial_max, partial_sum, block_table, query_start_loc, seq_lens, scale * LOG2_E,
        num_reqs, num_splits, block_table.stride(0), q.stride(0), q.stride(1), out.stride(0), out.stride(1),
        values.stride(0), values.stride(1), *scales,
        NUM_HEADS=num_heads, RANK=rank, BLOCK_R=block_r, ROPE_DIM=width - rank, BLOCK_P=block_p, PAGE_SIZE=block_size,
        BLOCK_Q=block_q, BLOCK_G=block_g, BLOCK_N=32 if q.element_size() == 2 else 16, SPLIT=num_splits > 1,
        KIND=kind, num_warps=4 if kind == 0 and (block_q * block_g <= 16 or rank <= 256) else 8, num_stages=2,
    )  # fmt: skip
    if num_splits > 1:
        _combine_kernel[(num_tokens, num_heads)](
            partial_out, partial_max, partial_sum, out, num_splits, out.stride(0), out.stride(1),
            NUM_HEADS=num_heads, HEAD_DIM=rank, BLOCK_D=block_r, BLOCK_S=MAX_SPLITS)  # fmt: skip
    return out


def write_latents(
    latents: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """See `Ops.write_latents`."""
    rank, rope_dim = len(weight), cos_sin.shape[1]
    _write_latents_kernel[(len(latents),)](
        latents, weight, cos_sin, positions, cache, slots, eps, latents.stride(0), cos_sin.stride(0),
        cache.stride(0), cache.stride(1), RANK=rank, BLOCK=triton.next_power_of_2(rank), ROPE=rope_dim,
        HALF=triton.next_power_of_2(rope_dim // 2), PAGE_SIZE=cache.shape[1], num_warps=4,
    )  # fmt: skip


def rotate_tails(q: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor) -> None:
    """See `Ops.rotate_tails`."""
    (tokens, heads, size), rope_dim = q.shape, cos_sin.shape[1]
    _rotate_kernel[(tokens, triton.cdiv(heads, _HEADS))](
        q, cos_sin, positions, heads, q.stride(0), cos_sin.stride(0), SIZE=size, ROPE=rope_dim, HEADS=_HEADS,
        HALF=triton.next_power_of_2(rope_dim // 2), num_warps=1,
    )  # fmt: skip


@triton.jit
def _angles(cos_sin, positions, token, cos_sin_stride, lanes, mask, ROPE: tl.constexpr):
    at = cos_sin + tl.load(positions + token) * cos_sin_stride + lanes
    cos, sin = tl.load(at, mask=mask, other=0.0), tl.load(at + ROPE // 2, mask=mask, other=0.0)
    return cos.to(tl.float32), sin.to(tl.float32)


@triton.jit
def _write_latents_kernel(
    latents, weight, cos_sin, positions, cache, slots, eps, stride, cos_sin_stride, page_stride, slot_stride,
    RANK: tl.constexpr, BLOCK: tl.constexpr, ROPE: tl.constexpr, HALF: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    to = cache + slot // PAGE_SIZE * page_stride + slot % PAGE_SIZE * slot_stride
    source, column, lanes = latents + token * stride, tl.arange(0, BLOCK), tl.arange(0, HALF)
    inside, mask = column < RANK, lanes < ROPE // 2
    c = tl.load(source + column, mask=inside, other=0.0).to(tl.float32)
    c *= tl.rsqrt(tl.sum(c * c, 0) / RANK + eps)
    c *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(to + column, c.to(cache.dtype.element_ty), mask=inside)
    a = tl.load(source + RANK + lanes, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(source + RANK + ROPE // 2 + lanes, mask=mask, other=0.0).to(tl.float32)
    cos, sin = _angles(cos_sin, positions, token, cos_sin_stride, lanes, mask, ROPE)
    tl.store(to + RANK + lanes, (a * cos - b * sin).to(cache.dtype.element_ty), mask=mask)
    tl.store(to + RANK + ROPE // 2 + lanes, (b * cos + a * sin).to(cache.dtype.element_ty), mask=mask)


@triton.jit
def _rotate_kernel(
    q, cos_sin, positions, heads, stride, cos_sin_stride, SIZE: tl.constexpr, ROPE: tl.constexpr,
    HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    token, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, HALF)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    rotates = lanes < ROPE // 2
    mask = (head < heads)[:, None] & rotates[None, :]
    at = q + token * stride + head[:, None] * SIZE + (SIZE - ROPE) + lanes[None, :]
    first, second = tl.load(at, mask=mask, other=0.0), tl.load(at + ROPE // 2, mask=mask, other=0.0)
    a, b = first.to(tl.float32), second.to(tl.float32)
    cos, sin = _angles(cos_sin, positions, token, cos_sin_stride, lanes, rotates, ROPE)
    tl.store(at, (a * cos[None, :] - b * sin[None, :]).to(first.dtype), mask=mask)
    tl.store(at + ROPE // 2, (b * cos[None, :] + a * sin[None, :]).to(first.dtype), mask=mask)
