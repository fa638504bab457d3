"""Idefics 3 and SmolVLM: tiles of an image and the whole image through SigLIP, several patches to an embedding."""

from __future__ import annotations

from typing import Any

import torch

from quire.worker.layers.linear import PLAIN_WEIGHTS, WeightFormat
from quire.worker.models.vision.siglip import SIGLIP, VisionTransformer
from quire.worker.transformer.vision.layers import linear, merge_patches
from quire.worker.transformer.vision.tower import VisionTower

_DEFAULTS = SIGLIP | {"hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32}


def buckets(side: int) -> torch.Tensor:
    """Return the index of the position's embedding of each of `side` patches in a row.

    A patch is looked up by its fraction of the row in float32, so that rounding may give neighbours the same index.
    """
    boundaries = torch.arange(1 / side, 1.0, 1 / side)
    fractions = torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor(side))
    return torch.bucketize(fractions.clamp(max=1.0 - 1e-6), boundaries, right=True)


class _Encoder(VisionTransformer):
    def __init__(self, vision: dict[str, Any], weights: WeightFormat):
        super().__init__(vision, weights, "model.vision_model", final_norm=True)
        with torch.device("cpu"):
            index = buckets(self.side)
        self.position_ids = (index[:, None] * self.side + index).flatten().tolist()

    def embed_positions(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.positions[torch.tensor(self.position_ids, device=x.device)]


class Idefics3Tower(VisionTower):
    """`pixel_values` of an image is `[tiles, 3, image_size, image_size]`, the whole image last."""

    prefixes = ("model.vision_model.", "model.connector.")

    def __init__(self, config: dict[str, Any], weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(config, weights)
        self.encoder, self.merge = _Encoder(_DEFAULTS | config["vision_config"], weights), config.get("scale_factor", 2)
        self.patches_per_embed = self.merge**2
        size = self.encoder.hidden_size * self.merge**2
        name = "model.connector.modality_projection.proj"
        self.projection = linear(size, config["text_config"]["hidden_size"], name, weights, bias=False)

    def encode(self, images: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
        tiles = [len(image["pixel_values"]) for image in images]
        features = self.encoder(torch.cat([image["pixel_values"] for image in images]))
        merged = merge_patches(features.unflatten(1, (self.encoder.side, -1)), self.merge)
        return list(self.projection(merged.flatten(0, 1)).split([count * merged.shape[1] for count in tiles]))
