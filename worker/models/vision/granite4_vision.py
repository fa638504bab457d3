"""The vision encoder of Granite 4 Vision: SigLIP, and queries that read windows of the features of some of its layers
(https://arxiv.org/abs/2301.12597), each for a decoder layer of its own (deepstack).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from quire.worker.layers.linear import PLAIN_WEIGHTS, WeightFormat
from quire.worker.layers.norm import LayerNorm
from quire.worker.models.vision.siglip import CLIP, SIGLIP, VisionTransformer
from quire.worker.spec.vision import VisionSpec
from quire.worker.transformer.reader import text_part
from quire.worker.transformer.vision.layers import activation, linear, named, table
from quire.worker.transformer.vision.tower import VisionTower

_CORNERS = ((0, 0), (0, 1), (1, 0), (1, 1))


class Attention(nn.Module):
    """Queries `[W, Q, C]` attend to x `[W, N, C]`; the result is added to them, with a norm after it."""

    def __init__(self, size: int, heads: int, eps: float, name: str, weights: WeightFormat):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (
            linear(size, size, f"{name}.attention.{part}", weights) for part in ("query", "key", "value")
        )
        self.out = linear(size, size, f"{name}.output.dense", weights)
        self.norm = named(LayerNorm(size, eps), f"{name}.output.LayerNorm")

    def forward(self, queries: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(part.flatten(0, 1)).view(*part.shape[:2], self.heads, -1).transpose(1, 2)
            for layer, part in ((self.query, queries), (self.key, x), (self.value, x))
        )
        found = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.norm(self.out(found.flatten(0, 1)) + queries.flatten(0, 1)).view_as(queries)


class QueryLayer(nn.Module):
    """A layer of a Q-Former: queries attend to each other and to the features, each half with a norm after it."""

    def __init__(self, size: int, settings: dict[str, Any], crosses: bool, name: str, weights: WeightFormat):
        super().__init__()
        heads, eps, inner = size // 64 or 1, settings["layer_norm_eps"], settings["intermediate_size"]
        self.attention = Attention(size, heads, eps, f"{name}.attention", weights)
        self.cross = Attention(size, heads, eps, f"{name}.crossattention", weights) if crosses else None
        self.up = linear(size, inner, f"{name}.intermediate_query.dense", weights)
        self.down = linear(inner, size, f"{name}.output_query.dense", weights)
        self.norm = named(LayerNorm(size, eps), f"{name}.output_query.LayerNorm")
        self.activate = activation(settings["hidden_act"])

    def forward(self, queries: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        queries = self.attention(queries, queries)
        queries = queries if self.cross is None else self.cross(queries, x)
        rows = queries.flatten(0, 1)
        return self.norm(self.down(self.activate(self.up(rows))) + rows).view_as(queries)


_QUERIES = {
    "num_hidden_layers": 1,
    "intermediate_size": 3072,
    "cross_attention_frequency": 1,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
}


class Projector(nn.Module):
    """Maps features of tiles `[B, side * side, C]` to `[B, fewer, H]`: in each window of `window` x `window` patches,
    `queries` x `queries` queries begin as the averaged features, or as those at `corner` of each 2 x 2 patches.
    """

    def __init__(
        self,
        config: dict[str, Any],
        encoder: VisionTransformer,
        name: str,
        weights: WeightFormat,
        corner: tuple[int, int] | None = None,
    ):
        super().__init__()
        size, self.side, self.corner = encoder.hidden_size, encoder.side, corner
        self.queries, self.window = map(int, config["downsample_rate"].split("/"))
        if self.side % self.window:
            raise ValueError(f"downsample_rate: {self.side} patches in a row must be a multiple of {self.window}")
        settings = _QUERIES | (config.get("qformer_config") or {})
        self.norm = named(LayerNorm(size, 1e-6), f"{name}.norm")
        self.query = table(f"{name}.query", 1, self.queries**2, size)
        self.places = table(f"{name}.image_positions", 1, self.window**2, size)
        self.first_norm = named(LayerNorm(size, settings["layer_norm_eps"]), f"{name}.qformer.layernorm")
        self.layers = nn.ModuleList(
            [
                QueryLayer(
                    size,
                    settings,
                    i % settings["cross_attention_frequency"] == 0,
                    f"{name}.qformer.encoder.layer.{i}",
                    weights,
                )
                for i in range(settings["num_hidden_layers"])
            ]
        )
        self.out = linear(size, text_part(config)["hidden_size"], f"{name}.out_linear", weights)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, across = len(x), self.side // self.window
        grid = self.norm(x.flatten(0, 1)).view(batch, self.side, self.side, -1)
        queries = windows(self._fewer(grid, across * self.queries), self.queries) + self.query
        queries = self.first_norm(queries.flatten(0, 1)).view_as(queries)
        read = windows(grid, self.window) + self.places
        for layer in self.layers:
            queries = layer(queries, read)
        rows = queries.view(batch, across, across, self.queries, self.queries, -1).transpose(2, 3)
        return self.out(rows.reshape(-1, rows.shape[-1])).view(batch, (across * self.queries) ** 2, -1)

    def _fewer(self, grid: torch.Tensor, side: int) -> torch.Tensor:
        """Return `side` x `side` of the features `[B, rows, columns, C]`."""
        if self.corner is not None:
            return grid[:, self.corner[0] :: 2, self.corner[1] :: 2]
        return F.interpolate(grid.permute(0, 3, 1, 2), (side, side), mode="area").permute(0, 2, 3, 1)


def windows(grid: torch.Tensor, side: int) -> torch.Tensor:
    """Return the squares of a grid `[B, rows, columns, C]`, row by row: `[B * squares, side * side, C]`."""
    batch, rows, columns, size = grid.shape
    found = grid.reshape(batch, rows // side, side, columns // side, side, size).transpose(2, 3)
    return found.reshape(-1, side * side, size)


def _targets(config: dict[str, Any]) -> list[int]:
    """Return the decoder layers that get features, in the order of the projectors."""
    spatial = config.get("spatial_target_layers") or [12, 15, 18, 21]
    return [int(layer) for _, layer in config["deepstack_layer_map"]] + [int(layer) for layer in spatial]


class Granite4VisionTower(VisionTower):
    """`pixel_values` of an image is `[1 + tiles, 3, image_size, image_size]`, the whole image first. `layout` is as of
    Llava-OneVision. Features for decoder layer 0 are the embeddings; those for layer i are added before it.
    """

    prefixes = ("vision_tower.", "layerwise_projectors.", "spatial_projectors.", "image_newline")

    @classmethod
    def read_spec(cls, architecture: str, config: dict[str, Any]) -> VisionSpec:
        if not config.get("deepstack_layer_map"):
            raise ValueError("config.json has no deepstack_layer_map")
        spec = super().read_spec(architecture, {"image_token_index": 32000} | config)
        return replace(spec, deep=tuple(layer - 1 for layer in sorted({*_targets(config)} - {0})))

    def __init__(self, config: dict[str, Any], weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(config, weights)
        vision = config["vision_config"]
        clip = vision.get("model_type", "clip_vision_model") == "clip_vision_model"
        self.encoder = VisionTransformer((CLIP if clip else SIGLIP) | vision, weights, clip=clip)
        self.whole = config.get("vision_feature_select_strategy", "default") != "default"
        self.size, depth = text_part(config)["hidden_size"], len(self.encoder.encoder.layers)
        read = [int(layer) for layer, _ in config["deepstack_layer_map"]]
        read += [config.get("spatial_vision_layer", -1)] * 4
        # -1 is the last layer's output, 0 the first one's input
        self.read = [layer + depth if layer < 0 else layer - 1 for layer in read]
        self.targets = _targets(config)
        names = [f"layerwise_projectors.{i}" for i in range(len(read) - 4)]
        names += [f"spatial_projectors.{i}" for i in range(4)]
        corners = [None] * (len(read) - 4) + list(_CORNERS)
        self.projectors = nn.ModuleList(
            [Projector(config, self.encoder, name, weights, corner) for name, corner in zip(names, corners)]
        )
        self.newline = table("image_newline", self.size)

    def encode(self, images: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
        tiles = [len(image["pixel_values"]) for image in images]
        pixels = torch.cat([image["pixel_values"] for image in images])
        found = dict(zip(sorted(set(self.read)), self.encoder.with_layers(pixels, sorted(set(self.read)))[1]))
        made = {
            target: projector(found[layer]).split(tiles)
            for layer, target, projector in zip(self.read, self.targets, self.projectors)
        }
        return [
            torch.cat([self._joined(made[target][i], image["layout"]) for target in sorted(made)], -1)
            for i, image in enumerate(images)
        ]

    def _joined(self, parts: torch.Tensor, layout: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of one image from those of its parts `[1 + tiles, N, H]`."""
        rows, columns, top, left, height, width = layout.tolist()
        side = round(parts.shape[1] ** 0.5)
        grid = parts[1:].view(rows, columns, side, side, -1).transpose(1, 2)
        grid = grid.reshape(rows * side, columns * side, -1)[top : top + height, left : left + width]
        lines = torch.cat((grid, self.newline.expand(height, 1, -1)), 1)
        return torch.cat((parts[0], lines.flatten(0, 1)))
