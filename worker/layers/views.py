"""Rearrangements of a checkpoint's tensor on its way into a parameter (`linear.Part.view`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import torch

View = Callable[[torch.Tensor], torch.Tensor]


class RowOrder:
    """Base of the views that only reorder rows."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class RotaryRows(RowOrder):
    """Reorders the rows of each head of q or k so that a rotary embedding becomes the one of `layers/rotary.py`, which
    rotates entry i of all `head_dim` with entry i + head_dim / 2: first all first entries of the rotated pairs and half
    of the entries that are not rotated, then the others. q @ k does not depend on the order.

    E.g. head_dim 8, rotary_dim 4, interleaved: [0, 2, 4, 5, 1, 3, 6, 7].
    """

    head_dim: int
    rotary_dim: int
    interleaved: bool

    def order(self) -> list[int]:
        """Return the old row of each new one."""
        rotated, kept = list(range(self.rotary_dim)), list(range(self.rotary_dim, self.head_dim))
        half = self.rotary_dim // 2
        first, second = (rotated[::2], rotated[1::2]) if self.interleaved else (rotated[:half], rotated[half:])
        middle = len(kept) // 2
        return first + kept[:middle] + second + kept[middle:]

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        heads = tensor.unflatten(0, (-1, self.head_dim))
        return heads[:, torch.tensor(self.order(), device=tensor.device)].flatten(0, 1)


def rotary_rows(head_dim: int, rotary_dim: int, interleaved: bool) -> RotaryRows | None:
    """Return the view of the rows of q and k, or None if they are in order."""
    return RotaryRows(head_dim, rotary_dim, interleaved) if interleaved or rotary_dim != head_dim else None


@dataclass(frozen=True, slots=True)
class HeadHalves(RowOrder):
    """Reorders rows that hold two vectors per head: all first vectors, rearranged by `of_first`, then all second ones.
    """

    head_dim: int
    of_first: View | None = None

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        first, second = (half.flatten(0, 1) for half in tensor.unflatten(0, (-1, 2, self.head_dim)).unbind(1))
        return torch.cat([self.of_first(first) if self.of_first else first, second])


def chain(*views: View | None) -> View | None:
    """Return the composition of `views`, the first applied first; None if there is none."""
    present = [view for view in views if view]
    if len(present) < 2:
        return present[0] if present else None
    return lambda tensor: reduce(lambda value, view: view(value), present, tensor)


def columns(view: View | None) -> View | None:
    """Return `view` of the columns of a matrix instead of its rows."""
    return chain(transposed, view, transposed) if view else None


def plus_one(tensor: torch.Tensor) -> torch.Tensor:
    """Return 1 + w in float32, of norms that store w: adding in 16 bits would round the factor."""
    return tensor.float() + 1


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    """Transpose `[in, out]` to `[out, in]`."""
    return tensor.transpose(-2, -1)


def to_device(values: Sequence, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return `values` of the host, numbers or rows of numbers, as a tensor on `device`. The host does not wait: the
    copy to a GPU is from pinned memory, which torch reuses only after the copy has run.
    """
    pinned = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return pinned.to(device, non_blocking=True)
