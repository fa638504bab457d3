"""The native CPU kernels as functions of torch tensors. Call them only after `native.KERNELS.lib` is loaded.

Each function has a reference (its "twin") in plain torch: `worker/layers` for the norms, the activation and the rotary
embedding, `F.linear` for PackedLinear, `worker/attention/torch_paged.py` for attention, `worker/sampling/arithmetic.py`
for sampling, `worker/sampling/logprobs.py` for log-probabilities. Results differ from the twins by rounding only: the
kernels compute in float32 and round at the same points.
"""

from __future__ import annotations

from ctypes import byref
from typing import TYPE_CHECKING

import torch

from quire.worker.attention.scaled import FP8, KVCache, ScaledLatents, values_of
from quire.worker.cpu.native import (
    KERNELS,
    LayerArgs,
    QkvArgs,
    RoutingArgs,
    ScalesArgs,
)

if TYPE_CHECKING:
    from quire.worker.platforms.step_tensors import StepTensors
    from quire.worker.spec.moe import RoutingSpec

_CACHE_TYPES = {torch.int8: 1, FP8: 2}
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
MAX_HEAD_DIM, MAX_V_DIM = 576, 512
# `RoutingSpec.scores` and `.weights`, numbered as in `Routing` in csrc/kernels.h
_SCORES, _WEIGHTS = ("softmax", "sigmoid", "logits"), ("scores", "normalized", "softmax", "sigmoid")
# activations that products of a gate and up may end with, numbered as `Activation` in csrc/gemm.h
GATED = {None: 0, "silu": 1, "gelu_pytorch_tanh": 2, "clamped_silu": 3}


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return RMSNorm (arXiv:1910.07467) over the last dimension of x `[..., H]`; the weight has x's type or float32."""
    if x.dim() != 2 or x.stride(1) != 1:
        return rms_norm(x.reshape(-1, x.shape[-1]).contiguous(), weight, eps).view(x.shape)
    return _normed(x, None, 0, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add x to residual in place and return (RMSNorm of the sum, residual). x and residual are `[T, H]`."""
    return _normed(x, residual.data_ptr(), residual.stride(0), weight, eps), residual


def _normed(x: torch.Tensor, residual: int | None, stride: int, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the RMSNorm of x plus the rows at address `residual`, if given, which the sum overwrites."""
    out = torch.empty_like(x)
    KERNELS.lib.quire_add_rms_norm(
        x.data_ptr(),
        x.stride(0),
        residual,
        stride,
        weight.data_ptr(),
        out.data_ptr(),
        out.stride(0),
        x.shape[0],
        x.shape[1],
        eps,
        DTYPES[x.dtype],
        weight.dtype != x.dtype,
    )
    return out


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Return `silu(gate) * up` for x = [gate, up] concatenated: `[T, 2 D] -> [T, D]` (SwiGLU, arXiv:2002.05202)."""
    width = x.shape[1] // 2
    out = x.new_empty(x.shape[0], width)
    KERNELS.lib.quire_silu_and_mul(x.data_ptr(), x.stride(0), out.data_ptr(), width, x.shape[0], width, DTYPES[x.dtype])
    return out


def qk_norm_rope_write(
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor | None,
    positions: torch.Tensor,
    k_cache: KVCache,
    v_cache: KVCache,
    slot_mapping: torch.Tensor,
    num_heads: int,
) -> torch.Tensor:
    """Normalize q and k per head (RMSNorm, if weights are given), apply the rotary embedding (rotate-half form,
    arXiv:2104.09864) and store k and v into their slots. Returns q as a view `[T, num_heads, head_dim]`.

    qkv is `[T, (num_heads + 2 * num_kv_heads) * head_dim]`; its q part is overwritten. cos_sin `[max_positions,
    head_dim]` float32 holds the cosines of the head_dim / 2 angles, then the sines. positions and slot_mapping are
    int64 `[T]`. Caches are `[num_blocks, block_size, num_kv_heads, head_dim]` of qkv's type or in 8 bits.
    """
    assert positions.dtype == slot_mapping.dtype == torch.int64
    head_dim = k_cache.shape[3]
    args = qkv_args(q_weight, k_weight, eps, cos_sin, k_cache, v_cache, num_heads, qkv.stride(0), qkv.dtype)
    KERNELS.lib.quire_qkv_to_cache(
        byref(args), qkv.data_ptr(), positions.data_ptr(), slot_mapping.data_ptr(), qkv.shape[0]
    )
    return qkv[:, : num_heads * head_dim].view(-1, num_heads, head_dim)


def qkv_args(
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor | None,
    k_cache: KVCache,
    v_cache: KVCache,
    num_heads: int,
    row_stride: int,
    dtype: torch.dtype,
) -> QkvArgs:
    """Return the C struct of `qk_norm_rope_write`'s arguments, for rows of qkv of type `dtype` that are `row_stride`
    elements apart.

    It holds addresses only: the caller keeps the tensors alive.
    """
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    k, v = values_of(k_cache), values_of(v_cache)
    return QkvArgs(
        None,
        k.data_ptr(),
        v.data_ptr(),
        None if q_weight is None else q_weight.data_ptr(),
        None if k_weight is None else k_weight.data_ptr(),
        None if cos_sin is None else cos_sin.data_ptr(),
        row_stride,
        *k.stride()[:3],
        *v.stride()[:3],
        num_heads,
        num_kv_heads,
        head_dim,
        v_cache.shape[3],
        0 if cos_sin is None else cos_sin.shape[1],
        block_size,
        DTYPES[dtype],
        q_weight is not None and q_weight.dtype != dtype,
        eps,
        _cache_type(k_cache),
        _scales_args(k_cache),
        _scales_args(v_cache),
    )


def _cache_type(cache: KVCache) -> int:
    """Return the `CacheType` in csrc/eight_bits.h."""
    return 0 if isinstance(cache, torch.Tensor) else _CACHE_TYPES[cache.values.dtype]


def _scales_args(cache: KVCache) -> ScalesArgs:
    """Return the scales of keys or of values, if there are any."""
    if isinstance(cache, torch.Tensor):
        return ScalesArgs()
    return ScalesArgs(cache.scales.data_ptr(), *cache.scales.stride())


def routing_args(spec: RoutingSpec, correction: torch.Tensor | None, bias: torch.Tensor | None) -> RoutingArgs:
    """Return the C struct of `route`'s arguments, for a spec that does not bound groups.

    It holds addresses only: the caller keeps the tensors alive.
    """
    assert not spec.bounds_groups and all(t is None or t.dtype == torch.float32 for t in (correction, bias))
    return RoutingArgs(
        None if bias is None else bias.data_ptr(),
        None if correction is None else correction.data_ptr(),
        spec.num_experts,
        spec.top_k,
        _SCORES.index(spec.scores),
        _WEIGHTS.index(spec.weights),
        spec.scale,
        spec.epsilon,
    )


def route(
    spec: RoutingSpec, logits: torch.Tensor, correction: torch.Tensor | None = None, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do the same as the twin, `layers.routing.route`, except for the last bits of the weights."""
    logits = logits.float().contiguous()
    weights = torch.empty(len(logits), spec.top_k)
    ids = torch.empty(len(logits), spec.top_k, dtype=torch.int64)
    KERNELS.lib.quire_route(
        byref(routing_args(spec, correction, bias)), logits.data_ptr(), weights.data_ptr(), ids.data_ptr(), len(logits)
    )
    return weights, ids


def write_kv(k: torch.Tensor, v: torch.Tensor, k_cache: KVCache, v_cache: KVCache, slot_mapping: torch.Tensor) -> None:
    """Store k and v `[T, num_kv_heads, _]` (heads of a token contiguous) into their slots, int64 `[T]`."""
    args = qkv_args(None, None, 0.0, None, k_cache, v_cache, 0, 0, k.dtype)
    KERNELS.lib.quire_write_kv(
        byref(args), k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0), slot_mapping.data_ptr(), k.shape[0]
    )


