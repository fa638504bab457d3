"""The vision encoder of MiniCPM-V 4.6: SigLIP for images of any shape; between its layers, four patches become one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from quire.worker.layers.linear import PLAIN_WEIGHTS, WeightFormat
from quire.worker.layers.norm import LayerNorm
from quire.worker.models.vision.qwen_vl import Merger, in_groups
from quire.worker.models.vision.siglip import SIGLIP
from quire.worker.transformer.reader import text_part
from quire.worker.transformer.vision.layers import (
    Encoder,
    EncoderSpec,
    PatchEmbedding,
    SelfAttention,
    activation,
    linear,
    named,
    table,
)
from quire.worker.transformer.vision.tower import VisionTower

_TOWER = "vision_tower"
_SIDE, _GROUP = 2, 4  # neighbours that become one
Grid = tuple[int, int]  # rows and columns


def nearest(length: int, side: int) -> torch.Tensor:
    """Return the index, among `side` in a row, of the position's embedding of each of `length` patches."""
    boundaries = torch.arange(1 / side, 1.0, 1 / side)
    return torch.bucketize(torch.arange(length) / length, boundaries, right=True)


class WindowMerger(nn.Module):
    """The patches of each window of 2 x 2 attend to each other and become one: their mean and an MLP of them all."""

    def __init__(self, spec: EncoderSpec, weights: WeightFormat):
        super().__init__()
        name, size, inner = f"{_TOWER}.vit_merger", _GROUP * spec.hidden_size, _GROUP * spec.intermediate_size
        self.attention = SelfAttention(spec, name, weights)
        self.norm1 = spec.make_norm(f"{name}.layer_norm1")
        self.norm2 = named(LayerNorm(size, spec.eps), f"{name}.pre_norm")
        self.up = linear(size, inner, f"{name}.linear_1", weights)
        self.down = linear(inner, spec.hidden_size, f"{name}.linear_2", weights)
        self.activate = activation("gelu_pytorch_tanh")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map windows `[4 * N, C]`, one after another, to `[N, C]`."""
        x = x + self.attention(self.norm1(x), [_GROUP] * (len(x) // _GROUP), None)
        windows = x.view(-1, _GROUP, x.shape[-1])
        return self.down(self.activate(self.up(self.norm2(windows.flatten(1))))) + windows.mean(1)


class MiniCPMV46Tower(VisionTower):
    """`pixel_values` of an image is `[T, 3, patch, patch]`, row by row of each of its K parts; `grids` `[K, 2]` has
    the rows and columns of patches of each part.
    """

    prefixes = (f"{_TOWER}.", "merger.")

    def __init__(self, config: dict[str, Any], weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(config, weights)
        vision = SIGLIP | config["vision_config"]
        spec = EncoderSpec.read(vision)
        size, patch = spec.hidden_size, vision["patch_size"]
        self.side = vision["image_size"] // patch
        self.patches = PatchEmbedding(size, patch, f"{_TOWER}.embeddings.patch_embedding", bias=True)
        self.positions = table(f"{_TOWER}.embeddings.position_embedding.weight", self.side**2, size)
        self.encoder = Encoder(spec, f"{_TOWER}.encoder.layers", weights)
        self.final_norm = named(LayerNorm(size, spec.eps), f"{_TOWER}.post_layernorm")
        self.merger = WindowMerger(spec, weights)
        self.merged_after = self._merged_after(config, vision)
        self.patches_per_embed = _GROUP if self.merged_after is None else _GROUP**2
        norm, name = named(LayerNorm(_GROUP * size, 1e-6), "merger.mlp.0.pre_norm"), "merger.mlp.0.linear_"
        names = f"{name}1", f"{name}2"
        self.last_merger = Merger(norm, _GROUP, text_part(config)["hidden_size"], names, size, weights)

    @staticmethod
    def _merged_after(config: dict[str, Any], vision: dict[str, Any]) -> int | None:
        """Return the layer after which windows are merged; None if none is. Raises ValueError for other windows."""
        if (times := config.get("merger_times", 1)) != 1:
            raise ValueError(f"merger_times {times} is not supported: only 1 is")
        for name, value in (
            ("merge_kernel_size", config.get("merge_kernel_size", (2, 2))),
            ("vision_config.window_kernel_size", vision.get("window_kernel_size", (2, 2))),
        ):
            if tuple(value) != (_SIDE, _SIDE):
                raise ValueError(f"{name} {list(value)} is not supported: only [2, 2] is")
        layer = config.get("insert_layer_id", 6)
        if not 0 <= layer < vision["num_hidden_layers"]:
            raise ValueError(f"insert_layer_id {layer} is none of the {vision['num_hidden_layers']} layers")
        return None if config.get("downsample_mode", "16x") == "4x" else layer

    def encode(self, images: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
        grids = [tuple(grid) for image in images for grid in image["grids"].tolist()]
        pixels = torch.cat([image["pixel_values"] for image in images]).to(self.positions.dtype)
        x = self.patches(pixels).flatten(0, 2)
        x = x + torch.cat([self._positions(*grid) for grid in grids])
        for i, layer in enumerate(self.encoder.layers):
            x = layer(x, [rows * columns for rows, columns in grids])
            if i == self.merged_after:
                x, grids = self.merger(_grouped(x, grids)), _halved(grids)
        x = self.last_merger(_grouped(self.final_norm(x), grids))
        return list(x.split([len(image["pixel_values"]) // self.patches_per_embed for image in images]))

    def _positions(self, rows: int, columns: int) -> torch.Tensor:
        index = nearest(rows, self.side)[:, None] * self.side + nearest(columns, self.side)
        return self.positions[index.flatten().to(self.positions.device)]


def _grouped(x: torch.Tensor, grids: list[Grid]) -> torch.Tensor:
    """Return the rows of x `[T, C]`, those of each square of a grid after one another."""
    parts = x.split([rows * columns for rows, columns in grids])
    return torch.cat([in_groups(part.view(*grid, -1), _SIDE) for part, grid in zip(parts, grids)])


def _halved(grids: list[Grid]) -> list[Grid]:
    return [(rows // _SIDE, columns // _SIDE) for rows, columns in grids]
