"""The activations of the MLP."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
import torch.nn.functional as F


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Return `silu(gate) * up` for x = [gate, up] concatenated: `[..., 2 D] -> [..., D]` (SwiGLU,
    https://arxiv.org/abs/2002.05202).
    """
    gate, up = x.chunk(2, -1)
    return F.silu(gate).mul_(up)


def clamped_silu_and_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return the activation of gpt-oss (https://arxiv.org/abs/2508.10925): a steeper SiLU, inputs bounded by 7, and up
    + 1.
    """
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1.0)


def _halves(activation: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: activation(*x.chunk(2, -1))


# functions of [gate, up] concatenated: `[..., 2 D] -> [..., D]`
GATED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": silu_and_mul,
    "gelu_pytorch_tanh": _halves(lambda gate, up: F.gelu(gate, approximate="tanh") * up),
    "gelu": _halves(lambda gate, up: F.gelu(gate) * up),
    "clamped_silu": _halves(clamped_silu_and_mul),
}


def silu_of_bounded(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    """Return SwiGLU of inputs bounded by `limit` (GLM-5-next)."""
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def bounded_silu(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    """Return SwiGLU whose factors are bounded by `limit` (Step 3.5)."""
    return F.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)


def softly_bounded_silu(gate: torch.Tensor, up: torch.Tensor, limit: float, up_limit: float) -> torch.Tensor:
    """Return SwiGLU whose linear factors approach `limit` and `up_limit`, in float32 (Inkling 2)."""
    wide = gate.float()
    bounded = (wide / limit).tanh() * limit * wide.sigmoid() * (up.float() / up_limit).tanh() * up_limit
    return bounded.to(gate.dtype)


# names of forms with bounds, e.g. "bounded_silu:7"
BOUNDED = {
    "silu_of_bounded": silu_of_bounded,
    "bounded_silu": bounded_silu,
    "softly_bounded_silu": softly_bounded_silu,
}


@cache
def gated(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the activation `name`: a key of GATED or, with bounds after colons, of BOUNDED."""
    form, *limits = name.split(":")
    if not limits:
        return GATED[name]
    bounds = [float(limit) for limit in limits]
    return _halves(lambda gate, up: BOUNDED[form](gate, up, *bounds))


def relu2(x: torch.Tensor) -> torch.Tensor:
    """Return relu(x)^2 (https://arxiv.org/abs/2109.08668)."""
    return F.relu(x).square()


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """Return the approximation of GELU in CLIP (https://arxiv.org/abs/1606.08415, section 2)."""
    return x * torch.sigmoid(1.702 * x)


# those of GATED that a `LinearMethod` may apply together with its product
FUSED = ("silu", "gelu_pytorch_tanh", "clamped_silu")


# functions of one projection, by the names in config.json
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "quick_gelu": quick_gelu,
    "relu": F.relu,
    "relu2": relu2,
}
