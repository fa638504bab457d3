"""Rotary position embeddings (https://arxiv.org/abs/2104.09864) in the half-split layout of Hugging Face transformers:
entry i is rotated with entry i + D/2.

Scaled variants: linear (positions divided by a factor), llama3 (low frequencies divided, high frequencies kept,
interpolated between them), yarn (https://arxiv.org/abs/2309.00071). cos and sin are tabulated in float32.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn


class RotaryEmbedding(nn.Module):
    """The table of cos and sin, shared by all layers: `cos_sin_cache [max_positions, D]` float32, cos in the first half
    of a row, sin in the second.
    """

    def __init__(self, head_dim: int, max_positions: int, theta: float, scaling: dict[str, Any] | None):
        super().__init__()
        inv_freq, magnitude = inverse_frequencies(head_dim, theta, scaling)
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), inv_freq)
        self.register_buffer(
            "cos_sin_cache", torch.cat((angles.cos() * magnitude, angles.sin() * magnitude), -1), persistent=False
        )


def apply_rotary(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate x `[T, heads, D]` by the angles of `cos_sin_cache[positions]`, `[T, D]`.

    Computes in float32 and returns x's dtype.
    """
    cos, sin = cos_sin.unsqueeze(1).chunk(2, -1)
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def inverse_frequencies(head_dim: int, theta: float, scaling: dict[str, Any] | None) -> tuple[torch.Tensor, float]:
    """Return `(inv_freq [D/2] float32, magnitude)`: the angle per position of each pair, and the factor of cos and sin.

    `scaling` is `ModelSpec.rope_scaling`.
    """
    inv_freq = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if scaling is None:
        return inv_freq, 1.0
    if scaling["rope_type"] == "linear":
        return inv_freq / scaling["factor"], 1.0
    if scaling["rope_type"] == "llama3":
        return _llama3(inv_freq, scaling), 1.0
    assert scaling["rope_type"] == "yarn", scaling  # quire.worker.models.config rejects all others
    return _yarn(inv_freq, head_dim, theta, scaling), _yarn_magnitude(scaling)


def _llama3(inv_freq: torch.Tensor, scaling: dict[str, Any]) -> torch.Tensor:
    """Stretch wavelengths above `original / low_freq_factor` positions by `factor`, and keep those below `original /
    high_freq_factor`.
    """
    # rotations within the original context
    rotations = scaling["original_max_position_embeddings"] * inv_freq / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept = ((rotations - low) / (high - low)).clamp(0, 1)
    return inv_freq * (kept + (1 - kept) / scaling["factor"])


def _yarn(inv_freq: torch.Tensor, head_dim: int, theta: float, scaling: dict[str, Any]) -> torch.Tensor:
    """Keep pairs that rotate more than `beta_fast` times in the original context, and stretch pairs that rotate fewer
    than `beta_slow` times by `factor`.
    """

    def pair_with(rotations: float) -> float:  # index of the pair with this number of rotations
        return (
            head_dim
            * math.log(scaling["original_max_position_embeddings"] / (rotations * 2 * math.pi))
            / (2 * math.log(theta))
        )

    low, high = pair_with(scaling.get("beta_fast") or 32), pair_with(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    stretched = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    return inv_freq * (1 - stretched) + inv_freq / scaling["factor"] * stretched


def _yarn_magnitude(scaling: dict[str, Any]) -> float:
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])

    def term(mscale: float) -> float:
        return 0.1 * mscale * math.log(scaling["factor"]) + 1.0 if scaling["factor"] > 1 else 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return term(scaling["mscale"]) / term(scaling["mscale_all_dim"])
    return term(1.0)
