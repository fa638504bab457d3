"""The entry point of the Triton kernels."""

from __future__ import annotations

import logging
from functools import cache

import torch

from quire.worker.platforms.ops import Ops

logger = logging.getLogger(__name__)


@cache
def triton_ops(device: torch.device) -> Ops | None:
    """Return the operations of the Triton kernels, or None if Triton is missing or cannot compile for `device` (it also
    needs a C compiler). Logs the reason once.
    """
    try:
        from quire.worker.cuda import triton_ops as kernels

        kernels.rms_norm(torch.ones(1, 16, device=device), torch.ones(16, device=device), 1e-6)
        torch.cuda.synchronize(device)
    except Exception as error:  # raised by Triton, by its C compiler or by the driver: use plain torch
        logger.warning("Triton kernels unavailable, using plain torch: %s: %s", type(error).__name__, error)
        return None
    return TritonOps()


class TritonOps(Ops):
    """Triton kernels between the matrix products and for those of experts; everything else is plain torch."""

    name = "triton"

    def __init__(self) -> None:
        from quire.worker.cuda import triton_bitmask, triton_experts, triton_sampler
        from quire.worker.cuda import triton_ops as kernels

        self.fused_sample = triton_sampler.sample
        self.exclude_by_bitmask = triton_bitmask.exclude_by_bitmask
        self.rms_norm, self.add_rms_norm = kernels.rms_norm, kernels.add_rms_norm
        self.fused_experts = triton_experts.fused_experts
        self.silu_and_mul, self.qk_norm_rope_write = kernels.silu_and_mul, kernels.qk_norm_rope_write
