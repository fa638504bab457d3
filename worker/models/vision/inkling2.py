"""The vision encoder of Inkling 2: images of any size as patches, with a class token per image; neighbouring patches
make an embedding.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from quire.worker.layers.linear import PLAIN_WEIGHTS, WeightFormat
from quire.worker.layers.norm import LayerNorm
from quire.worker.layers.views import RotaryRows
from quire.worker.models.vision.inkling import InklingTower
from quire.worker.models.vision.qwen_vl import in_groups, stretched
from quire.worker.transformer.vision.layers import Encoder, EncoderSpec, LayerNames, activation, linear, named, table
from quire.worker.transformer.vision.tower import VisionTower

_DEFAULTS = {
    "hidden_size": 1024,
    "intermediate_size": None,
    "mlp_ratio": 4.0,
    "num_hidden_layers": 23,
    "num_attention_heads": 16,
    "patch_size": 20,
    "spatial_merge_size": 2,
    "posemb_grid_size": 32,
    "projection_hidden_dim": 4096,
    "projector_bias": False,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
    "rope_parameters": None,
}
_ALIASES = {"native_patch_size": "patch_size", "adapter_merge_size": "spatial_merge_size"}
_BACKBONE = "visual.backbone"
_NAMES = LayerNames(
    norm1="ln_1", norm2="ln_2", up=("mlp.c_fc",), down="mlp.c_proj", scales=("ls_1.gamma", "ls_2.gamma")
)


class Inkling2Tower(VisionTower):
    """`pixel_values` of an image is `[tokens, side, side, 3]`; `grid` `[2]` has its rows and columns of tokens."""

    prefixes = ("visual.",)
    read_spec = InklingTower.read_spec

    def __init__(self, config: dict[str, Any], weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(config, weights)
        given = {_ALIASES.get(key, key): value for key, value in config["vision_config"].items()}
        vision = _DEFAULTS | given
        size, heads, bias = vision["hidden_size"], vision["num_attention_heads"], vision["projector_bias"]
        self.merge, self.patch, self.side = (
            vision[key] for key in ("spatial_merge_size", "patch_size", "posemb_grid_size")
        )
        self.patches_per_embed, self.head_dim = self.merge**2, size // heads
        self.theta = (vision["rope_parameters"] or {}).get("rope_theta", 10000.0)
        inner = vision["intermediate_size"] or int(size * vision["mlp_ratio"])
        spec = EncoderSpec.read(vision, intermediate_size=inner, names=_NAMES)
        embeddings = f"{_BACKBONE}.embeddings"
        self.patches = linear(3 * self.patch**2, size, f"{embeddings}.patch_embedding", weights, bias=False)
        self.positions = table(f"{embeddings}.position_embedding", self.side**2, size)
        self.first = table(f"{embeddings}.class_embedding", size)
        self.first_position = table(f"{embeddings}.cls_position_embedding", size)
        self.norm = named(LayerNorm(size, spec.eps), f"{_BACKBONE}.ln_pre")
        self.encoder = Encoder(spec, f"{_BACKBONE}.layers", weights)
        view = RotaryRows(self.head_dim, self.head_dim, interleaved=True)
        for parameter in self.encoder.parameters():
            parameter.parts = [
                replace(part, view=view) if ".q_proj." in part.name or ".k_proj." in part.name else part
                for part in parameter.parts
            ]
        inner = vision["projection_hidden_dim"]
        self.proj_in = linear(size * self.merge**2, inner, "visual.proj_in", weights, bias)
        self.proj_out = linear(inner, config["text_config"]["hidden_size"], "visual.proj_out", weights, bias)
        self.activate = activation(vision["hidden_act"])

    def encode(self, images: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
        grids = [tuple(image["grid"].tolist()) for image in images]
        x = torch.cat([self._embedded(image["pixel_values"], *grid) for image, grid in zip(images, grids)])
        cos_sin = torch.cat([self._rotation(*grid, x.device) for grid in grids])
        lengths = [1 + rows * columns * self.merge**2 for rows, columns in grids]
        x = self.encoder(self.norm(x), lengths, cos_sin)
        x = torch.cat([one[1:] for one in x.split(lengths)])  # without the class tokens
        joined = self.proj_out(self.activate(self.proj_in(x.reshape(-1, x.shape[1] * self.merge**2))))
        return list(joined.split([rows * columns for rows, columns in grids]))

    def _embedded(self, pixels: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """Return the class token and the patches of an image, those of a token after one another."""
        merge, patch = self.merge, self.patch
        patches = pixels.reshape(-1, merge, patch, merge, patch, 3).transpose(2, 3).reshape(-1, 3 * patch**2)
        x = self.patches(patches.to(self.positions.dtype))
        grid = 1, rows * merge, columns * merge
        x = x + stretched(self.positions, self.side, grid, merge, align_corners=False)
        return torch.cat([(self.first + self.first_position)[None], x])

    def _rotation(self, rows: int, columns: int, device: torch.device) -> torch.Tensor:
        """Return the rows of `apply_rotary`: the first half of the frequencies turns by the column, counted from 1."""
        half = self.head_dim // 2
        frequencies = 1.0 / self.theta ** (torch.arange(0, half, 2, device=device, dtype=torch.float32) / half)
        of_row, of_column = (
            torch.arange(1, number * self.merge + 1, device=device)[:, None] * frequencies for number in (rows, columns)
        )
        shape = len(of_row), len(of_column), -1
        angles = torch.cat((of_column[None].expand(shape), of_row[:, None].expand(shape)), -1)
        angles = torch.cat((angles.new_zeros(1, half), in_groups(angles, self.merge)))
        return torch.cat((angles.cos(), angles.sin()), -1)
