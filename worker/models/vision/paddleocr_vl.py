"""The vision encoder of PaddleOCR-VL (https://arxiv.org/abs/2510.14528): SigLIP for images of any shape, whose learned
positions are stretched, with a rotary embedding by row and column.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import torch

from quire.worker.layers.linear import PLAIN_WEIGHTS, Part, WeightFormat
from quire.worker.layers.norm import LayerNorm
from quire.worker.models.vision import qwen_vl
from quire.worker.models.vision.qwen_vl import Grid, Merger, QwenVLTower, stretched
from quire.worker.spec.vision import VisionSpec
from quire.worker.transformer.reader import text_part
from quire.worker.transformer.vision.layers import EncoderSpec, named, table

_MODEL, _PROJECTOR = "visual.vision_model", "mlp_AR"


class PatchEmbedding(qwen_vl.PatchEmbedding):
    """The checkpoint holds a convolution over one image."""

    name: ClassVar[str] = f"{_MODEL}.embeddings.patch_embedding"

    def weight_parts(self) -> list[Part]:
        shape = self.out_features, 3, self.patch, self.patch
        return [Part(f"{self.name}.weight", shape, view=partial(torch.flatten, start_dim=1))]


class PaddleOCRVLTower(QwenVLTower):
    prefixes = ("visual.", f"{_PROJECTOR}.")
    blocks = f"{_MODEL}.encoder.layers"
    patch_embedding = PatchEmbedding
    patch_bias = True
    defaults = {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
        "image_size": 384,
        "patch_size": 14,
        "spatial_merge_size": 2,
    }

    @classmethod
    def read_spec(cls, architecture: str, config: dict[str, Any]) -> VisionSpec:
        return super().read_spec(architecture, {"image_token_id": 100295} | config)

    def __init__(self, config: dict[str, Any], weights: WeightFormat = PLAIN_WEIGHTS):
        self.width = text_part(config).get("hidden_size", 1024)  # of the language model
        # the published files name two frames, which no weight has
        super().__init__(config | {"vision_config": config["vision_config"] | {"temporal_patch_size": 1}}, weights)
        size = self.vision["hidden_size"]
        self.side = self.vision["image_size"] // self.vision["patch_size"]
        self.positions = table(f"{_MODEL}.embeddings.position_embedding.weight", self.side**2, size)
        self.final_norm = named(LayerNorm(size, self.vision["layer_norm_eps"]), f"{_MODEL}.post_layernorm")

    @classmethod
    def encoder_spec(cls, vision: dict[str, Any]) -> EncoderSpec:
        return EncoderSpec.read(vision)

    def make_merger(self, spec: EncoderSpec, weights: WeightFormat) -> Merger:
        norm = named(LayerNorm(spec.hidden_size, 1e-5), f"{_PROJECTOR}.pre_norm")
        names = f"{_PROJECTOR}.linear_1", f"{_PROJECTOR}.linear_2"
        return Merger(norm, self.merge**2, self.width, names, spec.hidden_size, weights)

    def embed(self, x: torch.Tensor, cos_sin: torch.Tensor, grids: list[Grid]) -> torch.Tensor:
        positions = [stretched(self.positions, self.side, grid, self.merge, align_corners=False) for grid in grids]
        x = self.encoder(x + torch.cat(positions), qwen_vl.frame_lengths(grids), cos_sin)
        return self.merger(self.final_norm(x))
