"""Latent attention (`layers/mla.py`) by kernels for Hopper: FlashMLA (https://github.com/deepseek-ai/FlashMLA) for
decoding, or FlashAttention 3, whose argument `qv` takes the part of the queries that multiplies the values.

Triton computes the rest of such a model's attention: its expanded form and cases that FlashMLA lacks.
"""

from __future__ import annotations

import importlib
import inspect
from types import ModuleType
from typing import Any, ClassVar

import torch

from quire.worker.attention.base import AttentionCall, AttentionMetadata, AttentionSpec, is_latent, try_once
from quire.worker.cuda.requirements import no_half_on_gpu
from quire.worker.cuda.triton_backend import TritonPagedBackend

_SIZES = (576, 512)  # entries of a latent and of its values, for which both are built


class _LatentBackend(TritonPagedBackend):
    """Common base: each imports a package, and tries it once because packages are built for some GPUs only."""

    module_name: ClassVar[str]
    function: ClassVar[str]
    arguments: ClassVar[frozenset[str]]  # required parameters of the function

    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        if not spec.latent and not spec.expanded:
            return "serves latent attention (MLA) only"
        if spec.device.type != "cuda":
            return "needs a GPU"
        if reason := cls.misfit(spec) if spec.latent else None:
            return reason
        try:
            module = importlib.import_module(cls.module_name)
        except ImportError as error:
            return f"{cls.module_name} cannot be imported ({error})"
        if missing := cls.arguments - _arguments(module, cls.function):
            return f"{cls.module_name}.{cls.function} does not take {', '.join(sorted(missing))}"
        return try_once(cls(), spec) if spec.latent else super().supports(spec)

    @classmethod
    def misfit(cls, spec: AttentionSpec) -> str | None:
        """Return why the package cannot serve the absorbed form, or None."""
        if reason := no_half_on_gpu(spec):
            return reason
        if (spec.head_dim, spec.v_dim) != _SIZES:
            return f"has kernels for latents of {_SIZES} entries only, not {(spec.head_dim, spec.v_dim)}"
        if spec.uses_soft_cap or spec.uses_sliding_window or spec.uses_sinks or spec.kv_scales:
            return "has no window, soft cap, sinks or 8-bit cache"
        return None

    def __init__(self) -> None:
        self._module: ModuleType = importlib.import_module(self.module_name)


def _arguments(module: ModuleType, name: str) -> set[str]:
    """Return names of the parameters of a function of `module`; empty if it does not have that function."""
    function = getattr(module, name, None)
    return set(inspect.signature(function).parameters) if function else set()


class FlashMLA(_LatentBackend):
    """Decoding by FlashMLA; pages of 64 tokens. Steps with longer queries are Triton's."""

    name = "flash_mla"
    module_name = "flash_mla"
    function = "flash_mla_with_kvcache"
    arguments = frozenset(
        [
            "q",
            "k_cache",
            "block_table",
            "cache_seqlens",
            "head_dim_v",
            "tile_scheduler_metadata",
            "num_splits",
            "softmax_scale",
            "causal",
        ]
    )
    default_block_size = 64

    @classmethod
    def misfit(cls, spec: AttentionSpec) -> str | None:
        if spec.block_size not in (None, cls.default_block_size):
            return f"needs a block size of {cls.default_block_size}, not {spec.block_size}"
        return super().misfit(spec)

    def build(self, meta: AttentionMetadata) -> None:
        meta.extra = {}  # number of heads -> how the work is distributed: it depends on the lengths only

    def attend(self, call: AttentionCall) -> torch.Tensor:
        q, k_cache, v_cache, meta = call.q, call.k_cache, call.v_cache, call.meta
        if meta.max_query_len > 1 or not is_latent(k_cache, v_cache):
            return super().attend(call)
        out, _ = self._module.flash_mla_with_kvcache(
            q.unsqueeze(1),  # one query per request
            k_cache,
            meta.block_table,
            meta.seq_lens,
            v_cache.shape[3],
            *self._distribution(meta, q.shape[1]),
            softmax_scale=call.scale,
            causal=True,
        )
        return out.squeeze(1)

    def _distribution(self, meta: AttentionMetadata, num_heads: int) -> Any:
        """Return (tile scheduler metadata, number of splits) of this step."""
        if num_heads not in meta.extra:
            # the queries of all heads share the one KV head
            meta.extra[num_heads] = self._module.get_mla_metadata(meta.seq_lens, num_heads, 1)
        return meta.extra[num_heads]


class FlashAttention3MLA(_LatentBackend):
    """Decoding and chunks of prompts by FlashAttention 3; any page size."""

    name = "flash_attn_3_mla"
    module_name = "flash_attn_interface"
    function = "flash_attn_with_kvcache"
    arguments = frozenset(
        [
            "q",
            "k_cache",
            "v_cache",
            "qv",
            "cache_seqlens",
            "page_table",
            "cu_seqlens_q",
            "max_seqlen_q",
            "softmax_scale",
            "causal",
        ]
    )

    def attend(self, call: AttentionCall) -> torch.Tensor:
        q, k_cache, v_cache, meta = call.q, call.k_cache, call.v_cache, call.meta
        if not is_latent(k_cache, v_cache):
            return super().attend(call)
        rank = v_cache.shape[3]
        return self._module.flash_attn_with_kvcache(
            q=q[..., rank:],
            k_cache=k_cache[..., rank:],
            v_cache=v_cache,
            qv=q[..., :rank],
            cache_seqlens=meta.seq_lens,
            page_table=meta.block_table,
            cu_seqlens_q=meta.query_start_loc,
            max_seqlen_q=meta.max_query_len,
            softmax_scale=call.scale,
            causal=True,
        )
