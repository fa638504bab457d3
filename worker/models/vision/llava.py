"""Llava: the features of a CLIP, SigLIP or Pixtral encoder through a projector."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from quire.worker.layers.linear import PLAIN_WEIGHTS, WeightFormat
from quire.worker.models.vision.pixtral import PixtralEncoder
from quire.worker.models.vision.siglip import CLIP, SIGLIP, VisionTransformer
from quire.worker.transformer.vision.layers import Projector, num_used_layers
from quire.worker.transformer.vision.tower import VisionTower


def make_transformer(
    config: dict[str, Any],
    weights: WeightFormat,
    default_layer: int,
    *,
    strategy: str | None = None,
    final_norm: bool = False,
) -> VisionTransformer:
    """Return the CLIP or SigLIP encoder of a Llava model. Raises ValueError for another one.

    With `strategy`, the default of `vision_feature_select_strategy`, exactly the patches must be selected.
    """
    kind = config["vision_config"].get("model_type")
    defaults = {"clip_vision_model": CLIP, "siglip_vision_model": SIGLIP}.get(kind)
    if defaults is None:
        raise ValueError(f"vision_config.model_type {kind!r} is not supported: clip_vision_model, siglip_vision_model")
    clip, vision = kind == "clip_vision_model", defaults | config["vision_config"]
    needed, name = "default" if clip else "full", "vision_feature_select_strategy"
    if strategy is not None and (found := config.get(name, strategy)) != needed:
        raise ValueError(f'{name} "{found}" is not supported: a {kind} needs "{needed}"')
    num_layers = num_used_layers(config, vision["num_hidden_layers"], default_layer)
    return VisionTransformer(vision, weights, num_layers=num_layers, clip=clip, final_norm=final_norm)


class LlavaTower(VisionTower):
    """`pixel_values` of an image is `[3, height, width]`."""

    prefixes = ("vision_tower.", "multi_modal_projector.")

    def __init__(self, config: dict[str, Any], weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(config, weights)
        self.pixtral = config["vision_config"].get("model_type") == "pixtral"
        self.encoder: nn.Module = (
            PixtralEncoder({"vision_feature_layer": -2} | config, weights)
            if self.pixtral
            else make_transformer(config, weights, -2)
        )
        self.projector = Projector(config, self.encoder.hidden_size, weights)
        self.drops_class = config.get("vision_feature_select_strategy", "default") == "default"
        if self.drops_class and (self.pixtral or self.encoder.class_embedding is None):
            raise ValueError('vision_feature_select_strategy "default" needs a CLIP encoder; set it to "full"')

    def encode(self, images: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
        pixels = [image["pixel_values"] for image in images]
        if self.pixtral:
            dtype = self.encoder.ln_pre.weight.dtype
            features = [grid.flatten(0, 1) for grid in self.encoder([image.to(dtype) for image in pixels])]
        else:
            features = list(self.encoder(torch.stack(pixels), whole=not self.drops_class))
        return list(self.projector(torch.cat(features)).split([len(image) for image in features]))
