"""FlashAttention 3 and 2 (Dao et al., arXiv:2205.14135, 2307.08691, 2407.08608) over the paged cache, from their
authors' packages.

Both accept the cache's layout and right-align the causal mask, so prefill, chunked prefill and decode are one call.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch

from quire.worker.attention.base import AttentionBackend, AttentionCall, AttentionMetadata, AttentionSpec, try_once
from quire.worker.attention.scaled import FP8, ScaledCache, scale_of, to_8_bits
from quire.worker.cuda.install import triton_ops
from quire.worker.cuda.kernels import limits, triton_paged
from quire.worker.cuda.requirements import no_half_on_gpu

_TILE_Q, _TILE_K, _MAX_SPLITS = 128, 128, 128  # for FA3: rows and keys of a program, parts of the keys


def window_size(sliding_window: int | None) -> tuple[int, int]:
    """Return FlashAttention's (left, right) window, which does not count the token itself."""
    return (-1, -1) if sliding_window is None else (sliding_window - 1, 0)


def cumulative(seq_lens: torch.Tensor) -> torch.Tensor:
    """Return the cumulative sums `[R + 1]` int32, beginning with 0."""
    return torch.nn.functional.pad(seq_lens.cumsum(0, dtype=torch.int32), (1, 0))


# Names of the arguments that FlashAttention 3's operators must have.
_FORWARD = {
    "cu_seqlens_q",
    "seqused_k",
    "max_seqlen_q",
    "page_table",
    "softmax_scale",
    "is_causal",
    "window_size_left",
    "window_size_right",
    "softcap",
    "scheduler_metadata",
    "num_splits",
    "out",
}
_METADATA = {
    "cu_seqlens_q",
    "page_size",
    "is_causal",
    "window_size_left",
    "window_size_right",
    "has_softcap",
    "num_splits",
}


def _operator(name: str, arguments: set[str]) -> Callable[..., Any] | None:
    """Return FlashAttention 3's operator of that name, None if its package has not registered one that takes
    `arguments`.
    """
    operator = getattr(getattr(torch.ops.flash_attn_3, name, None), "default", None)
    taken = set() if operator is None else {argument.name for argument in operator._schema.arguments}
    return operator if arguments <= taken else None


class _FlashAttention(AttentionBackend):
    """Common base of the versions: each imports a package and tries it once, because packages are built for some GPUs
    and features only.
    """

    module_name: str
    page_multiple = 1
    page_limit: int | None = None  # tokens
    graph_safe = True

    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        if reason := no_half_on_gpu(spec) or spec.no_multiple_of(cls.page_multiple):
            return reason
        if cls.page_limit and spec.block_size and spec.block_size > cls.page_limit:
            return f"takes blocks of at most {cls.page_limit} tokens, not {spec.block_size}"
        if reason := cls.refuses_cache(spec) or replace(spec, kv_scales=None).unusual():
            return reason
        try:
            return try_once(cls(), spec)
        except ImportError as error:
            return f"{cls.module_name} cannot be imported ({error})"

    @classmethod
    def refuses_cache(cls, spec: AttentionSpec) -> str | None:
        """Return why this version cannot read the cache, or None."""
        return "has no KV cache in 8 bits" if spec.kv_scales else None

    def __init__(self) -> None:
        self._module: ModuleType = importlib.import_module(self.module_name)


def triton_decodes(q: torch.Tensor, num_kv_heads: int) -> bool:
    """Return whether the Triton kernel works and is faster for a step of one token per request, q `[T, num_heads,
    head_dim]`.

    On an H200 (`benchmarks/gpu.py attention`) it is faster where its programs, one per request and KV head, fill the
    device three times (1.1 x for requests of 1,100 tokens, 1.8 x for 128), and for heads of 64 (1.1 to 3 x). With fewer
    programs, which split the keys, it takes up to 1.4 x of FlashAttention 3's time.
    """
    if q.device.type != "cuda" or triton_ops(q.device) is None:
        return False
    return q.shape[2] <= 64 or len(q) * num_kv_heads >= 3 * limits.for_device(q.device).processors


