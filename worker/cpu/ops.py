"""The native CPU kernels as functions of torch tensors. Call them only after `native.KERNELS.lib` is loaded.

Each function has a reference (its "twin") in plain torch: `worker/layers` for the norms, the activation and the rotary
embedding, `F.linear` for PackedLinear, `worker/attention/torch_paged.py` for attention, `worker/sampling/arithmetic.py`
for sampling, `worker/sampling/logprobs.py` for log-probabilities. Results differ from the twins by rounding only: the
kernels compute in float32 and round at the same points.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import addressof, byref, c_long, c_void_p
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from quire.worker.cache.scaled import FP8, KVCache, ScaledLatents, values_of
from quire.worker.cpu.native import (
    KERNELS,
    CompactArgs,
    LayerArgs,
    LinearArgs,
    QkvArgs,
    QuantArgs,
    RoutingArgs,
    ScalesArgs,
)
from quire.worker.platforms import huge_pages

if TYPE_CHECKING:
    from quire.worker.batch.step_tensors import StepTensors
    from quire.worker.transformer.moe_spec import RoutingSpec

_CACHE_TYPES = {torch.int8: 1, FP8: 2}
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
MAX_HEAD_DIM, MAX_V_DIM = 576, 512
# `RoutingSpec.scores` and `.weights`, numbered as in `Routing` in csrc/kernels.h
_SCORES, _WEIGHTS = ("softmax", "sigmoid", "logits"), ("scores", "normalized", "softmax", "sigmoid")
# activations that products of a gate and up may end with, numbered as `Activation` in csrc/gemm.h
GATED = {None: 0, "silu": 1, "gelu_pytorch_tanh": 2, "clamped_silu": 3}


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm (arXiv:1910.07467) over the last dimension of x `[..., H]`, with a weight of x's type or of float32."""
    if x.dim() != 2 or x.stride(1) != 1:
        return rms_norm(x.reshape(-1, x.shape[-1]).contiguous(), weight, eps).view(x.shape)
    out = torch.empty_like(x)
    KERNELS.lib.quire_add_rms_norm(
        x.data_ptr(),
        x.stride(0),
        None,
        0,
        weight.data_ptr(),
        out.data_ptr(),
        out.stride(0),
        x.shape[0],
        x.shape[1],
        eps,
        _DTYPES[x.dtype],
        weight.dtype != x.dtype,
    )
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add x to residual in place and return (RMSNorm of the sum, residual). x and residual are `[T, H]`."""
    out = torch.empty_like(x)
    KERNELS.lib.quire_add_rms_norm(
        x.data_ptr(),
        x.stride(0),
        residual.data_ptr(),
        residual.stride(0),
        weight.data_ptr(),
        out.data_ptr(),
        out.stride(0),
        x.shape[0],
        x.shape[1],
        eps,
        _DTYPES[x.dtype],
        weight.dtype != x.dtype,
    )
    return out, residual


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` for x = [gate, up] concatenated: `[T, 2 D] -> [T, D]` (SwiGLU, arXiv:2002.05202)."""
    width = x.shape[1] // 2
    out = x.new_empty(x.shape[0], width)
    KERNELS.lib.quire_silu_and_mul(
        x.data_ptr(), x.stride(0), out.data_ptr(), width, x.shape[0], width, _DTYPES[x.dtype]
    )
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
    """The C struct of `qk_norm_rope_write`'s arguments, for rows of qkv of type `dtype` that are `row_stride` elements
    apart.

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
        _DTYPES[dtype],
        q_weight is not None and q_weight.dtype != dtype,
        eps,
        _cache_type(k_cache),
        _scales_args(k_cache),
        _scales_args(v_cache),
    )


def _cache_type(cache: KVCache) -> int:
    """The `CacheType` in csrc/eight_bits.h."""
    return 0 if isinstance(cache, torch.Tensor) else _CACHE_TYPES[cache.values.dtype]


def _scales_args(cache: KVCache) -> ScalesArgs:
    """The scales of keys or of values, if there are any."""
    if isinstance(cache, torch.Tensor):
        return ScalesArgs()
    return ScalesArgs(cache.scales.data_ptr(), *cache.scales.stride())


def routing_args(spec: RoutingSpec, correction: torch.Tensor | None, bias: torch.Tensor | None) -> RoutingArgs:
    """The C struct of `route`'s arguments, for a spec that does not bound groups.

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
    """Same as its twin, `layers.routing.route`, except for the last bits of the weights."""
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
    """None if `paged_attention` supports these sizes of keys and values and this type, else the reason why not."""
    for name, size, most in (("head_dim", head_dim, MAX_HEAD_DIM), ("v_dim", v_dim, MAX_V_DIM)):
        if size % 16 or size > most:
            return f"{name} {size} is not a multiple of 16 up to {most}"
    return None if dtype in _DTYPES else f"no kernel for {dtype}"


