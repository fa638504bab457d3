"""The vision encoder of Qwen3-VL: positions are also embedded, and features of some layers join the hidden states of
the decoder's first layers (deepstack, https://arxiv.org/abs/2406.04334). That of Qwen3.5 has no such features.
"""

from __future__ import annotations

from dataclasses import replace
from math import isqrt
from typing import Any

import torch
from torch import nn

from quire.worker.layers.linear import PLAIN_WEIGHTS, WeightFormat
from quire.worker.layers.norm import LayerNorm
from quire.worker.models.vision.qwen_vl import Grid, Merger, QwenVLTower, frame_lengths, stretched
from quire.worker.spec.vision import VisionSpec
from quire.worker.transformer.vision.layers import EncoderSpec, LayerNames, named, table

_DEFAULTS = {
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": (8, 16, 24),
}


class Qwen3VLTower(QwenVLTower):
    """An embedding has the columns of the final features, then those of each layer in `deepstack_visual_indexes`."""

    defaults = _DEFAULTS
    patch_bias = True

    @classmethod
    def read_spec(cls, architecture: str, config: dict[str, Any]) -> VisionSpec:
        deep = (cls.defaults | config["vision_config"])["deepstack_visual_indexes"]
        return replace(super().read_spec(architecture, config), deep=tuple(range(len(deep))))

    def __init__(self, config: dict[str, Any], weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(config, weights)
        size, places = self.vision["hidden_size"], self.vision["num_position_embeddings"]
        self.side = isqrt(places)
        self.positions = table("visual.pos_embed.weight", places, size)
        self.deep = {layer: i for i, layer in enumerate(self.vision["deepstack_visual_indexes"])}
        names = [f"visual.deepstack_merger_list.{i}" for i in range(len(self.deep))]
        self.deep_mergers = nn.ModuleList([self._merger(name, size * self.merge**2, weights) for name in names])

    @classmethod
    def encoder_spec(cls, vision: dict[str, Any]) -> EncoderSpec:
        return EncoderSpec(
            hidden_size=vision["hidden_size"],
            intermediate_size=vision["intermediate_size"],
            num_layers=vision["depth"],
            num_heads=vision["num_heads"],
            act=vision["hidden_act"],
            eps=1e-6,
            names=LayerNames("norm1", "attn", ("qkv",), "proj", "norm2", ("mlp.linear_fc1",), "mlp.linear_fc2"),
        )

    def make_merger(self, spec: EncoderSpec, weights: WeightFormat) -> Merger:
        return self._merger("visual.merger", spec.hidden_size, weights)

    def _merger(self, name: str, normed: int, weights: WeightFormat) -> Merger:
        names = f"{name}.linear_fc1", f"{name}.linear_fc2"
        norm = named(LayerNorm(normed, 1e-6), f"{name}.norm")
        return Merger(norm, self.merge**2, self.out_size, names, self.vision["hidden_size"], weights)

    def embed(self, x: torch.Tensor, cos_sin: torch.Tensor, grids: list[Grid]) -> torch.Tensor:
        positions = [stretched(self.positions, self.side, grid, self.merge, align_corners=True) for grid in grids]
        x = x + torch.cat(positions)
        lengths, deep = frame_lengths(grids), []
        for i, layer in enumerate(self.encoder.layers):
            x = layer(x, lengths, cos_sin)
            if i in self.deep:
                deep.append(self.deep_mergers[self.deep[i]](x))
        return torch.cat((self.merger(x), *deep), -1)


class Qwen35Tower(Qwen3VLTower):
    """An embedding has the columns of the final features only."""

    video_token_id = 248057

    @classmethod
    def read_spec(cls, architecture: str, config: dict[str, Any]) -> VisionSpec:
        vision = config["vision_config"] | {"deepstack_visual_indexes": ()}
        return super().read_spec(architecture, {"image_token_id": 248056} | config | {"vision_config": vision})
