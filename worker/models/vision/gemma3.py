"""Gemma 3: squares of an image through SigLIP, averages of neighbours to one embedding."""

from __future__ import annotations

from dataclasses import replace
from math import isqrt
from typing import Any

import torch

from quire.worker.layers.linear import PLAIN_WEIGHTS, ColumnParallelLinear, Part, Shard, WeightFormat
from quire.worker.layers.norm import OffsetRMSNorm
from quire.worker.layers.views import transposed
from quire.worker.models.vision.siglip import SIGLIP, VisionTransformer
from quire.worker.spec.vision import VisionSpec, read_image_token_id
from quire.worker.transformer.vision.layers import named
from quire.worker.transformer.vision.tower import VisionTower

_PROJECTOR = "multi_modal_projector"


class _Projection(ColumnParallelLinear):
    """The checkpoint holds the matrix as `[in, out]`."""

    def __init__(self, in_features: int, out_features: int, weights: WeightFormat):
        name = f"{_PROJECTOR}.mm_input_projection_weight"
        super().__init__(in_features, [Shard(name, out_features, 0, out_features)], False, weights.linear(name))

    def weight_parts(self) -> list[Part]:
        return [Part(self.shards[0].prefix, (self.in_features, self.out_features), view=transposed)]


class Gemma3Tower(VisionTower):
    """`pixel_values` of an image is `[1 + crops, 3, image_size, image_size]`, the whole image first."""

    prefixes = ("vision_tower.", "multi_modal_projector.")

    @classmethod
    def read_spec(cls, architecture: str, config: dict[str, Any]) -> VisionSpec:
        token_id = read_image_token_id({"image_token_index": 262144} | config)
        return replace(VisionSpec(architecture, config, token_id), bidirectional=True)

    def __init__(self, config: dict[str, Any], weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(config, weights)
        vision = SIGLIP | config["vision_config"]
        self.encoder = VisionTransformer(vision, weights, final_norm=True)
        per_side = isqrt(config.get("mm_tokens_per_image", 256))
        if self.encoder.side % per_side:
            raise ValueError(
                f"mm_tokens_per_image {per_side**2} is not supported: its root does not divide the {self.encoder.side} "
                "patches of a side"
            )
        self.pool = self.encoder.side // per_side
        self.patches_per_embed = self.pool**2
        self.norm = named(
            OffsetRMSNorm(vision["hidden_size"], vision["layer_norm_eps"]), f"{_PROJECTOR}.mm_soft_emb_norm"
        )
        self.projection = _Projection(vision["hidden_size"], config["text_config"]["hidden_size"], weights)

    def encode(self, images: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
        squares = [len(image["pixel_values"]) for image in images]
        features = self.encoder(torch.cat([image["pixel_values"] for image in images]))
        batch, side = len(features), self.encoder.side // self.pool
        pooled = features.view(batch, side, self.pool, side, self.pool, -1).mean((2, 4)).flatten(0, 2)
        return list(self.projection(self.norm(pooled)).split([count * side * side for count in squares]))