def attention_reason(head_dim: int, v_dim: int, dtype: torch.dtype) -> str | None:
    """Return None if `paged_attention` supports these sizes of keys and values and this type, else the reason
    why not.
    """
    for name, size, most in (("head_dim", head_dim, MAX_HEAD_DIM), ("v_dim", v_dim, MAX_V_DIM)):
        if size % 16 or size > most:
            return f"{name} {size} is not a multiple of 16 up to {most}"
    return None if dtype in DTYPES else f"no kernel for {dtype}"


def has_amx() -> bool:
    """Return whether the loaded library multiplies with AMX."""
    return KERNELS.level == "amx"


def paged_attention(
    q: torch.Tensor,
    k_cache: KVCache,
    v_cache: KVCache,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    path: int = 0,
    wanted: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return causal attention of q `[T, num_heads, head_dim]` over the paged cache, for any mixture of decode and
    prefill. `AttentionCall` describes the arguments and the result.

    Caches are `[num_blocks, block_size, num_kv_heads, _]`, the last dimension contiguous, of q's type (float32,
    bfloat16, float16) or in 8 bits; block_table `[R, K]`, seq_lens `[R]` and query_start_loc `[R + 1]` are int32.
    `path` is a sum of flags: 1 disables AMX (for tests); 2 sums in one fixed order, so that a token's result depends
    only on its own keys, bit for bit. `wanted` (int64, ascending) lists the tokens whose results the caller reads; the
    rows of all other tokens are undefined.
    """
    assert block_table.dtype == seq_lens.dtype == query_start_loc.dtype == torch.int32 and (
        wanted is None or wanted.dtype == torch.int64
    )
    if out is None:
        out = torch.empty(*q.shape[:2], v_cache.shape[3], dtype=q.dtype)
    sinks = None if sinks is None else sinks.float()
    args = layer_args(k_cache, v_cache, q.shape[1], scale, window, soft_cap, q.dtype, sinks)
    KERNELS.lib.quire_paged_attention(
        byref(args),
        q.data_ptr(),
        q.stride(0),
        out.data_ptr(),
        out.stride(0),
        block_table.data_ptr(),
        block_table.stride(0),
        seq_lens.data_ptr(),
        query_start_loc.data_ptr(),
        seq_lens.shape[0],
        path,
        None if wanted is None else wanted.data_ptr(),
        0 if wanted is None else len(wanted),
    )
    return out


def layer_args(
    k_cache: KVCache,
    v_cache: KVCache,
    num_heads: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    dtype: torch.dtype,
    sinks: torch.Tensor | None = None,
) -> LayerArgs:
    """Return the C struct of those arguments of `paged_attention` that stay the same from step to step;
    sinks are float32 `[num_heads]`.

    It holds addresses only: the caller keeps the tensors alive.
    """
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    k, v = values_of(k_cache), values_of(v_cache)
    rope_scales = ScalesArgs()
    if isinstance(k_cache, ScaledLatents):
        k_cache, rope_scales = k_cache.latent, _scales_args(k_cache.rope)
    return LayerArgs(
        k.data_ptr(),
        v.data_ptr(),
        *k.stride()[:3],
        *v.stride()[:3],
        num_heads,
        num_kv_heads,
        head_dim,
        v_cache.shape[3],
        block_size,
        DTYPES[dtype],
        window or 0,
        scale,
        soft_cap or 0.0,
        _cache_type(k_cache),
        _scales_args(k_cache),
        _scales_args(v_cache),
        None if sinks is None else sinks.data_ptr(),
        rope_scales,
    )


def fill_inputs(
    step: torch.Tensor,
    num_reqs: int,
    num_samples: int,
    tokens: torch.Tensor,
    blocks: torch.Tensor,
    block_size: int,
    tensors: StepTensors,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do the same as the twin `Ops.fill_inputs`, in one native call per cache group.

    `step` (int64) begins with rows, computed, scheduled, starts and samples, in this order.
    """
    sampling = torch.empty(3, num_samples, dtype=torch.int64)
    for table, slots, out in zip(blocks, tensors.slot_mappings, tensors.block_tables):
        KERNELS.lib.quire_fill_inputs(
            step.data_ptr(),
            num_reqs,
            num_samples,
            tokens.data_ptr(),
            tokens.stride(0),
            table.data_ptr(),
            table.stride(0),
            block_size,
            tensors.input_ids.data_ptr(),
            tensors.positions.data_ptr(),
            slots.data_ptr(),
            tensors.query_start_loc.data_ptr(),
            tensors.seq_lens.data_ptr(),
            out.data_ptr(),
            out.stride(0),
            out.shape[1],
            sampling.data_ptr(),
        )
    return sampling.unbind()