def num_key_splits(group: int, num_kv_heads: int, max_seq_len: int, num_sms: int = 132) -> int:
    """Return the number of parts into which FA3 splits the keys of a decode step by default. It decides on the host, as
    if the batch had one request, of `num_kv_heads` KV heads with `group` query heads each. `num_sms` is the number of
    multiprocessors, 132 on H100 and H200.
    """
    programs, tiles = num_kv_heads * -(-group // _TILE_Q), -(-max_seq_len // _TILE_K)
    if programs >= 0.8 * num_sms or tiles <= 4:
        return 1

    def efficiency(splits: int) -> float:
        waves = programs * splits / num_sms
        return waves / math.ceil(waves)

    candidates = range(1, min(_MAX_SPLITS, num_sms, tiles) + 1)
    best = max(map(efficiency, candidates))
    return next(splits for splits in candidates if efficiency(splits) >= 0.85 * best)


class FlashAttention3(_FlashAttention):
    """FlashAttention 3: kernels for Hopper.

    Pages that hold a whole tile of keys are copied by the bulk copy engine, unused slots included, whose values are
    then multiplied by 0: a NaN that an earlier request left there would reach a new one. Smaller pages are copied token
    by token, as far as they are filled.

    They are called as the operators that the package registers, because its Python wrapper costs tens of microseconds
    per layer. The scheduler metadata, which distributes the work, depends only on the lengths and the kind of layer, so
    the first layer of a kind computes it for the others. A package that registers no such operators is called through
    its wrapper.

    Steps of many requests with one token each are left to the Triton kernel (`triton_decodes`).

    An FP8 cache with the scales of a checkpoint is multiplied directly, by queries that are rounded to FP8 with one
    scale per KV head and step. Scales per token are left to the other backends.
    """

    name = "flash_attn_3"
    module_name = "flash_attn_interface"
    page_limit = _TILE_K // 2

    @classmethod
    def workspace(cls, spec: AttentionSpec, num_reqs: int, max_seq_len: int) -> int:
        """Return bytes of the float32 results of each part of the keys, which FA3 allocates for all requests."""
        splits = num_key_splits(spec.num_heads // spec.num_kv_heads, spec.num_kv_heads, max_seq_len)
        return splits * num_reqs * spec.num_heads * (spec.v_dim + 1) * 4 if splits > 1 else 0

    def __init__(self) -> None:
        super().__init__()
        self._forward = _operator("fwd", _FORWARD)
        self._metadata = _operator("get_scheduler_metadata", _METADATA)

    @classmethod
    def refuses_cache(cls, spec: AttentionSpec) -> str | None:
        if spec.kv_scales and spec.kv_dtype != FP8:
            return "has no KV cache in int8"
        if spec.kv_scales == "token":
            return "has one scale of an FP8 cache per head, not one per token"
        return None

    def build(self, meta: AttentionMetadata) -> None:
        meta.extra = {}  # (window, has soft-cap) -> scheduler metadata

    def attend(self, call: AttentionCall) -> torch.Tensor:
        q, k_cache, v_cache = call.q, call.k_cache, call.v_cache
        if not isinstance(k_cache, ScaledCache):
            if call.meta.max_query_len == 1 and triton_decodes(q, k_cache.shape[2]):
                return triton_paged.attend(call)
            return self.library(call)
        numbers, descales = in_fp8(q, k_cache, v_cache, len(call.meta.seq_lens))
        call = replace(call, q=numbers, k_cache=k_cache.values, v_cache=v_cache.values)
        return self._call(call, descales).to(q.dtype)

    def library(self, call: AttentionCall) -> torch.Tensor:
        """Call FlashAttention 3 itself, over a cache that is not in 8 bits."""
        return self._call(call, {})

    def _call(self, call: AttentionCall, descales: dict[str, torch.Tensor]) -> torch.Tensor:
        meta = call.meta
        if self._forward is None:
            return self._call_wrapper(call, descales)
        left, right = window_size(call.sliding_window)
        return self._forward(
            call.q,
            call.k_cache,
            call.v_cache,
            cu_seqlens_q=meta.query_start_loc,
            seqused_k=meta.seq_lens,
            max_seqlen_q=meta.max_query_len,
            page_table=meta.block_table,
            softmax_scale=call.scale,
            is_causal=True,
            window_size_left=left,
            window_size_right=right,
            softcap=call.soft_cap or 0.0,
            scheduler_metadata=self._scheduler_metadata(call),
            num_splits=0,
            out=None if descales else call.out,
            **descales,
        )[0]

    def _scheduler_metadata(self, call: AttentionCall) -> torch.Tensor | None:
        """Return this step's metadata for layers of this kind. Sizes must equal those of the call itself, which derives
        the number of splits from them.
        """
        if self._metadata is None:
            return None
        q, k_cache, meta = call.q, call.k_cache, call.meta
        kind = call.sliding_window, bool(call.soft_cap)
        if kind not in meta.extra:
            left, right = window_size(call.sliding_window)
            page_size = k_cache.shape[1]
            meta.extra[kind] = self._metadata(
                len(meta.seq_lens),
                meta.max_query_len,
                meta.block_table.shape[1] * page_size,
                q.shape[1],
                k_cache.shape[2],
                q.shape[2],
                q.shape[2],
                q.dtype,
                meta.seq_lens,
                cu_seqlens_q=meta.query_start_loc,
                page_size=page_size,
                is_causal=True,
                window_size_left=left,
                window_size_right=right,
                has_softcap=bool(call.soft_cap),
                num_splits=0,
            )
        return meta.extra[kind]

    def _call_wrapper(self, call: AttentionCall, descales: dict[str, torch.Tensor]) -> torch.Tensor:
        meta = call.meta
        return self._module.flash_attn_with_kvcache(
            call.q,
            call.k_cache,
            call.v_cache,
            cache_seqlens=meta.seq_lens,
            page_table=meta.block_table,
            cu_seqlens_q=meta.query_start_loc,
            max_seqlen_q=meta.max_query_len,
            softmax_scale=call.scale,
            causal=True,
            window_size=window_size(call.sliding_window),
            softcap=call.soft_cap or 0.0,
            **descales,
        )


def in_fp8(
    q: torch.Tensor, k_cache: ScaledCache, v_cache: ScaledCache, num_requests: int
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return (q `[T, num_heads, D]` in e4m3, the scales `[R, num_kv_heads]` of q, k and v by the operator's names)."""
    num_kv_heads = k_cache.shape[2]
    grouped = q.unflatten(1, (num_kv_heads, -1))
    scale, inverse = scale_of(grouped.movedim(1, 0).flatten(1), FP8)  # for each KV head
    numbers = to_8_bits(grouped.float() * inverse[:, None, None], FP8).flatten(1, 2)
    scales = {"q_descale": scale, "k_descale": k_cache.scales[0, 0], "v_descale": v_cache.scales[0, 0]}
    return numbers, {name: one.expand(num_requests, num_kv_heads) for name, one in scales.items()}


class FlashAttention2(_FlashAttention):
    """FlashAttention 2: Ampere and later.

    The block size is a multiple of 256 tokens. A batch that only decodes uses the entry point that splits long
    sequences over the device.
    """

    name = "flash_attn_2"
    module_name = "flash_attn"
    default_block_size = 256
    page_multiple = 256

    def build(self, meta: AttentionMetadata) -> None:
        if meta.max_query_len > 1:
            meta.extra = cumulative(meta.seq_lens)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        q, k_cache, v_cache, meta = call.q, call.k_cache, call.v_cache, call.meta
        options = {
            "softmax_scale": call.scale,
            "causal": True,
            "window_size": window_size(call.sliding_window),
            "softcap": call.soft_cap or 0.0,
            "block_table": meta.block_table,
        }
        if meta.max_query_len == 1:
            return self._module.flash_attn_with_kvcache(
                q.unsqueeze(1), k_cache, v_cache, cache_seqlens=meta.seq_lens, **options
            ).squeeze(1)
        return self._module.flash_attn_varlen_func(
            q, k_cache, v_cache, meta.query_start_loc, meta.extra, meta.max_query_len, meta.max_seq_len, **options
        )
