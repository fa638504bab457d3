"""Inputs of products that also exist in 8 bits: the operation that feeds a product (a norm, an activation) rounds its
result in the same pass and attaches the rounded form, which the product reads.

The tensor itself stays whole, for everything else that reads it. A tensor made from it (some of its rows) has no
rounding attached, and the product rounds it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

LARGEST = 448.0  # e4m3
LEAST_ROWS = 17  # with fewer, products keep their inputs whole: they wait for the weights


@dataclass(frozen=True, slots=True)
class Rounding:
    """The form of a product's inputs: e4m3 with a float32 scale per row and `group` columns; None: per row."""

    group: int | None = None


@dataclass(frozen=True, slots=True)
class Rounded:
    """x `[T, k]` as values e4m3 `[T, k]` times scales float32 `[T, groups]`."""

    values: torch.Tensor
    scales: torch.Tensor
    rounding: Rounding


def attach(x: torch.Tensor, rounded: Rounded) -> torch.Tensor:
    """Attach the rounded form to x, and return x."""
    x.rounded = rounded
    return x


def attached(x: torch.Tensor, rounding: Rounding) -> Rounded | None:
    """Return the form of x attached for `rounding`, or None."""
    found = getattr(x, "rounded", None)
    return found if found is not None and found.rounding == rounding else None


def round_rows(x: torch.Tensor, rounding: Rounding) -> Rounded:
    """Round x `[T, k]`; k is a multiple of the group. A group of zeros has the scale 0."""
    groups = x.float().unflatten(1, (-1, rounding.group or x.shape[1]))
    largest = groups.abs().amax(2, keepdim=True)
    most = torch.full_like(largest, LARGEST)  # dividing by a Python number may multiply by its inverse
    inverse = torch.where(largest < 1e-30, 0.0, most / largest)
    values = (groups * inverse).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).flatten(1)
    return Rounded(values, (largest / most).squeeze(2), rounding)
