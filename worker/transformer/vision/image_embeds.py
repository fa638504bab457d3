"""The embeddings of images among a step's tokens, as the decoder takes them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ImageEmbeds:
    """N placeholders among the tokens of a step, and their rows of the result of `VisionTower.encode`."""

    rows: torch.Tensor  # [N] int64, ascending
    values: torch.Tensor  # [N, H * (1 + num_deep)]

    def write(self, x: torch.Tensor) -> None:
        """Replace the embeddings of the placeholders in x `[T, H]`."""
        x[self.rows] = self.values[:, : x.shape[1]].to(x.dtype)

    def num_deep(self, hidden_size: int) -> int:
        """Return the number of decoder layers that add a part of their own."""
        return self.values.shape[1] // hidden_size - 1

    def add_deep(self, x: torch.Tensor, layer: int) -> None:
        """Add the part of decoder layer `layer`, if there is one, to its output x `[T, H]`."""
        size = x.shape[1]
        if layer < self.num_deep(size):
            start = size * (1 + layer)
            x.index_add_(0, self.rows, self.values[:, start : start + size].to(x.dtype))
