"""What a vision encoder is: features of images in, rows for the language model out."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from quire.worker.layers.linear import PLAIN_WEIGHTS, WeightFormat


class VisionTower(nn.Module):
    """The encoder and the projector of a model that reads images, whole on every rank and in the first stage.

    Its parameters have the checkpoint's names below `prefixes`, or those that a family maps to them.
    """

    # beginnings of the names of the checkpoint's tensors that belong to the tower
    prefixes: ClassVar[tuple[str, ...]]
    # whether the tokens of an image attend to each other in both directions, so that one step computes them all
    bidirectional: ClassVar[bool] = False
    # decoder layers, from the first, that add a part of their own to the hidden states of image tokens (deepstack)
    num_deep: int = 0

    def __init__(self, config: dict[str, Any], weights: WeightFormat = PLAIN_WEIGHTS):
        """`config` is the whole config.json."""
        super().__init__()

    def encode(self, images: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
        """The embeddings of each image, `[num_embeds, hidden_size * (1 + num_deep)]`, from its features."""
        raise NotImplementedError
