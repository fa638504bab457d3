"""The interface of attention backends: one call, one KV layout, and a reason if a backend does not apply.

KV layout, for all backends: `k_cache` and `v_cache` of shape `[num_blocks, block_size, num_kv_heads, head_dim]`,
`head_dim` contiguous; values may have another `head_dim` than keys. In a latent cache (`layers/mla.py`) there is one KV
head, and `v_cache` is the first columns of `k_cache`. In memory, each slot of a block holds all heads; on
CPU, each head of a block holds all slots. Block 0 is the null block: padding rows write to slot 0 and read from it, so
no kernel needs a `-1` branch. A slot is `block_id * block_size + offset`.

A cache in 8 bits is a `ScaledCache`, values and scales, instead of a tensor (`attention/scaled.py`). For latents,
`k_cache` is `ScaledLatents`, whose values and first scales are also those of `v_cache`. A backend gets one only if
`supports` accepts an `AttentionSpec` with `kv_scales`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from quire.worker.attention.distance_bias import DistanceBias
from quire.worker.attention.scaled import KVCache, ScaledCache, ScaledLatents, store, values_of

NativeRequests = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]  # block table, lengths, starts, path


@dataclass(slots=True)
class AttentionMetadata:
    """Per-step inputs of attention, on the device. R requests, T tokens, K block table entries per request.

    The tokens of request i are rows `query_start_loc[i] : query_start_loc[i + 1]` of q, k and v; they are the last ones
    of its `seq_lens[i]` tokens.
    """

    backend: AttentionBackend
    slot_mapping: torch.Tensor  # [T] int64: slot of each token's k and v
    query_start_loc: torch.Tensor  # [R + 1] int32
    seq_lens: torch.Tensor  # [R] int32, including this step's tokens
    block_table: torch.Tensor  # [R, K] int32
    max_query_len: int
    max_seq_len: int
    extra: Any = None  # data that the backend computes once per step for all layers
    # query_start_loc and seq_lens on the host, None if only the device has them
    host: tuple[list[int], list[int]] | None = None
    latent_parts: Any = None  # how `layers/mla.py` splits this step, for all layers
    choosing: Any = None  # on the first group's: the tokens that choose keys (`layers/sparse/chosen.py`)

    def host_lengths(self) -> tuple[list[int], list[int]]:
        """Return query_start_loc and seq_lens as lists; waits for the device if the host does not have them."""
        return self.host or (self.query_start_loc.tolist(), self.seq_lens.tolist())


@dataclass(slots=True)
class AttentionCall:
    """The attention of one layer in one step.

    With `sliding_window` w a token at position p attends to positions p - w + 1 .. p (as in Hugging Face transformers).
    `soft_cap` c replaces a score s by c * tanh(s / c). `sinks` are scores of one more key per head, whose value is 0.
    """

    q: torch.Tensor  # [T, num_heads, head_dim]
    k_cache: KVCache  # already holds this step's keys, as `v_cache` holds the values
    v_cache: KVCache
    meta: AttentionMetadata
    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: torch.Tensor | None = None  # [num_heads]
    bias: DistanceBias | None = None  # for a backend with `takes_bias`
    out: torch.Tensor | None = None  # [T, num_heads, v_head_dim], which a backend may fill and return


# maps metadata and tensors `[T, ..]` to a result `[T, ..]`
TokenOp = Callable[..., torch.Tensor]
GroupedMetadata = tuple[AttentionMetadata, ...]  # one per cache group; they differ in slot_mapping and block_table


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The requirements on attention of layers of one shape. Their windows may differ."""

    num_heads: int  # for this rank
    num_kv_heads: int  # for this rank
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    block_size: int | None = None  # None: the backend's own choice
    uses_sliding_window: bool = False
    uses_soft_cap: bool = False
    v_head_dim: int | None = None  # None: head_dim
    uses_sinks: bool = False
    uses_bias: bool = False  # see `AttentionCall.bias`
    latent: bool = False  # one KV head, whose values are the first v_head_dim columns of its keys
    expanded: bool = False  # the other form of latent attention: the keys and values of all heads
    kv_dtype: torch.dtype | None = None  # for the cache; None: dtype
    kv_scales: str | None = None  # for a cache in 8 bits: per "token" and head, or constants of the "layer"

    @property
    def v_dim(self) -> int:
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    def no_multiple_of(self, num_tokens: int) -> str | None:
        """Return why a backend whose pages hold a multiple of `num_tokens` tokens cannot serve this, or None."""
        if self.block_size is not None and self.block_size % num_tokens:
            return f"needs a block size that is a multiple of {num_tokens}, not {self.block_size}"
        return None

    def unusual(self) -> str | None:
        """Return why a backend without sinks, with values as wide as keys and without 8-bit caches cannot serve this,
        or None.
        """
        if self.kv_scales:
            return "has no KV cache in 8 bits"
        if self.uses_sinks:
            return "has no attention sinks"
        if self.latent:
            return "has no latent attention (MLA)"
        if self.v_dim != self.head_dim:
            return f"needs values as wide as keys, not {self.v_dim} and {self.head_dim}"
        return None


