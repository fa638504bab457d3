"""The gated activation of the MLP."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Return `silu(gate) * up` for x = [gate, up] concatenated: `[..., 2 D] -> [..., D]` (SwiGLU,
    https://arxiv.org/abs/2002.05202).
    """
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up
