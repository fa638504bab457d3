"""Aya Vision and Command A Vision: tiles of an image through SigLIP, neighbours joined to one embedding."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from quire.worker.layers.linear import PLAIN_WEIGHTS, WeightFormat
from quire.worker.layers.norm import LayerNorm
from quire.worker.models.vision.llava import make_transformer
from quire.worker.transformer.reader import text_part
from quire.worker.transformer.vision.layers import linear, merge_patches, named
from quire.worker.transformer.vision.tower import VisionTower

_PROJECTOR = "multi_modal_projector"


class AyaVisionTower(VisionTower):
    """`pixel_values` of an image is `[tiles, 3, image_size, image_size]`."""

    prefixes = ("vision_tower.", f"{_PROJECTOR}.")
    normed: ClassVar[bool] = True  # joined features have a norm, instead of those of single patches

    def __init__(self, config: dict[str, Any], weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(config, weights)
        self.encoder = make_transformer(config, weights, -1, strategy="full", final_norm=not self.normed)
        self.merge = config.get("downsample_factor", 2)
        if self.encoder.side % self.merge:
            raise ValueError(
                f"downsample_factor {self.merge} is not supported: it does not divide the {self.encoder.side} patches "
                "of a side"
            )
        self.patches_per_embed = self.merge**2
        joined, size = self.encoder.hidden_size * self.merge**2, text_part(config)["hidden_size"]
        inner = config.get("alignment_intermediate_size", self.default_inner(size))
        eps = config.get("adapter_layer_norm_eps", 1e-6)
        self.norm = named(LayerNorm(joined, eps), f"{_PROJECTOR}.layernorm") if self.normed else None
        self.linear_1 = linear(joined, inner, f"{_PROJECTOR}.linear_1", weights)
        self.linear_2 = linear(inner // 2, size, f"{_PROJECTOR}.linear_2", weights)

    @classmethod
    def default_inner(cls, hidden_size: int) -> int:
        """Return the rows of the first matrix of the projector where config.json does not say."""
        return hidden_size

    def encode(self, images: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
        tiles = [len(image["pixel_values"]) for image in images]
        features = self.encoder(torch.cat([image["pixel_values"] for image in images]))
        joined = merge_patches(features.unflatten(1, (self.encoder.side, -1)), self.merge)
        rows = joined.flatten(0, 1)
        values, gate = self.linear_1(rows if self.norm is None else self.norm(rows)).chunk(2, -1)
        embeddings = self.linear_2(F.silu(gate) * values)
        return list(embeddings.split([count * joined.shape[1] for count in tiles]))


class Cohere2VisionTower(AyaVisionTower):
    normed = False

    @classmethod
    def default_inner(cls, hidden_size: int) -> int:
        return 36864