def exclude_by_bitmask(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    """See `Ops.exclude_by_bitmask`; rows and masks are contiguous."""
    KERNELS.lib.quire_exclude_by_bitmask(
        logits.data_ptr(),
        logits.stride(0),
        logits.shape[1],
        rows.data_ptr(),
        masks.data_ptr(),
        masks.stride(0),
        len(rows),
    )


def append_tokens(tokens: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> None:
    """Append to the table `tokens` as `RequestTable.append` does; the other tensors are int64 and contiguous."""
    KERNELS.lib.quire_append_tokens(
        tokens.data_ptr(), tokens.stride(0), rows.data_ptr(), positions.data_ptr(), token_ids.data_ptr(), len(token_ids)
    )


def sample(
    logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, floats: torch.Tensor, ints: torch.Tensor
) -> torch.Tensor:
    """Sample one token, int64 `[S]`, from each row of logits `[S, V]` float32; -1 if a logit of the row is NaN or its
    largest logit is infinite.

    rows and positions are int64 `[S]`. `rows` indexes two tables: floats `[3, N]` float64 holds temperature (0: greedy,
    the first of the largest logits), top_p (1: off) and min_p; ints `[2, N]` int64 holds top_k (0: off) and the state
    of the seed. All four are contiguous. The twins, `best` and `pick` of `worker/sampling/arithmetic.py`, do the same
    arithmetic except for the last bit of exp.
    """
    assert (
        logits.dtype == torch.float32
        and logits.stride(1) == 1
        and rows.dtype == positions.dtype == ints.dtype == torch.int64
        and floats.dtype == torch.float64
    )
    token_ids = torch.empty(len(logits), dtype=torch.int64)
    KERNELS.lib.quire_sample(
        logits.data_ptr(),
        logits.stride(0),
        *logits.shape,
        rows.data_ptr(),
        positions.data_ptr(),
        floats.data_ptr(),
        ints.data_ptr(),
        floats.shape[1],
        token_ids.data_ptr(),
    )
    return token_ids


def logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num: int, normalize: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (token ids int64 and values float32 `[n, 1 + num]`, ranks int64 `[n]`) of logits `[n, V]` float32. The
    twin, `entries` in `worker/sampling/logprobs.py`, describes them.
    """
    assert (
        logits.dtype == torch.float32
        and logits.stride(1) == 1
        and token_ids.dtype == torch.int64
        and token_ids.is_contiguous()
        and num <= logits.shape[1]
    )
    n = len(logits)
    ids, values, ranks = (
        torch.empty(n, 1 + num, dtype=torch.int64),
        torch.empty(n, 1 + num),
        torch.empty(n, dtype=torch.int64),
    )
    KERNELS.lib.quire_logprobs(
        logits.data_ptr(),
        logits.stride(0),
        *logits.shape,
        token_ids.data_ptr(),
        num,
        normalize,
        ids.data_ptr(),
        values.data_ptr(),
        ranks.data_ptr(),
    )
    return ids, values, ranks
