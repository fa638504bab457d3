"""Gemma 4: images of any shape, whose patches have two axes of positions; averages of neighbours to one embedding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from quire.worker.layers.linear import PLAIN, PLAIN_WEIGHTS, Part, WeightFormat, empty_parameter
from quire.worker.layers.norm import WideRMSNorm, rms_norm
from quire.worker.layers.rotary import apply_rotary
from quire.worker.spec.vision import VisionSpec, read_image_token_id
from quire.worker.transformer.vision.layers import activation, attend, linear, named, table
from quire.worker.transformer.vision.tower import VisionTower

_DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "pooling_kernel_size": 3,
    "patch_size": 16,
    "position_embedding_size": 10240,
    "rope_parameters": None,
    "use_clipped_linears": False,
    "standardize": False,
}
_BOUNDS = ("input_min", "input_max", "output_min", "output_max")


class ClippedLinear(nn.Module):
    """A linear layer without bias whose inputs and outputs are limited to the checkpoint's bounds, if `clipped`."""

    def __init__(self, in_features: int, out_features: int, name: str, clipped: bool, weights: WeightFormat):
        super().__init__()
        self.linear = linear(in_features, out_features, f"{name}.linear", weights, bias=False)
        view = partial(torch.reshape, shape=(1,))
        parts = [Part(f"{name}.{bound}", (), (), ((0, i, 1),), view) for i, bound in enumerate(_BOUNDS)]
        self.bounds = empty_parameter(len(parts), parts=parts) if clipped else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.bounds is None:
            return self.linear(x)
        low, high, out_low, out_high = self.bounds
        return self.linear(x.clamp(low, high)).clamp(out_low, out_high)


class _Attention(nn.Module):
    """Maps x `[T, C]` to `[T, C]`. Patches attend to those of their own image."""

    def __init__(self, vision: dict[str, Any], name: str, weights: WeightFormat):
        super().__init__()
        size, heads, head_dim = vision["hidden_size"], vision["num_attention_heads"], vision["head_dim"]
        self.head_dim, self.eps = head_dim, vision["rms_norm_eps"]
        layer = partial(ClippedLinear, clipped=vision["use_clipped_linears"], weights=weights)
        self.q, self.k, self.v = (layer(size, heads * head_dim, f"{name}.{part}_proj") for part in "qkv")
        self.out = layer(heads * head_dim, size, f"{name}.o_proj")
        self.q_norm, self.k_norm = (named(WideRMSNorm(head_dim, self.eps), f"{name}.{part}_norm") for part in "qk")

    def forward(self, x: torch.Tensor, lengths: Sequence[int], cos_sin: Sequence[torch.Tensor]) -> torch.Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, self.head_dim)) for part in (self.q, self.k, self.v))
        q, k = (_rotated(part, cos_sin) for part in (self.q_norm(q), self.k_norm(k)))
        return self.out(attend(q, k, rms_norm(v, None, self.eps), lengths, scale=1.0).flatten(1))


