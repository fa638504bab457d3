"""Requirements that backends for GPUs share."""

from __future__ import annotations

import torch

from quire.worker.attention.base import AttentionSpec


def no_half_on_gpu(spec: AttentionSpec) -> str | None:
    """Return why a backend for 16-bit numbers on GPUs cannot serve `spec`, or None."""
    if spec.device.type != "cuda":
        return "needs a GPU"
    if spec.dtype not in (torch.bfloat16, torch.float16):
        return f"computes in bfloat16 and float16 only, not {str(spec.dtype).removeprefix('torch.')}"
    return None
