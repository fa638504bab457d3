"""The vision encoder of LFM2-VL: SigLIP 2 for images of any shape, whose learned positions are stretched, and several
patches to an embedding.
"""

from __future__ import annotations

from math import isqrt
from typing import Any

import torch
import torch.nn.functional as F

from quire.worker.layers.linear import PLAIN_WEIGHTS, WeightFormat
from quire.worker.layers.norm import LayerNorm
from quire.worker.spec.vision import VisionSpec, read_image_token_id
from quire.worker.transformer.vision.layers import Encoder, EncoderSpec, activation, linear, merge_patches, named, table
from quire.worker.transformer.vision.tower import VisionTower

_DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_patches": 256,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
_TOWER, _PROJECTOR = "vision_tower", "multi_modal_projector"


class Lfm2VLTower(VisionTower):
    """`pixel_values` of an image is `[T, patch * patch * 3]`, patch by patch of each of its K parts; `grids` `[K, 2]`
    has the rows and columns of patches of each part.
    """

    prefixes = (f"{_TOWER}.", f"{_PROJECTOR}.")

    @classmethod
    def read_spec(cls, architecture: str, config: dict[str, Any]) -> VisionSpec:
        return VisionSpec(architecture, config, read_image_token_id({"image_token_id": 396} | config))

    def __init__(self, config: dict[str, Any], weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(config, weights)
        vision = _DEFAULTS | config["vision_config"]
        size, self.merge = vision["hidden_size"], config.get("downsample_factor", 2)
        self.patches_per_embed, self.side = self.merge**2, isqrt(vision["num_patches"])
        spec = EncoderSpec.read(vision)
        patch = 3 * vision["patch_size"] ** 2
        self.patch_embedding = linear(patch, size, f"{_TOWER}.embeddings.patch_embedding", weights)
        self.positions = table(f"{_TOWER}.embeddings.position_embedding.weight", self.side**2, size)
        self.encoder = Encoder(spec, f"{_TOWER}.encoder.layers", weights)
        self.final_norm = named(LayerNorm(size, spec.eps), f"{_TOWER}.post_layernorm")
        joined, bias = size * self.merge**2, config.get("projector_bias", True)
        inner, out = config.get("projector_hidden_size", 2560), config["text_config"]["hidden_size"]
        self.norm = None
        if config.get("projector_use_layernorm", True):
            self.norm = named(LayerNorm(joined, 1e-5), f"{_PROJECTOR}.layer_norm")
        self.linear_1 = linear(joined, inner, f"{_PROJECTOR}.linear_1", weights, bias)
        self.linear_2 = linear(inner, out, f"{_PROJECTOR}.linear_2", weights, bias)
        self.activate = activation(config.get("projector_hidden_act", "gelu"))

    def encode(self, images: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
        grids = [tuple(grid) for image in images for grid in image["grids"].tolist()]
        lengths = [rows * columns for rows, columns in grids]
        x = self.patch_embedding(torch.cat([image["pixel_values"] for image in images]).to(self.positions.dtype))
        x = x + torch.cat([self._positions(*grid) for grid in grids])
        x = self.final_norm(self.encoder(x, lengths))
        parts = [part.view(1, *grid, -1) for part, grid in zip(x.split(lengths), grids)]
        x = torch.cat([merge_patches(part, self.merge)[0] for part in parts])
        x = x if self.norm is None else self.norm(x)
        x = self.linear_2(self.activate(self.linear_1(x)))
        return list(x.split([len(image["pixel_values"]) // self.merge**2 for image in images]))

    def _positions(self, rows: int, columns: int) -> torch.Tensor:
        """Return the embeddings of the positions of a grid: those of the square that was learned, stretched or shrunk.
        """
        learned = self.positions.float().view(1, self.side, self.side, -1).permute(0, 3, 1, 2)
        stretched = F.interpolate(learned, (rows, columns), mode="bilinear", align_corners=False, antialias=True)
        return stretched[0].permute(1, 2, 0).flatten(0, 1).to(self.positions.dtype)