def _rotated(x: torch.Tensor, cos_sin: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rotate the first half of each head by the patch's column, the second by its row."""
    return torch.cat([apply_rotary(half, angles) for half, angles in zip(x.chunk(2, -1), cos_sin)], -1)


class _Layer(nn.Module):
    """Attention and a gated MLP, each between two norms and added to its input."""

    def __init__(self, vision: dict[str, Any], name: str, weights: WeightFormat):
        super().__init__()
        size, inner = vision["hidden_size"], vision["intermediate_size"]
        layer = partial(ClippedLinear, clipped=vision["use_clipped_linears"], weights=weights)
        self.attention = _Attention(vision, f"{name}.self_attn", weights)
        self.gate, self.up = (layer(size, inner, f"{name}.mlp.{part}_proj") for part in ("gate", "up"))
        self.down = layer(inner, size, f"{name}.mlp.down_proj")
        self.activate = activation(vision["hidden_activation"])
        self.before, self.after, self.before_mlp, self.after_mlp = (
            named(WideRMSNorm(size, vision["rms_norm_eps"]), f"{name}.{norm}layernorm")
            for norm in ("input_", "post_attention_", "pre_feedforward_", "post_feedforward_")
        )

    def forward(self, x: torch.Tensor, lengths: Sequence[int], cos_sin: Sequence[torch.Tensor]) -> torch.Tensor:
        x = x + self.after(self.attention(self.before(x), lengths, cos_sin))
        normed = self.before_mlp(x)
        return x + self.after_mlp(self.down(self.activate(self.gate(normed)) * self.up(normed)))


class Gemma4Tower(VisionTower):
    """`pixel_values` of an image is `[T, patch * patch * 3]`, from 0 to 1, row by row; `grid` `[2]` has the rows and
    columns of patches, multiples of `pooling_kernel_size`.
    """

    prefixes = ("vision_tower.", "embed_vision.")

    @classmethod
    def read_spec(cls, architecture: str, config: dict[str, Any]) -> VisionSpec:
        spec = VisionSpec(architecture, config, read_image_token_id({"image_token_id": 258880} | config))
        both = config["text_config"].get("use_bidirectional_attention") == "vision"
        return replace(spec, bidirectional=both, full_layers_causal=both)

    def __init__(self, config: dict[str, Any], weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(config, weights)
        vision = _DEFAULTS | config["vision_config"]
        if vision["num_key_value_heads"] != vision["num_attention_heads"]:
            raise ValueError("vision_config.num_key_value_heads is supported only if it is num_attention_heads")
        size, places, tower = vision["hidden_size"], vision["position_embedding_size"], "vision_tower"
        self.size, self.eps, self.pool = size, vision["rms_norm_eps"], vision["pooling_kernel_size"]
        self.patches_per_embed = self.pool**2
        self.head_dim, self.theta = vision["head_dim"], (vision["rope_parameters"] or {}).get("rope_theta", 100.0)
        name = f"{tower}.patch_embedder"
        self.patches = linear(3 * vision["patch_size"] ** 2, size, f"{name}.input_proj", weights, False, PLAIN)
        self.positions = table(f"{name}.position_embedding_table", 2, places, size)
        names = [f"{tower}.encoder.layers.{i}" for i in range(vision["num_hidden_layers"])]
        self.layers = nn.ModuleList([_Layer(vision, name, weights) for name in names])
        standard = ("std_bias", "std_scale") if vision["standardize"] else ()
        self.standard = nn.ParameterList([table(f"{tower}.{name}", size) for name in standard])
        name = "embed_vision.embedding_projection"
        self.projection = linear(size, config["text_config"]["hidden_size"], name, weights, bias=False)

    def encode(self, images: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
        grids: list[tuple[int, int]] = [tuple(image["grid"].tolist()) for image in images]
        lengths = [rows * columns for rows, columns in grids]
        pixels = torch.cat([image["pixel_values"] for image in images])
        columns, rows = (torch.cat(axis).to(pixels.device) for axis in zip(*map(_places, grids)))
        x = self.patches((2 * (pixels - 0.5)).to(self.positions.dtype))
        x = x + self.positions[0][columns] + self.positions[1][rows]
        cos_sin = self._rotation(columns), self._rotation(rows)
        for layer in self.layers:
            x = layer(x, lengths, cos_sin)
        pooled = [self._pooled(part, grid) for part, grid in zip(x.split(lengths), grids)]
        features = self._standardized(torch.cat(pooled)).to(x.dtype)
        return list(self.projection(rms_norm(features, None, self.eps)).split([len(part) for part in pooled]))

    def _rotation(self, places: torch.Tensor) -> torch.Tensor:
        """Return the rows of `apply_rotary` for half a head."""
        half = self.head_dim // 2
        exponents = torch.arange(0, half, 2, device=places.device, dtype=torch.float32) / half
        angles = places[:, None] / self.theta**exponents
        return torch.cat((angles.cos(), angles.sin()), -1)

    def _pooled(self, x: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
        """Return the means of neighbours, times sqrt(C), in float32: they may exceed what 16 bits hold."""
        rows, columns, k = *grid, self.pool
        squares = x.float().view(rows // k, k, columns // k, k, -1)
        return squares.mean((1, 3)).to(x.dtype).float().flatten(0, 1) * self.size**0.5

    def _standardized(self, x: torch.Tensor) -> torch.Tensor:
        if not len(self.standard):
            return x
        bias, scale = self.standard
        return (x - bias.float()) * scale.float()


def _places(grid: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the column and the row of each patch."""
    rows, columns = torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")
    return columns.flatten(), rows.flatten()
