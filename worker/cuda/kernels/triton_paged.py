"""Paged varlen attention in Triton: prefill, chunked prefill and decode in one kernel, for any page size, depending
only on torch and triton.

One program serves `BLOCK_Q` consecutive query tokens of one request for all query heads of one KV head, so that K and V
are read once for the whole group (GQA). Programs find their request by bisecting `query_start_loc`: request i owns the
query blocks from `query_start_loc[i] // BLOCK_Q + i` on. That leaves at most one idle block per request (none with
BLOCK_Q = 1) and needs no host-side table, so the launch is the same in a CUDA graph. Softmax is online (Milakov and
Gimelshein, arXiv:1805.02867; Dao et al., arXiv:2205.14135). Decode batches too small to fill the device split their
keys over `num_splits` programs, the last of which combines their partial results, in the order of the keys
(flash-decoding); a second kernel does where a KV head has many heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from quire.worker.attention.base import AttentionCall
from quire.worker.attention.scaled import KVCache, ScaledCache, as_bytes, values_of
from quire.worker.cuda.kernels import limits
from quire.worker.cuda.kernels.triton_scaled import kind_of

try:
    import triton
    import triton.language as tl

    from quire.worker.cuda.kernels.triton_scaled import numbers_of
    from quire.worker.cuda.kernels.triton_split import COUNTERS, comes_last, counters_of
except ImportError as error:  # a CPU installation without triton: the backend reports it as its reason
    triton, import_error = None, error

LOG2_E = math.log2(math.e)
MAX_SPLITS = 32
_COMBINED_AT_ONCE = 8  # heads of a program; more would be combined one after another for longer than a launch takes

if triton is not None:

    @triton.jit
    def _first_block(start, request, BLOCK_Q: tl.constexpr):
        """Return the first query block of a request whose tokens begin at `start`."""
        first = start
        if BLOCK_Q > 1:  # otherwise every token is a block
            first = start // BLOCK_Q + request
        return first

    @triton.jit
    def _find_request(query_start_loc, block, num_reqs, BLOCK_Q: tl.constexpr):
        """Return the last request whose first query block is at or before `block`."""
        low, high = 0, num_reqs
        while high - low > 1:
            middle = (low + high) // 2
            if _first_block(tl.load(query_start_loc + middle), middle, BLOCK_Q) <= block:
                low = middle
            else:
                high = middle
        return low

    @triton.jit
    def _combine(
        partial_out, partial_max, partial_sum, out, index, num_splits, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
        BLOCK_S: tl.constexpr,
    ):  # fmt: skip
        """Write the result of a token and head, the `index`th of all, to `out`; from the L2 cache, which the programs
        of other splits wrote to.
        """
        base = index * num_splits
        splits, dims = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
        split_mask, dim_mask = splits < num_splits, dims < HEAD_DIM
        maxima = tl.load(partial_max + base + splits, mask=split_mask, other=float("-inf"), cache_modifier=".cg")
        overall = tl.max(maxima, 0)
        factor = tl.exp2(maxima - tl.where(overall == float("-inf"), 0.0, overall))
        sums = tl.load(partial_sum + base + splits, mask=split_mask, other=0.0, cache_modifier=".cg")
        total = tl.sum(sums * factor, 0)
        parts = tl.load(
            partial_out + (base + splits)[:, None] * HEAD_DIM + dims[None, :],
            mask=split_mask[:, None] & dim_mask[None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        result = tl.sum(parts * factor[:, None], 0) / tl.where(total == 0.0, 1.0, total)
        tl.store(out + dims, result.to(out.dtype.element_ty), mask=dim_mask)

    @triton.jit
    def _combine_if_last(
        partial_out, partial_max, partial_sum, out, counter, token, first_head, num_splits, token_stride, head_stride,
        NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
        BLOCK_S: tl.constexpr,
    ):  # fmt: skip
        """Combine the splits of a token and the heads of a KV head in the last of their programs."""
        if comes_last(counter, num_splits):
            for i in tl.static_range(GROUP):
                head = first_head + i
                to, index = out + token * token_stride + head * head_stride, token * NUM_HEADS + head
                _combine(partial_out, partial_max, partial_sum, to, index, num_splits, HEAD_DIM, BLOCK_D, BLOCK_S)

    # These arguments change from step to step; specializing on them would recompile the kernel.
    @triton.jit(
        do_not_specialize=["num_reqs", "table_stride", "num_splits"],
        do_not_specialize_on_alignment=["block_table", "query_start_loc", "seq_lens"],
    )
    def _attend_kernel(
        q, k_cache, v_cache, out, partial_out, partial_max, partial_sum, counters, sinks, block_table, query_start_loc,
        seq_lens, qk_scale, num_reqs, num_splits, table_stride, q_token_stride, q_head_stride, out_token_stride,
        out_head_stride, k_page_stride, k_slot_stride, k_head_stride, v_page_stride, v_slot_stride, v_head_stride,
        k_scales, v_scales, ks_page_stride, ks_slot_stride, ks_head_stride, vs_page_stride, vs_slot_stride,
        vs_head_stride,
        GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, V_DIM: tl.constexpr,
        BLOCK_V: tl.constexpr, PAGE_SIZE: tl.constexpr,
        BLOCK_Q: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr,
        SOFT_CAP: tl.constexpr, SPLIT: tl.constexpr, NUM_HEADS: tl.constexpr, KIND: tl.constexpr,
        BLOCK_S: tl.constexpr,
    ):  # fmt: skip
        block, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        request = _find_request(query_start_loc, block, num_reqs, BLOCK_Q)
        start = tl.load(query_start_loc + request)
        query_len = tl.load(query_start_loc + request + 1) - start
        # this program's first query within the request
        first_query = (block - _first_block(start, request, BLOCK_Q)) * BLOCK_Q
        if first_query >= query_len:
            return
        seq_len = tl.load(seq_lens + request)
        context_len = seq_len - query_len

        # rows of the tile: BLOCK_Q tokens x BLOCK_G heads, token-major
        rows = tl.arange(0, BLOCK_Q * BLOCK_G)
        query, head_in_group = first_query + rows // BLOCK_G, rows % BLOCK_G
        row_mask = (query < query_len) & (head_in_group < GROUP)
        token, head = (start + query).to(tl.int64), kv_head * GROUP + head_in_group  # x stride exceeds 32 bits
        dims, v_dims = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
        dim_mask, v_dim_mask = dims < HEAD_DIM, v_dims < V_DIM
        q_tile = tl.load(
            q + token[:, None] * q_token_stride + head[:, None] * q_head_stride + dims[None, :],
            mask=row_mask[:, None] & dim_mask[None, :],
            other=0.0,
        )
        position = context_len + query

        # keys [first_key, last_key) are visible to some row of the tile
        last_key = tl.minimum(context_len + first_query + BLOCK_Q, seq_len)
        first_key = 0
        if WINDOW > 0:
            first_key = tl.maximum(context_len + first_query - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        if SPLIT:
            tiles_per_split = tl.cdiv(tl.cdiv(last_key - first_key, BLOCK_N), num_splits)
            first_key += split * tiles_per_split * BLOCK_N
            last_key = tl.minimum(last_key, first_key + tiles_per_split * BLOCK_N)

        running_max = tl.full([BLOCK_Q * BLOCK_G], float("-inf"), tl.float32)
        running_sum = tl.zeros([BLOCK_Q * BLOCK_G], tl.float32)
        if sinks is not None:  # a key whose value is 0; the first split has it
            sink = tl.load(sinks + head, mask=row_mask, other=float("-inf")).to(tl.float32) * 1.4426950408889634
            running_max = tl.where(split == 0, sink, running_max)
            running_sum = tl.where((split == 0) & row_mask, 1.0, 0.0)
        acc = tl.zeros([BLOCK_Q * BLOCK_G, BLOCK_V], tl.float32)
        columns = tl.arange(0, BLOCK_N)
        PART: tl.constexpr = 256.0 if KIND == 2 else 1.0  # see numbers_of
        for key_start in range(first_key, last_key, BLOCK_N):
            key = key_start + columns
            key_mask = key < last_key
            page = tl.load(block_table + request * table_stride + key // PAGE_SIZE, mask=key_mask, other=0).to(tl.int64)
            slot = key % PAGE_SIZE
            k_at = k_cache + (page * k_page_stride + slot * k_slot_stride + kv_head * k_head_stride)[None, :]
            k_tile = tl.load(k_at + dims[:, None], mask=key_mask[None, :] & dim_mask[:, None], other=0)
            if KIND == 0:
                scores = tl.dot(q_tile, k_tile, input_precision="ieee") * qk_scale
            else:  # 8 bits are exact in the type of the queries; their scales multiply columns of scores and weights
                scale_at = page * ks_page_stride + slot * ks_slot_stride + kv_head * ks_head_stride
                k_scale = tl.load(k_scales + scale_at, mask=key_mask, other=0.0) * PART * qk_scale
                k_numbers = numbers_of(k_tile, KIND, q_tile.dtype)
                scores = tl.dot(q_tile, k_numbers, input_precision="ieee") * k_scale[None, :]
            if SOFT_CAP > 0:  # qk_scale carries log2(e); the cap applies to natural units
                capped = scores * (0.6931471805599453 * 2.0 / SOFT_CAP)
                scores = (1.0 - 2.0 / (1.0 + tl.exp(capped))) * (SOFT_CAP * 1.4426950408889634)
            visible = (key[None, :] <= position[:, None]) & key_mask[None, :]
            if WINDOW > 0:
                visible &= key[None, :] > position[:, None] - WINDOW
            scores = tl.where(visible, scores, float("-inf"))

            new_max = tl.maximum(running_max, tl.max(scores, 1))
            safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)  # a row that attends to none of these keys
            weights = tl.exp2(scores - safe_max[:, None])
            rescale = tl.exp2(running_max - safe_max)
            running_sum = running_sum * rescale + tl.sum(weights, 1)
            v_at = v_cache + (page * v_page_stride + slot * v_slot_stride + kv_head * v_head_stride)[:, None]
            v_tile = tl.load(v_at + v_dims[None, :], mask=key_mask[:, None] & v_dim_mask[None, :], other=0)
            if KIND > 0:
                scale_at = page * vs_page_stride + slot * vs_slot_stride + kv_head * vs_head_stride
                weights *= (tl.load(v_scales + scale_at, mask=key_mask, other=0.0) * PART)[None, :]
                v_tile = numbers_of(v_tile, KIND, q_tile.dtype)
            acc = acc * rescale[:, None] + tl.dot(weights.to(v_tile.dtype), v_tile, input_precision="ieee")
            running_max = new_max

        if SPLIT:
            at = (token * NUM_HEADS + head) * num_splits + split
            tl.store(partial_max + at, running_max, mask=row_mask)
            tl.store(partial_sum + at, running_sum, mask=row_mask)
            tl.store(
                partial_out + at[:, None] * V_DIM + v_dims[None, :], acc, mask=row_mask[:, None] & v_dim_mask[None, :]
            )
            if counters is not None:  # BLOCK_Q is 1: the program has one token
                _combine_if_last(
                    partial_out, partial_max, partial_sum, out, counters + block * tl.num_programs(1) + kv_head,
                    (start + first_query).to(tl.int64), kv_head * GROUP, num_splits, out_token_stride, out_head_stride,
                    NUM_HEADS, GROUP, V_DIM, BLOCK_V, BLOCK_S,
                )  # fmt: skip
        else:
            result = acc / tl.where(running_sum == 0.0, 1.0, running_sum)[:, None]
            out_at = out + token[:, None] * out_token_stride + head[:, None] * out_head_stride + v_dims[None, :]
            tl.store(out_at, result.to(out.dtype.element_ty), mask=row_mask[:, None] & v_dim_mask[None, :])

    @triton.jit(do_not_specialize=["num_splits"])
    def _combine_kernel(
        partial_out, partial_max, partial_sum, out, num_splits, out_token_stride, out_head_stride,
        NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
    ):  # fmt: skip
        token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
        to, index = out + token * out_token_stride + head * out_head_stride, token * NUM_HEADS + head
        _combine(partial_out, partial_max, partial_sum, to, index, num_splits, HEAD_DIM, BLOCK_D, BLOCK_S)


def attend(call: AttentionCall, fixed_order: bool = False) -> torch.Tensor:
    """Call `paged_attention` with the arguments of `call`."""
    meta = call.meta
    return paged_attention(
        call.q, call.k_cache, call.v_cache, meta.block_table, meta.query_start_loc, meta.seq_lens, meta.max_query_len,
        call.scale, call.sliding_window, call.soft_cap, sinks=call.sinks, fixed_order=fixed_order, out=call.out,
    )  # fmt: skip


def paged_attention(
    q: torch.Tensor,
    k_cache: KVCache,
    v_cache: KVCache,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    max_query_len: int,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    num_splits: int | None = None,
    sinks: torch.Tensor | None = None,
    fixed_order: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return causal varlen attention of q `[T, num_heads, head_dim]` over a paged cache `[num_blocks, block_size,
    num_kv_heads, _]`, of q's type or in 8 bits. Returns `[T, num_heads, v_head_dim]`, `out` if given. `sinks` are
    `[num_heads]`.

    If `num_splits` is None, the batch's shape determines it (never `seq_lens`, which may change between replays of a
    CUDA graph). With `fixed_order` all steps have the tiles of prompts and no splits: tiles of keys begin at multiples
    of their size, and those that a token does not see change no bit of its sums.
    """
    sizes = *q.shape, v_cache.shape[3], k_cache.shape[1], k_cache.shape[2], seq_lens.shape[0]
    step = max_query_len, block_table.shape[1], num_splits, fixed_order
    kind = sliding_window or 0, soft_cap or 0.0, kind_of(k_cache), q.element_size()
    plan = _plan(sizes, step, kind, q.device, limits.for_device(q.device))
    (num_tokens, num_heads, _, v_dim), num_splits = sizes[:4], plan.num_splits
    if out is None:
        out = q.new_empty(num_tokens, num_heads, v_dim)
    partial_shape = (num_tokens, num_heads, num_splits) if num_splits > 1 else (0,)
    partial_max, partial_sum = (q.new_empty(partial_shape, dtype=torch.float32) for _ in range(2))
    partial_out = q.new_empty((*partial_shape, v_dim), dtype=torch.float32)
    counters = counters_of(q.device) if plan.combines else None
    k, v = values_of(k_cache), values_of(v_cache)
    scales = [None, None, *[0] * 6]
    if isinstance(k_cache, ScaledCache):
        k, v = as_bytes(k), as_bytes(v)
        scales = [k_cache.scales, v_cache.scales, *k_cache.scales.stride(), *v_cache.scales.stride()]
    _attend_kernel[plan.grid](
        q, k, v, out, partial_out, partial_max, partial_sum, counters, sinks, block_table, query_start_loc, seq_lens,
        scale * LOG2_E, sizes[6], num_splits, block_table.stride(0), q.stride(0), q.stride(1), out.stride(0),
        out.stride(1),
        *k.stride()[:3], *v.stride()[:3], *scales, **plan.constants,
    )  # fmt: skip
    if num_splits > 1 and not plan.combines:
        _combine_kernel[(num_tokens, num_heads)](
            partial_out, partial_max, partial_sum, out, num_splits, out.stride(0), out.stride(1),
            NUM_HEADS=num_heads, HEAD_DIM=v_dim, BLOCK_D=plan.constants["BLOCK_V"], BLOCK_S=MAX_SPLITS)  # fmt: skip
    return out


