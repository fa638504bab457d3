"""Normalisation: RMSNorm (https://arxiv.org/abs/1910.07467) and LayerNorm (https://arxiv.org/abs/1607.06450), rounded
as in Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from quire.worker.layers.layer_ops import LayerOps
from quire.worker.layers.rounding import Rounding
from quire.worker.layers.rowwise import rsqrt
from quire.worker.layers.views import View, plus_one


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Scale x `[..., D]` to root mean square 1 over the last dimension and multiply by weight `[D]`, if there is one.

    Computes in float32 and rounds to x's dtype before a weight of that dtype, after a float32 weight.
    """
    x32 = x.float()
    scale = rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    # in place where it is a copy: on a CPU new memory costs as much as the product
    normed = x32 * scale if x32 is x else x32.mul_(scale)
    if weight is None or weight.dtype == x.dtype:
        return normed.to(x.dtype) if weight is None else normed.to(x.dtype).mul_(weight)
    return normed.mul_(weight).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `(rms_norm(x + residual), x + residual)`. The kernels overwrite `residual` with the sum."""
    residual = x + residual
    return rms_norm(residual, weight, eps), residual


def norm_weight(size: int, view: View | None = None, *, wide: bool = False) -> nn.Parameter:
    """Return an uninitialised weight `[size]`, of float32 if `wide`, that `view` makes of the checkpoint's tensor."""
    weight = nn.Parameter(torch.empty(size, dtype=torch.float32 if wide else None), requires_grad=False)
    weight.view_of_tensor = view
    weight.dummy_mean = 0.0 if view is plus_one else 1.0
    return weight


class RMSNorm(nn.Module):
    """`norm(x)`, or `norm.add(x, residual)` to normalise the sum. Rounds before it multiplies by the weight."""

    wide = False  # whether the weight is float32 in a 16-bit model
    view: View | None = None  # from the checkpoint's tensor to the weight

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = norm_weight(size, self.view, wide=self.wide)
        self.rms_norm, self.add_rms_norm = rms_norm, add_rms_norm

    def use(self, ops: LayerOps) -> None:
        """Switch to a platform's operations."""
        self.rms_norm, self.add_rms_norm = ops.rms_norm, ops.add_rms_norm

    def round_for(self, rounding: Rounding) -> None:
        """Attach also the result in 8 bits, for a product that takes it. The platform's operations must support it."""
        self.rms_norm = partial(self.rms_norm, rounding=rounding)
        self.add_rms_norm = partial(self.add_rms_norm, rounding=rounding)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the norm of `x + residual`, and `x + residual`, which may overwrite `residual`."""
        return self.add_rms_norm(x, residual, self.weight, self.eps)


class WideRMSNorm(RMSNorm):
    """Multiplies by the weight in float32 and rounds once."""

    wide = True


class OffsetRMSNorm(WideRMSNorm):
    """A `WideRMSNorm` whose checkpoint holds the weight minus 1."""

    view = staticmethod(plus_one)


class LayerNorm(nn.Module):
    """Subtracts the mean and divides by the standard deviation, in float32; the calls are those of `RMSNorm`.

    With `offset` the checkpoint holds the weight minus 1.
    """

    def __init__(self, size: int, eps: float, bias: bool = True, offset: bool = False):
        super().__init__()
        self.eps = eps
        self.view: View | None = plus_one if offset else None
        self.weight = norm_weight(size, self.view, wide=True)
        self.bias = norm_weight(size, wide=True) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x.float(), self.weight.shape, self.weight, self.bias, self.eps).to(x.dtype)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the norm of `x + residual`, and `x + residual`."""
        residual = x + residual
        return self(residual), residual


Norm = RMSNorm | LayerNorm

# by `ModelSpec.norm`; each takes (size, eps)
NORMS: dict[str, Callable[[int, float], Norm]] = {
    "rms": RMSNorm,
    "rms_wide": WideRMSNorm,
    "rms_offset": OffsetRMSNorm,
    "layer": partial(LayerNorm, bias=False),
    "layer_bias": LayerNorm,
    "layer_offset_bias": partial(LayerNorm, offset=True),
}
