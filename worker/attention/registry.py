"""The attention backends by name, and the selection of one for a model and a device."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from quire.worker.attention.base import AttentionBackend, AttentionSpec

BACKENDS = {
    "cpu_native": "quire.worker.cpu.attention:CpuNativeAttention",
    "cpu_fixed": "quire.worker.cpu.fixed_order_attention:CpuFixedAttention",
    "cpu_paged": "quire.worker.attention.torch_paged:CpuPagedAttention",
    "flash_attn_3": "quire.worker.cuda.flash_attn:FlashAttention3",
    "flash_attn_4": "quire.worker.cuda.flash_attn_4:FlashAttention4",
    "flash_attn_2": "quire.worker.cuda.flash_attn:FlashAttention2",
    "flash_mla": "quire.worker.cuda.flash_mla:FlashMLA",
    "flash_attn_3_mla": "quire.worker.cuda.flash_mla:FlashAttention3MLA",
    "torch_varlen": "quire.worker.cuda.varlen:TorchVarlenAttention",
    "triton_paged": "quire.worker.cuda.triton_backend:TritonPagedBackend",
    "triton_fixed": "quire.worker.cuda.triton_backend:TritonFixedBackend",
}


@dataclass(frozen=True, slots=True)
class Selection:
    """The selected backend, its block size, and why each backend before it was rejected."""

    backend: AttentionBackend
    block_size: int
    rejected: dict[str, str]

    @property
    def reason(self) -> str:
        """Return the rejected backends with reasons, for the log."""
        if not self.rejected:
            return "preferred on this device"
        return "; ".join(f"{name}: {reason}" for name, reason in self.rejected.items())


def select_backend(order: tuple[str, ...], specs: Sequence[AttentionSpec], forced: str | None = None) -> Selection:
    """Select the first backend of `order` that supports all `specs`, or `forced`.

    Raises ValueError, with all reasons, if there is none.
    """
    if forced is not None and forced not in BACKENDS:
        raise ValueError(f"--attention-backend is {forced!r}, but must be one of {', '.join(sorted(BACKENDS))}")
    rejected: dict[str, str] = {}
    for name in (forced,) if forced else order:
        module_name, _, class_name = BACKENDS[name].partition(":")
        backend_cls: type[AttentionBackend] = getattr(importlib.import_module(module_name), class_name)
        block_size = next((spec.block_size for spec in specs if spec.block_size), backend_cls.default_block_size)
        reasons = (_refusal(backend_cls, replace(spec, block_size=block_size)) for spec in specs)
        reason = next((reason for reason in reasons if reason is not None), None)
        if reason is None:
            return Selection(backend_cls(), block_size, rejected)
        rejected[name] = reason
    reasons = "; ".join(f"{name}: {reason}" for name, reason in rejected.items())
    if forced:
        raise ValueError(f"--attention-backend cannot be used: {reasons}")
    raise ValueError(f"no attention backend supports this model on this device: {reasons}")


def _refusal(backend: type[AttentionBackend], spec: AttentionSpec) -> str | None:
    """Return why a backend cannot serve `spec`, or None."""
    if spec.uses_bias and not backend.takes_bias:
        return "has no bias of scores by distance"
    return backend.supports(spec)