@dataclass(frozen=True, slots=True)
class _Plan:
    """Arguments of a launch except its tensors."""

    grid: tuple[int, int, int]
    num_splits: int
    combines: bool  # whether the last program of the splits combines them
    constants: dict[str, Any]


@lru_cache(maxsize=512)  # all layers of a kind have one, and the host would compute it anew for each
def _plan(
    sizes: tuple[int, ...],
    step: tuple[int, int, int | None, bool],
    kinds: tuple[int, float, int, int],
    device: torch.device,
    limit: limits.Limits,
) -> _Plan:
    """Return the plan for (tokens, heads, sizes of a key and of a value, size of a block, KV heads, requests), (longest
    query, width of the block table, number of splits if it is given, whether the order of sums is fixed) and (window,
    soft cap, kind of the cache, bytes of a query's entry).
    """
    window, soft_cap, kind, itemsize = kinds
    num_tokens, num_heads, head_dim, v_dim, block_size, num_kv_heads, num_reqs = sizes
    max_query_len, width, num_splits, fixed_order = step
    if fixed_order:
        max_query_len, num_splits = max(max_query_len, 2), 1
    group = num_heads // num_kv_heads
    block_g = triton.next_power_of_2(group)
    block_d, block_v = (max(16, triton.next_power_of_2(dim)) for dim in (head_dim, v_dim))
    rows, max_keys = _tile_of_step(max_query_len, max(block_d, block_v), kind, limit)
    block_q = 1 if max_query_len == 1 else max(1, rows // block_g)
    block_g = max(block_g, 16 // block_q)  # tl.dot needs 16 rows
    num_blocks = num_tokens if block_q == 1 else num_tokens // block_q + num_reqs
    if num_splits is None:
        num_splits = default_num_splits(num_blocks * num_kv_heads, max_query_len, width * block_size, device)
    constants = dict(
        GROUP=group, HEAD_DIM=head_dim, BLOCK_D=block_d, V_DIM=v_dim, BLOCK_V=block_v, PAGE_SIZE=block_size,
        BLOCK_Q=block_q, BLOCK_G=block_g, BLOCK_N=_tile_of_keys(max_keys, block_q * block_g, block_d, itemsize, limit),
        WINDOW=window, SOFT_CAP=soft_cap, SPLIT=num_splits > 1, NUM_HEADS=num_heads,
        KIND=kind, BLOCK_S=MAX_SPLITS, num_warps=4 if block_q * block_g <= 32 else 8, num_stages=2,
    )  # fmt: skip
    combines = num_splits > 1 and max_query_len == 1 and group <= _COMBINED_AT_ONCE
    combines = combines and num_blocks * num_kv_heads <= COUNTERS
    return _Plan((num_blocks, num_kv_heads, num_splits), num_splits, combines, constants)


def _tile_of_step(max_query_len: int, block_d: int, kind: int, limit: limits.Limits) -> tuple[int, int]:
    """Return (tokens x heads, most keys) of a program: the rows for which eight warps have registers, which is two of
    Hopper's products of 64 rows. tools/compile_kernels.py shows which sizes spill.
    """
    if max_query_len == 1:
        return 16, 64
    capability, heavy = limit.capability, block_d > 128 or kind > 0
    if capability < 90:
        return (64 if heavy else 128), 32 if block_d > 128 else 64
    return 128, 128 if not heavy else 32 if capability >= 100 and block_d > 128 else 64


def _tile_of_keys(max_keys: int, rows: int, block_d: int, itemsize: int, limit: limits.Limits) -> int:
    """Return the largest number of keys, at most `max_keys`, whose K and V tiles, in two stages, leave room for the
    queries in the device's shared memory.
    """
    while max_keys > 16 and (4 * max_keys + rows) * block_d * itemsize > limit.shared:
        max_keys //= 2
    return max_keys


def default_num_splits(num_programs: int, max_query_len: int, max_keys: int, device: torch.device) -> int:
    """Return enough splits to give every multiprocessor two programs, for decode batches only, with at least 256 keys
    of the longest possible request per split.
    """
    if max_query_len > 1 or device.type != "cuda":
        return 1
    num_splits = 2 * torch.cuda.get_device_properties(device).multi_processor_count // max(1, num_programs)
    return max(1, min(MAX_SPLITS, num_splits, max_keys // 256))
