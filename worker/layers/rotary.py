"""Rotary position embeddings (https://arxiv.org/abs/2104.09864) in the half-split layout of Hugging Face transformers:
entry i is rotated with entry i + D/2.

Scaled variants: linear (positions divided by a factor), llama3 (low frequencies divided, high frequencies kept,
interpolated between them), yarn (https://arxiv.org/abs/2309.00071), longrope (a factor per frequency), dynamic (a
larger base), proportional (only the high frequencies of all rotate). cos and sin are tabulated in float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn


class RotaryEmbedding(nn.Module):
    """A table of cos and sin, shared by layers: `cos_sin_cache [max_positions, D]` float32, cos in the first half of a
    row, sin in the second.

    The first `rotary_dim` / 2 pairs rotate; the others, whose angle is 0, keep their values (`views.RotaryRows` orders
    the entries of a head in this way). `query_scale` `[max_positions]`, or None, holds factors of q. `axes` holds the
    axis of each rotated pair, for models whose positions have three axes.
    """

    def __init__(
        self,
        head_dim: int,
        max_positions: int,
        theta: float,
        scaling: dict[str, Any] | None,
        rotary_dim: int | None = None,
        axes: Sequence[int] = (),
    ):
        super().__init__()
        inv_freq, magnitude = inverse_frequencies(rotary_dim or head_dim, theta, scaling, max_positions)
        self.num_kept, self.magnitude = head_dim // 2 - len(inv_freq), magnitude
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("cos_sin_cache", self._tabulated(inv_freq, max_positions), persistent=False)
        self.register_buffer("query_scale", _query_scale(max_positions, scaling), persistent=False)
        padded = [*axes, *[0] * self.num_kept]
        doubled = torch.tensor(padded * 2, dtype=torch.int64) if axes else None  # for cos and sin
        self.register_buffer("axes", doubled, persistent=False)

    def _tabulated(self, inv_freq: torch.Tensor, max_positions: int) -> torch.Tensor:
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32, device=inv_freq.device), inv_freq)
        kept = 0, self.num_kept  # pairs that do not rotate
        cos, sin = F.pad(angles.cos() * self.magnitude, kept, value=1.0), F.pad(angles.sin() * self.magnitude, kept)
        return torch.cat((cos, sin), -1)

    def scale_frequencies(self, factors: torch.Tensor) -> None:
        """Tabulate anew, with the frequencies times `factors`, one per pair that rotates, in the same memory."""
        self.cos_sin_cache.copy_(self._tabulated(self.inv_freq * factors, len(self.cos_sin_cache)))

    def forward(self, positions: torch.Tensor) -> Rotation:
        """Return the rotation of tokens at `positions` `[T]`, or `[3, T]` on three axes (time, row, column)."""
        if positions.dim() == 2:
            cos_sin = self.cos_sin_cache.gather(0, positions[self.axes].T)
            return Rotation(cos_sin, torch.arange(len(cos_sin), device=positions.device))
        scale = None if self.query_scale is None else self.query_scale[positions]
        return Rotation(self.cos_sin_cache, positions, scale)


def _query_scale(max_positions: int, scaling: dict[str, Any] | None) -> torch.Tensor | None:
    """Return the factor of queries at each position, which grows with the logarithm of the position (Ministral 3)."""
    beta = (scaling or {}).get("llama_4_scaling_beta")
    if not beta:
        return None
    positions = torch.arange(max_positions, dtype=torch.float32)
    return 1 + beta * torch.log1p((positions / scaling["original_max_position_embeddings"]).floor())


def still_query_scale(max_positions: int, slope: float, step: float) -> torch.Tensor:
    """Return the factor of queries at each position, in layers without rotary embedding (Llama 4), float32
    `[max_positions]`.
    """
    positions = torch.arange(max_positions, dtype=torch.float32)
    return 1 + slope * torch.log1p(((positions + 1) / step).floor())


class Rotation(NamedTuple):
    """The rotary embedding of a step's tokens in some layers."""

    cos_sin: torch.Tensor  # `RotaryEmbedding.cos_sin_cache`
    positions: torch.Tensor  # [T] int64: rows of cos_sin
    query_scale: torch.Tensor | None = None  # [T] float32, factor of q


def apply_rotary(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate x `[T, heads, D]` by the angles of `cos_sin_cache[positions]`, `[T, D]`.

    Computes in float32 and returns x's dtype.
    """
    cos, sin = cos_sin.unsqueeze(1).chunk(2, -1)
    first, second = x.float().chunk(2, -1)
    halves = (first * cos).sub_(second * sin), (second * cos).add_(first * sin)
    return torch.cat(halves, -1).to(x.dtype)


def inverse_frequencies(
    rotary_dim: int, theta: float, scaling: dict[str, Any] | None, max_positions: int = 0
) -> tuple[torch.Tensor, float]:
    """Return `(inv_freq [R] float32, magnitude)`: the angle per position of each rotated pair, and the factor of cos
    and sin.

    `scaling` is `RopeSpec.scaling`. The scaling that other implementations choose by the length of a sequence
    (longrope, dynamic) depends on `max_positions`: keys in the cache are never rotated again.
    """
    inv_freq = 1.0 / theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)
    match (scaling or {}).get("rope_type"):
        case None:
            return inv_freq, 1.0
        case "linear":
            return inv_freq / scaling["factor"], 1.0
        case "llama3":
            return _llama3(inv_freq, scaling), 1.0
        case "proportional":
            return inv_freq[: int(scaling["partial_rotary_factor"] * rotary_dim) // 2] / scaling.get("factor", 1.0), 1.0
        case "longrope":
            return _longrope(inv_freq, scaling, max_positions)
        case "dynamic":
            return _dynamic(rotary_dim, theta, scaling, max_positions), 1.0
    assert scaling["rope_type"] == "yarn", scaling  # quire.worker.spec.rope rejects all others
    return _yarn(inv_freq, rotary_dim, theta, scaling), _yarn_magnitude(scaling)


def _longrope(inv_freq: torch.Tensor, scaling: dict[str, Any], max_positions: int) -> tuple[torch.Tensor, float]:
    """Divide each frequency by a factor of its own (https://arxiv.org/abs/2402.13753): the long ones if positions may
    exceed the original context.
    """
    original = scaling["original_max_position_embeddings"]
    factors = scaling["long_factor" if max_positions > original else "short_factor"]
    magnitude, factor = scaling.get("attention_factor"), scaling["factor"]
    if magnitude is None:
        magnitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return inv_freq / torch.tensor(factors, dtype=torch.float32), float(magnitude)


def _dynamic(rotary_dim: int, theta: float, scaling: dict[str, Any], max_positions: int) -> torch.Tensor:
    """Stretch the base by `alpha` or, without it, by as much as `max_positions` exceed the original context."""
    stretch = scaling.get("alpha")
    if not stretch:
        ratio = max(max_positions / scaling["original_max_position_embeddings"], 1.0)
        stretch = scaling["factor"] * ratio - (scaling["factor"] - 1)
    base = theta * stretch ** (rotary_dim / (rotary_dim - 2))
    return 1.0 / base ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)


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
