"""RMSNorm (https://arxiv.org/abs/1910.07467), rounded as in Hugging Face transformers: normalise in float32, round,
then scale.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from quire.worker.platforms.ops import Ops


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Scale x `[..., D]` to root mean square 1 over the last dimension and multiply by weight `[D]`."""
    x32 = x.float()
    return weight * (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `(rms_norm(x + residual), x + residual)`. The kernels overwrite `residual` with the sum."""
    residual = x + residual
    return rms_norm(residual, weight, eps), residual


class RMSNorm(nn.Module):
    """`norm(x)`, or `norm.add(x, residual)` to normalise the sum."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.rms_norm, self.add_rms_norm = rms_norm, add_rms_norm

    def use(self, ops: Ops) -> None:
        """Switch to a platform's operations."""
        self.rms_norm, self.add_rms_norm = ops.rms_norm, ops.add_rms_norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the norm of `x + residual`, and `x + residual`, which may overwrite `residual`."""
        return self.add_rms_norm(x, residual, self.weight, self.eps)
