"""Functions whose result for an element has the same bits wherever it stands in a tensor.

torch computes the last elements of a tensor, or of a thread's part of it, without vector instructions, and its rsqrt,
sigmoid, silu and softplus give other bits there. The functions here use operations that do not: exp, log1p, sqrt and
reciprocal. Tensors are float32.
"""

from __future__ import annotations

import torch


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return x.neg().exp_().add_(1.0).reciprocal_()


def sigmoid_gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Multiply x `[T, D]` by the sigmoid of `gate`, rounded to its dtype. A platform's form may overwrite x."""
    return x * sigmoid(gate.float()).to(gate.dtype)


def silu(x: torch.Tensor) -> torch.Tensor:
    return sigmoid(x).mul_(x)


def softplus(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 20.0, x, x.exp().log1p())


def rsqrt(x: torch.Tensor) -> torch.Tensor:
    return x.sqrt().reciprocal()


def l2_norm(x: torch.Tensor) -> torch.Tensor:
    """Scale the heads of x `[.., D]` to length 1."""
    return x * rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
