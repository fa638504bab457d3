"""What every attention backend has in common: one call, one KV layout, one way to say why it does not apply.

KV layout, for all backends: `k_cache` and `v_cache` of shape `[num_blocks, block_size, num_kv_heads, head_dim]`,
`head_dim` contiguous; within a block the heads follow each other slot by slot, on CPU the slots head by head. Block 0
is the null block: padding rows write to slot 0 and read from it, so no kernel needs a `-1` branch. A slot is `block_id
* block_size + offset`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

NativeRequests = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]  # block table, lengths, starts, path


@dataclass(slots=True)
class AttentionMetadata:
    """The facts of one step that attention needs, on the device. R requests, T tokens, K block table entries per
    request.

    The tokens of request i are rows `query_start_loc[i] : query_start_loc[i + 1]` of q, k and v; they are the last ones
    of its `seq_lens[i]` tokens.
    """

    backend: AttentionBackend
    slot_mapping: torch.Tensor  # [T] int64: where each token's k and v go
    query_start_loc: torch.Tensor  # [R + 1] int32
    seq_lens: torch.Tensor  # [R] int32, this step's tokens included
    block_table: torch.Tensor  # [R, K] int32
    max_query_len: int
    max_seq_len: int
    extra: Any = None  # what the backend computed once for all layers of this step


GroupedMetadata = tuple[AttentionMetadata, ...]  # per cache group, which differ in slot_mapping and block_table


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What a model asks of attention; the same for all its layers but for the window, which is the layer's."""

    num_heads: int  # of this rank
    num_kv_heads: int  # of this rank
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    block_size: int | None = None  # None: the backend's own choice
    uses_sliding_window: bool = False
    uses_soft_cap: bool = False


class AttentionBackend(ABC):
    """One implementation of paged varlen attention. Stateless between steps."""

    name: str
    default_block_size: int = 16
    graph_safe: bool = False  # may run inside a captured CUDA graph

    @classmethod
    @abstractmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        """None if this backend can serve `spec`, else the reason it cannot, for the log."""

    @abstractmethod
    def build(self, meta: AttentionMetadata) -> None:
        """Fill `meta.extra` once per step."""

    def native_requests(self, meta: AttentionMetadata, head_dim: int, dtype: torch.dtype) -> NativeRequests | None:
        """Where `forward` is `cpu_ops.paged_attention`: its arguments that are the same in every layer, so that native
        code may call the kernel itself. Else None.
        """
        return None

    def write_kv(
        self, k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Store k and v `[T, num_kv_heads, head_dim]` into their slots."""
        block, offset = slot_mapping // k_cache.shape[1], slot_mapping % k_cache.shape[1]
        k_cache[block, offset], v_cache[block, offset] = k, v

    @abstractmethod
    def forward(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        meta: AttentionMetadata,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
    ) -> torch.Tensor:
        """Causal attention of q `[T, num_heads, head_dim]` over the paged cache, which already holds this step's k and
        v. Returns the shape of q.

        With `sliding_window` w a token at position p sees positions p - w + 1 .. p (Hugging Face's meaning). `soft_cap`
        c replaces a score s by c * tanh(s / c).
        """


def try_once(backend: AttentionBackend, spec: AttentionSpec) -> str | None:
    """Run `backend` on a tiny mixed batch and on a decode batch as `spec` asks. Returns the first line of its error, if
    any: libraries are built for some head sizes, GPUs and features only, and say so best themselves. A kernel that
    fails only while it runs is waited for.
    """
    size = spec.block_size or backend.default_block_size
    device = spec.device
    cache = torch.zeros(2, 3, size, spec.num_kv_heads, spec.head_dim, dtype=spec.dtype, device=device)
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
            backend.forward(
                q,
                cache[0],
                cache[1],
                meta,
                1.0,
                1 if spec.uses_sliding_window else None,
                1.0 if spec.uses_soft_cap else None,
            )
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except Exception as error:  # whatever a library raises is the reason it is passed over
            return (
                f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
            )
    return None
