"""The embeddings of images among a step's tokens, as the decoder takes them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ImageEmbeds:
    """N placeholders among the tokens of a step, and their rows of the result of `VisionTower.encode`."""

    rows: torch.Tensor  # [N] int64, ascending
    values: torch.Tensor  # [N, H * (1 + len(deep))]
    deep: tuple[int, ...] = ()  # `VisionSpec.deep`

    def write(self, x: torch.Tensor) -> None:
        """Replace the embeddings of the placeholders in x `[T, H]`."""
        x[self.rows] = self.values[:, : x.shape[1]].to(x.dtype)

    def add_deep(self, x: torch.Tensor, layer: int) -> None:
        """Add the part of decoder layer `layer`, if there is one, to its output x `[T, H]`."""
        if layer in self.deep:
            start = x.shape[1] * (1 + self.deep.index(layer))
            x.index_add_(0, self.rows, self.values[:, start : start + x.shape[1]].to(x.dtype))