class AttentionBackend(ABC):
    """One implementation of paged varlen attention. It keeps no state between steps."""

    name: str
    default_block_size: int = 16
    graph_safe: bool = False  # may run inside a captured CUDA graph
    takes_bias: bool = False  # adds a bias by distance to scores

    @classmethod
    @abstractmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        """Return None if this backend can serve `spec`, else the reason why not, for the log."""

    @classmethod
    def workspace(cls, spec: AttentionSpec, num_reqs: int, max_seq_len: int) -> int:
        """Return bytes of temporary memory that one layer of a step of `num_reqs` decoding requests allocates."""
        return 0

    @abstractmethod
    def build(self, meta: AttentionMetadata) -> None:
        """Compute `meta.extra`, once per step."""

    def native_requests(self, meta: AttentionMetadata, head_dim: int, dtype: torch.dtype) -> NativeRequests | None:
        """Return, if `forward` is `cpu_ops.paged_attention`, its arguments that are the same in every layer, so that
        native code can call the kernel itself. Else None.
        """
        return None

    def write_kv(
        self, k: torch.Tensor, v: torch.Tensor, k_cache: KVCache, v_cache: KVCache, slot_mapping: torch.Tensor
    ) -> None:
        """Store k and v `[T, num_kv_heads, head_dim]` in their slots."""
        store(k_cache, slot_mapping, k)
        store(v_cache, slot_mapping, v)

    def forward(
        self,
        q: torch.Tensor,
        k_cache: KVCache,
        v_cache: KVCache,
        meta: AttentionMetadata,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Call `attend` with the fields of a call as arguments."""
        return self.attend(AttentionCall(q, k_cache, v_cache, meta, scale, sliding_window, soft_cap, sinks))

    @abstractmethod
    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Return causal attention over the paged cache, `[T, num_heads, head_dim of v]`."""

    def apart(
        self, op: TokenOp, meta: AttentionMetadata, shape: tuple[int, ...], *tokens: torch.Tensor
    ) -> torch.Tensor:
        """Return `op(meta, *tokens)`, `[T, *shape]` of the type of `tokens[0]`, whose launches depend on the lengths of
        the requests. A recording in pieces ends a piece here.
        """
        return op(meta, *tokens)


class StepBackend(AttentionBackend):
    """Base of backends that are made for one step around `inner`, some of whose results they replace."""

    def __init__(self, inner: AttentionBackend):
        self.inner = inner

    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        return "is made for single steps, around another backend"

    def build(self, meta: AttentionMetadata) -> None:
        self.inner.build(meta)

    def write_kv(
        self, k: torch.Tensor, v: torch.Tensor, k_cache: KVCache, v_cache: KVCache, slot_mapping: torch.Tensor
    ) -> None:
        self.inner.write_kv(k, v, k_cache, v_cache, slot_mapping)


def is_latent(k_cache: KVCache, v_cache: KVCache) -> bool:
    """Return whether the values are columns of the keys."""
    return values_of(k_cache).data_ptr() == values_of(v_cache).data_ptr()


def _tiny_caches(spec: AttentionSpec, block_size: int) -> tuple[KVCache, KVCache]:
    """Return (k_cache, v_cache) of three blocks for `spec`."""
    shape = 3, block_size, spec.num_kv_heads
    k, v = (
        torch.zeros(*shape, dim, dtype=spec.kv_dtype or spec.dtype, device=spec.device)
        for dim in (spec.head_dim, spec.v_dim)
    )
    constant = spec.kv_scales == "layer"
    scales = torch.ones(() if constant else (*shape, 2), device=spec.device).expand(*shape, 2)
    if spec.latent and spec.kv_scales:
        latents = ScaledLatents(k, scales, spec.v_dim, constant)
        return latents, latents.latent
    if spec.kv_scales:
        return ScaledCache(k, scales[..., 0], constant), ScaledCache(v, scales[..., 1], constant)
    return k, k[..., : spec.v_dim] if spec.latent else v


def try_once(backend: AttentionBackend, spec: AttentionSpec) -> str | None:
    """Run `backend` on a tiny mixed batch and on a decode batch with the parameters of `spec`. Returns the first line
    of its error, or None.

    Libraries support only some head sizes, GPUs and features, and their own errors state the reason best. Waits for the
    device, because a kernel may fail only while it runs.
    """
    size = spec.block_size or backend.default_block_size
    device = spec.device
    caches = _tiny_caches(spec, size)
    for query_lens in ([2, 1], [1, 1]):
        starts = torch.tensor([0, query_lens[0], sum(query_lens)], dtype=torch.int32, device=device)
        table = torch.tensor([[1, 2], [2, 1]], dtype=torch.int32, device=device)
        meta = AttentionMetadata(
            backend,
            torch.arange(sum(query_lens), device=device),
            starts,
            starts.new_tensor([2, 2]),
            table,
            max(query_lens),
            2,
        )
        q = torch.zeros(sum(query_lens), spec.num_heads, spec.head_dim, dtype=spec.dtype, device=device)
        try:
            backend.build(meta)
            result = backend.forward(
                q,
                *caches,
                meta,
                scale=1.0,
                sliding_window=1 if spec.uses_sliding_window else None,
                soft_cap=1.0 if spec.uses_soft_cap else None,
                sinks=q.new_zeros(spec.num_heads) if spec.uses_sinks else None,
            )
            result.cpu()
        except Exception as error:  # any exception is a reason to reject the backend
            return (
                f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
            )
    return None