def has_amx() -> bool:
    """Whether the loaded library multiplies with AMX."""
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
    """Causal attention of q `[T, num_heads, head_dim]` over the paged cache, for any mixture of decode and prefill.
    `AttentionBackend.forward` describes the arguments and the result.

    Caches are `[num_blocks, block_size, num_kv_heads, _]`, the last dimension contiguous, of q's type (float32,
    bfloat16, float16) or in 8 bits; block_table `[R, K]`, seq_lens `[R]` and query_start_loc `[R + 1]` are int32.
    `path` is a sum of flags: 1 disables AMX (for tests); 2 sums in one fixed order, so that a token's result depends on
    its own keys alone, bit for bit. `wanted` (int64, ascending) lists the tokens whose results the caller reads; the
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
    """The C struct of those arguments of `paged_attention` that stay the same from step to step;
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
        _DTYPES[dtype],
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
    """Same as its twin `Ops.fill_inputs`, in one native call per cache group.

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
    """(token ids int64 and values float32 `[n, 1 + num]`, ranks int64 `[n]`) of logits `[n, V]` float32. The twin,
    `entries` in `worker/sampling/logprobs.py`, describes them.
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


class _NativeLinear:
    """Base class of the library's linear layers.

    A subclass passes `_bind` the library's function for its kind of weight (`run`) and the weight argument of that
    function (`pointer`).
    """

    paths = (0, 1, 2, 3)  # values of `path` that a call accepts

    def __init__(self, shape: tuple[int, int], gated: str | None) -> None:
        self._n, self.in_features = shape
        if gated and self._n % 2:
            raise ValueError(f"a weight of {self._n} rows is no stack of gate and up")
        self.lib, self.flags = KERNELS.lib, GATED[gated] << 1
        self.out_features = self._n // 2 if gated else self._n
        self.columns = self.lib.quire_gemm_packed_columns(self._n, GATED[gated])

    def _bind(self, run: Callable[..., None], pointer: Any, bias: torch.Tensor | None) -> None:
        self.bias = None if bias is None else _packed_bias(bias, self.columns, self.flags > 0)
        self._run, self._pointers = run, (pointer, None if self.bias is None else self.bias.data_ptr())

    def __call__(
        self,
        x: torch.Tensor,
        dtype: torch.dtype = torch.bfloat16,
        path: int = 0,
        workspace: huge_pages.Workspace | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Multiply x `[..., k]` bfloat16: returns `[..., n]` of `dtype` (bfloat16 or float32), allocated in `workspace`
        (of the same type) if one is given, or writes it to `out` `[T, n]`.

        `path` forces one algorithm: bfloat16 weights take 1 (float vectors) or 3 (the same algorithm for any number of
        rows); quantized weights take 1 (integers without AMX), 2 (integers with AMX) or 3 (the algorithm for many
        rows).
        """
        assert path in self.paths
        rows = x if x.dim() == 2 else x.reshape(-1, self.in_features)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        if out is None:
            shape = rows.shape[0], self.out_features
            out = torch.empty(shape, dtype=dtype) if workspace is None else workspace.take(*shape)
        self._run(
            rows.data_ptr(),
            rows.stride(0),
            *self._pointers,
            out.data_ptr(),
            out.stride(0),
            rows.shape[0],
            self._n,
            self.in_features,
            self.flags | (dtype is torch.float32),
            path,
        )
        return out if x.dim() == 2 else out.view(*x.shape[:-1], self.out_features)

    def _rows(self, take: Callable[..., None], ids: torch.Tensor) -> torch.Tensor:
        assert not self.flags, "rows of gate and up are interleaved"
        ids, out = ids.long(), torch.empty(ids.shape[0], self.in_features, dtype=torch.bfloat16)
        take(self._pointers[0], ids.data_ptr(), ids.shape[0], out.data_ptr(), self.in_features, self.in_features)
        return out


class PackedLinear(_NativeLinear):
    """Computes x W^T + bias with a bfloat16 weight `[n, k]`, packed once so that a product of any number of rows reads
    it sequentially. The caller may free the original.

    The sum over k is float32 in one fixed order, so a row's result depends neither on the other rows nor on the
    threads. Exception: without AMX, a compact weight is multiplied in fixed point (csrc/gemm_fixed.h) from 6 rows on
    (AVX2: 9; float32 outputs: 33); path 3 forces the fixed order. With `gated`, a key of GATED, the weight is [gate,
    up] stacked and the result is e.g. `silu(gate) * up` `[.., n / 2]`, computed in float32 and then rounded.

    With `compact` each weight is stored losslessly in 12 bits instead of 16 (csrc/compact.h) if its exponents allow it.

    Raises:
        ValueError: the weight is not bfloat16, or has an odd number of rows with `gated`.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, gated: str | None = None, compact: bool = True
    ) -> None:
        if weight.dtype != torch.bfloat16:
            raise ValueError(f"PackedLinear takes a bfloat16 weight, not {weight.dtype}")
        super().__init__(tuple(weight.shape), gated)
        weight = weight if weight.stride(1) == 1 else weight.contiguous()
        self.compact = _Compact.of(weight, self.columns, gated) if compact else None
        if self.compact is not None:
            self.packed, self.paths = self.compact.data, (0, 3)
            return self._bind(self.lib.quire_gemm_run_compact, byref(self.compact.args), bias)
        n, k = weight.shape
        self.packed = huge_pages.zeros(self.columns * (-(-k // 32) * 32), dtype=torch.bfloat16)
        self.lib.quire_gemm_pack(weight.data_ptr(), weight.stride(0), self.packed.data_ptr(), n, k, GATED[gated])
        self._bind(self.lib.quire_gemm_run, self.packed.data_ptr(), bias)

    def args(self, path: int = 0) -> LinearArgs:
        """The C struct of this layer, which must outlive the struct."""
        packed, compact = (self._pointers[0], None) if self.compact is None else (None, addressof(self.compact.args))
        bias = self._pointers[1]
        return LinearArgs(packed, None, compact, bias, self._n, self.in_features, self.flags >> 1, path, None)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows `ids` `[T]` of the original weight: `[T, k]`. Lets an embedding share the packed head."""
        return self._rows(self.lib.quire_gemm_unpack_rows if self.compact is None else self.lib.quire_compact_rows, ids)


class _Compact:
    """Owns the memory of a packed weight in 12 bits, to which `args` points."""

    # Upper limit: at 1 / 64 their list takes 1/12 of the memory, and putting them in place a tenth of the time.
    _EXCEPTIONS_PER_WEIGHT = 1 / 64

    def __init__(self, columns: int, k: int) -> None:
        blocks, self.steps = columns // 32, -(-k // 32)
        self.num_weights = blocks * self.steps * 1024
        self.data = huge_pages.zeros(self.num_weights // 4 * 3, dtype=torch.uint16)
        self.exceptions = torch.empty(int(self.num_weights * self._EXCEPTIONS_PER_WEIGHT) + 1, dtype=torch.uint64)
        self.first = torch.empty(blocks, dtype=torch.uint32)
        self.scales = torch.empty(blocks, dtype=torch.float32)
        self.units = torch.empty(columns * -(-k // 256), dtype=torch.uint8)

    @classmethod
    def of(cls, weight: torch.Tensor, columns: int, gated: str | None) -> _Compact | None:
        """The weight in 12 bits, or None if it has too many different exponents."""
        (n, k), self = weight.shape, cls(columns, weight.shape[1])
        count = KERNELS.lib.quire_gemm_compact(
            weight.data_ptr(),
            weight.stride(0),
            self.data.data_ptr(),
            self.exceptions.data_ptr(),
            self.first.data_ptr(),
            self.scales.data_ptr(),
            self.units.data_ptr(),
            n,
            k,
            GATED[gated],
            len(self.exceptions) - 1,
        )
        if count < 0:
            return None
        self.exceptions = self.exceptions[: count + 1].clone()
        self.args = CompactArgs(
            self.data.data_ptr(),
            self.exceptions.data_ptr(),
            self.first.data_ptr(),
            self.scales.data_ptr(),
            self.steps,
            self.units.data_ptr(),
        )
        return self


@dataclass(frozen=True, slots=True)
class QuantKind:
    """How a quantized weight is stored: `number` in csrc/quant.h, bits per value, columns per scale (0: any of the
    supported numbers), bytes of the scales of 32 rows by `per` columns if they are not a table of numbers, and whether
    there is a table of offsets.
    """

    number: int
    bits: int
    group: int = 0
    scale_bytes: int = 0
    per: int = 1
    offsets: bool = False


_INTEGERS = {4: QuantKind(0, 4), 8: QuantKind(1, 8)}
_E2M1 = QuantKind(2, 4, 32, 32, 32)
_E4M3 = QuantKind(6, 8)
_Q4_0, _Q8_0 = QuantKind(0, 4, 32), QuantKind(1, 8, 32)
# types of GGUF files: `Layout` in csrc/pack_blocks.cpp, and the kind
PACKED_BLOCKS = {
    "Q4_0": (0, _Q4_0),
    "Q8_0": (1, _Q8_0),
    "Q4_K": (2, QuantKind(3, 4, 32, 512, 256)),
    "Q5_K": (3, QuantKind(4, 5, 32, 512, 256)),
    "Q6_K": (4, QuantKind(5, 6, 16, 576, 256)),
    "MXFP4": (5, _E2M1),
    "Q4_1": (6, QuantKind(7, 4, 32, offsets=True)),
    "Q5_0": (7, QuantKind(8, 5, 32)),
    "Q5_1": (8, QuantKind(9, 5, 32, offsets=True)),
    "IQ4_NL": (9, QuantKind(10, 4, 32)),
    "IQ4_XS": (10, QuantKind(13, 4, 32, 256, 256)),
    "Q2_K": (11, QuantKind(11, 2, 16, 640, 256)),
    "Q3_K": (12, QuantKind(12, 3, 16, 448, 256)),
}


class QuantizedLinear(_NativeLinear):
    """Computes x W^T + bias for a weight of 2 to 8 bits with one scale per row and group of columns: weight = scale * q
    + offset. Activations are bfloat16.

    Few rows are multiplied as integers: x becomes 16-bit integers with one scale per at most 256 columns, which is
    finer than bfloat16. With AMX more than 32 rows are multiplied in bfloat16; without AMX 96 rows and more are
    multiplied in fixed point. With `narrow` x becomes 8-bit integers where vector units multiply: without AMX, for any
    number of rows, so that a row's result does not depend on the others. Weights of 8-bit floats ignore it. Build one
    with `quantize` from a bfloat16 weight, with `from_values` from a quantized checkpoint, or with `from_blocks` from
    the blocks of a GGUF file. `rows` and `gated` are as in PackedLinear.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        kind: QuantKind,
        group: int,
        bias: torch.Tensor | None,
        gated: str | None,
        has_offsets: bool,
        scale_type: torch.dtype = torch.bfloat16,
        narrow: bool = False,
    ) -> None:
        super().__init__(shape, gated)
        self.bits, steps = kind.bits, -(-self.in_features // 64)
        self.narrow = narrow
        self.group = group if group > 0 else -(-steps // 4) * 256
        if not kind.group and not self.supports(self.group):
            raise ValueError(
                f"group size {group} is not supported: 32, 64, 128, a multiple of 256, or -1 for one scale per row"
            )
        groups = -(-steps * 64 // self.group)
        self.packed = huge_pages.zeros(self.columns * steps * 8 * kind.bits, dtype=torch.uint8)
        if kind.scale_bytes:
            size, scale_type = self.columns // 32 * -(-steps * 64 // kind.per) * kind.scale_bytes, torch.uint8
        else:
            size = self.columns * groups
        self.scales = torch.zeros(size, dtype=scale_type)
        self.offsets = torch.zeros_like(self.scales) if has_offsets else None
        self._args = QuantArgs(
            self.packed.data_ptr(),
            self.scales.data_ptr(),
            None if self.offsets is None else self.offsets.data_ptr(),
            kind.number,
            self.group,
            groups,
            steps,
            scale_type is torch.float16,
            narrow,
        )
        self._bind(self.lib.quire_gemm_run_quant, byref(self._args), bias)

    @staticmethod
    def supports(group: int, num_groups: int = 2) -> bool:
        """Whether there are kernels for groups of this size, or for a single group."""
        return num_groups == 1 or group in (32, 64, 128) or group % 256 == 0

    @classmethod
    def quantize(
        cls,
        weight: torch.Tensor,
        bits: int,
        group: int = 64,
        bias: torch.Tensor | None = None,
        gated: str | None = None,
        narrow: bool = False,
    ) -> QuantizedLinear:
        """Quantize a bfloat16 weight `[n, k]` symmetrically. Each group's scale minimizes the squared error (4 bits) or
        follows from the largest entry (8 bits).

        Raises:
            ValueError: bits, group or the weight's type are not supported.
        """
        if weight.dtype != torch.bfloat16:
            raise ValueError(f"only bfloat16 weights can be quantized, not {weight.dtype}")
        linear = cls(tuple(weight.shape), _integers(bits), group, bias, gated, has_offsets=False, narrow=narrow)
        weight = weight if weight.stride(1) == 1 else weight.contiguous()
        linear.lib.quire_quantize(
            weight.data_ptr(),
            weight.stride(0),
            linear.packed.data_ptr(),
            linear.scales.data_ptr(),
            *weight.shape,
            bits,
            linear.group,
            GATED[gated],
        )
        return linear

    @classmethod
    def from_values(
        cls,
        values: torch.Tensor,
        scales: torch.Tensor,
        offsets: torch.Tensor | None,
        bits: int,
        group: int,
        bias: torch.Tensor | None = None,
        gated: str | None = None,
        narrow: bool = False,
    ) -> QuantizedLinear:
        """Pack a quantized weight: weight = scale * value + offset.

        values are int8 `[n, k]` (-8 .. 7 for 4 bits); scales and offsets are `[n, ceil(k / group)]` and are rounded to
        float16, or to bfloat16 if float16 has not their range. Or values are float8_e4m3fn, without offsets; then the
        scales stay float32.

        Raises:
            ValueError: bits or group are not supported, or the shapes do not match.
        """
        if values.dtype == torch.float8_e4m3fn:
            values, stored, scale_type, narrow = values.view(torch.int8), _E4M3, torch.float32, False
        else:
            stored, scale_type = _integers(bits), _type_of_scales(scales, offsets)
        linear = cls(tuple(values.shape), stored, group, bias, gated, offsets is not None, scale_type, narrow)
        if scales.shape != (len(values), -(-values.shape[1] // linear.group)) or (
            offsets is not None and offsets.shape != scales.shape
        ):
            raise ValueError(
                f"scales of shape {tuple(scales.shape)} do not fit values of shape {tuple(values.shape)} in "
                f"groups of {group}"
            )
        values, scales = values.contiguous(), scales.float().contiguous()
        offsets = None if offsets is None else offsets.float().contiguous()
        linear.lib.quire_pack_quantized(
            values.data_ptr(),
            scales.data_ptr(),
            None if offsets is None else offsets.data_ptr(),
            byref(linear._args),
            *values.shape,
            GATED[gated],
        )
        return linear

    @property
    def is_bytes(self) -> bool:
        """Whether the weight is scale * integer of 8 bits, multiplied by activations of 16 bits."""
        return self._args.kind == _INTEGERS[8].number and self.offsets is None and not self.narrow

    @property
    def parts(self) -> list[QuantizedLinear]:
        """As of a `MixedLinear`: only itself."""
        return [self]

    @classmethod
    def from_blocks(
        cls,
        parts: Sequence[torch.Tensor],
        kind: str,
        shape: tuple[int, int],
        bias: torch.Tensor | None = None,
        gated: str | None = None,
        narrow: bool = False,
    ) -> QuantizedLinear:
        """Pack a weight `shape` from the blocks of a GGUF file, uint8 `[rows, bytes]` of each part, in the type `kind`,
        a key of PACKED_BLOCKS. Rows that are missing are zero.
        """
        layout, stored = PACKED_BLOCKS[kind]
        linear = cls(shape, stored, stored.group, bias, gated, stored.offsets, torch.float16, narrow)
        assert all(part.is_contiguous() for part in parts)
        pointers, lengths = (c_void_p * len(parts))(*(part.data_ptr() for part in parts)), (c_long * len(parts))()
        lengths[:] = [len(part) for part in parts]
        numbers = len(parts), layout, byref(linear._args), *shape, GATED[gated]
        linear.lib.quire_pack_blocks(pointers, lengths, *numbers)
        return linear

    def args(self, path: int = 0, next: LinearArgs | None = None) -> LinearArgs:
        """The C struct of this layer, which must outlive the struct, as must `next`, the columns after these."""
        return LinearArgs(
            None,
            addressof(self._args),
            None,
            self._pointers[1],
            self._n,
            self.in_features,
            self.flags >> 1,
            path,
            None if next is None else addressof(next),
        )

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows `ids` `[T]` of the dequantized weight: `[T, k]` bfloat16."""
        return self._rows(self.lib.quire_quant_rows, ids)


class MixedLinear:
    """Linear layers of weights of different kinds, whose outputs are concatenated, e.g. q, k and v."""

    def __init__(self, parts: Sequence[QuantizedLinear]) -> None:
        self.parts, self.in_features = list(parts), parts[0].in_features
        self._chains: dict[int, list[LinearArgs]] = {}
        self.out_features = sum(part.out_features for part in parts)

    def __call__(
        self,
        x: torch.Tensor,
        dtype: torch.dtype = torch.bfloat16,
        path: int = 0,
        workspace: huge_pages.Workspace | None = None,
    ) -> torch.Tensor:
        """Like `QuantizedLinear`, of rows `[T, k]`."""
        shape, start = (len(x), self.out_features), 0
        out = torch.empty(shape, dtype=dtype) if workspace is None else workspace.take(*shape)
        for part in self.parts:
            part(x, dtype, path, out=out[:, start : start + part.out_features])
            start += part.out_features
        return out

    def args(self, path: int = 0) -> LinearArgs:
        """The C struct of the first part, which refers to the others. This object must outlive it."""
        if path not in self._chains:
            chain = self._chains[path] = []
            for part in reversed(self.parts):
                chain.append(part.args(path, chain[-1] if chain else None))
        return self._chains[path][-1]


def _integers(bits: int) -> QuantKind:
    if bits not in _INTEGERS:
        raise ValueError(f"weights of {bits} bits are not supported, only of 4 and 8")
    return _INTEGERS[bits]


def _type_of_scales(scales: torch.Tensor, offsets: torch.Tensor | None) -> torch.dtype:
    """float16, which has more digits, unless that would lose large numbers, or small ones of another type."""
    sizes = scales.float().abs()
    largest = sizes.max() if offsets is None else torch.maximum(sizes.max(), offsets.abs().max())
    small = scales.dtype != torch.float16 and bool(((sizes > 0) & (sizes < 2**-14)).any())
    return torch.bfloat16 if small or largest > 65504 else torch.float16


def _packed_bias(bias: torch.Tensor, columns: int, gated: bool) -> torch.Tensor:
    """The bias in float32, padded; if `gated` in the packed order: 16 of the gate, 16 of up, and so on."""
    if not gated:
        return torch.nn.functional.pad(bias.float(), (0, columns - len(bias)))
    halves = bias.float().view(2, -1)
    halves = torch.nn.functional.pad(halves, (0, columns // 2 - halves.shape[1]))
    return halves.view(2, -1, 16).transpose(0, 1).reshape(-1).contiguous()
