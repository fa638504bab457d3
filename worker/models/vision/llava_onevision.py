"""Llava-NeXT and Llava-OneVision: the whole image and (OneVision: of a single image) its tiles without their padding,
row by row.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from quire.worker.layers.linear import PLAIN_WEIGHTS, WeightFormat
from quire.worker.models.vision.llava import make_transformer
from quire.worker.transformer.vision.layers import Projector, table
from quire.worker.transformer.vision.tower import VisionTower


class LlavaOnevisionTower(VisionTower):
    """`pixel_values` of an image is `[1 + tiles, 3, image_size, image_size]`, the whole image first.

    With tiles there is `layout` `[6]`: rows and columns of tiles, rows and columns of patches that are padding on each
    side, and rows and columns of the embeddings to which the rest is reduced.
    """

    prefixes = ("vision_tower.", "multi_modal_projector.", "image_newline")
    default_layer: ClassVar[int] = -1
    strategy: ClassVar[str] = "full"

    def __init__(self, config: dict[str, Any], weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(config, weights)
        self.encoder = make_transformer(config, weights, self.default_layer, strategy=self.strategy)
        self.projector = Projector(config, self.encoder.hidden_size, weights)
        self.newline = table("image_newline", config["text_config"]["hidden_size"])

    def encode(self, images: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
        tiles = [len(image["pixel_values"]) for image in images]
        features = self.encoder(torch.cat([image["pixel_values"] for image in images]))
        embeddings = self.projector(features.flatten(0, 1)).view(*features.shape[:2], -1)
        return [self._joined(parts, image.get("layout")) for parts, image in zip(embeddings.split(tiles), images)]

    def _joined(self, parts: torch.Tensor, layout: torch.Tensor | None) -> torch.Tensor:
        """Return the embeddings of one image from those of its parts `[1 + tiles, N, H]`."""
        if layout is None:
            return torch.cat((parts[0], self.newline[None]))
        rows, columns, top, left, height, width = layout.tolist()
        side = self.encoder.side
        grid = parts[1:].view(rows, columns, side, side, -1).transpose(1, 2)
        grid = grid.reshape(rows * side, columns * side, -1)
        grid = grid[top : rows * side - top, left : columns * side - left]
        if grid.shape[:2] != (height, width):
            grid = F.interpolate(grid.permute(2, 0, 1)[None], (height, width), mode="bilinear")[0].permute(1, 2, 0)
        lines = torch.cat((grid, self.newline.expand(height, 1, -1)), 1)
        return torch.cat((parts[0], lines.flatten(0, 1)))


class LlavaNextTower(LlavaOnevisionTower):
    """Every image has tiles, all of whose embeddings are used."""

    default_layer = -2
    strategy = "default"
