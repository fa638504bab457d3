"""FlashAttention 4 over the paged cache: kernels for Hopper and Blackwell in CuTe's language for Python. Its wheel
`flash-attn-4` needs no compiler: kernels are compiled at first use and kept in the cache folder.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from types import ModuleType

import torch

from quire.worker.attention.base import AttentionBackend, AttentionCall, AttentionMetadata, AttentionSpec, try_once
from quire.worker.cuda.install import triton_ops
from quire.worker.cuda.kernels import triton_paged
from quire.worker.cuda.requirements import no_half_on_gpu

_PAGE_LIMIT = 32  # tokens: every tile of keys is larger


class FlashAttention4(AttentionBackend):
    """The package's one entry point serves prompts, chunks and, where Triton does not work, decode steps: it splits no
    keys on Hopper, so that a step of one token per request leaves most of the device idle.

    Pages that are a whole tile of keys are copied with their unused slots, where a NaN of an earlier request would
    reach a new one. Smaller pages are copied token by token, as far as they are filled.
    """

    name = "flash_attn_4"
    graph_safe = True

    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        if reason := no_half_on_gpu(spec) or replace(spec, uses_sinks=False).unusual():
            return reason
        if spec.block_size and spec.block_size > _PAGE_LIMIT:
            return f"takes blocks of at most {_PAGE_LIMIT} tokens, not {spec.block_size}"
        try:
            backend = cls()
        except ImportError as error:
            return f"flash_attn.cute cannot be imported ({error})"
        except Exception as error:  # raised by CUTLASS, which looks for the driver's libraries
            return f"flash_attn.cute cannot be imported ({type(error).__name__}: {error})"
        return _try_library(backend, spec)

    def __init__(self) -> None:
        self._module: ModuleType = importlib.import_module("flash_attn.cute")

    def build(self, meta: AttentionMetadata) -> None:
        pass

    def attend(self, call: AttentionCall) -> torch.Tensor:
        if call.meta.max_query_len == 1 and call.q.device.type == "cuda" and triton_ops(call.q.device) is not None:
            return triton_paged.attend(call)
        return self.library(call)

    def library(self, call: AttentionCall) -> torch.Tensor:
        """Call FlashAttention 4 itself. The block table bounds the keys: lengths change between replays of a graph."""
        meta, left = call.meta, None if call.sliding_window is None else call.sliding_window - 1
        out, _ = self._module.flash_attn_varlen_func(
            call.q,
            call.k_cache,
            call.v_cache,
            cu_seqlens_q=meta.query_start_loc,
            max_seqlen_q=meta.max_query_len,
            seqused_k=meta.seq_lens,
            page_table=meta.block_table,
            softmax_scale=call.scale,
            causal=True,
            window_size=(left, None if left is None else 0),
            learnable_sink=call.sinks,
            softcap=call.soft_cap or 0.0,
        )
        return out


class _Library(FlashAttention4):
    """`FlashAttention4` with every step computed by the library, for the trial."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        return self.library(call)


def _try_library(backend: FlashAttention4, spec: AttentionSpec) -> str | None:
    """Return why the backend cannot serve `spec`: the error of the library or, for decode steps, of Triton."""
    return try_once(_Library(), spec) or try_once(backend, spec)
