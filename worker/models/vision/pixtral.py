"""Pixtral's encoder, for images of any size, and Mistral 3, which merges patches of its features."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from quire.worker.layers.linear import PLAIN_WEIGHTS, Part, WeightFormat
from quire.worker.layers.norm import RMSNorm
from quire.worker.layers.views import RotaryRows
from quire.worker.spec.vision import VisionSpec
from quire.worker.transformer.vision.layers import (
    Encoder,
    EncoderSpec,
    LayerNames,
    PatchEmbedding,
    Projector,
    linear,
    merge_patches,
    named,
    num_used_layers,
    rename_parts,
)
from quire.worker.transformer.vision.tower import VisionTower

_NAMES = LayerNames(
    norm1="attention_norm",
    attention="attention",
    out="o_proj",
    norm2="ffn_norm",
    up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
)
_DEFAULTS = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "patch_size": 16,
    "hidden_act": "gelu",
}


class PixtralEncoder(nn.Module):
    """Maps images, each `[3, height, width]`, to the features of their patches. Positions are rotary, in two axes."""

    def __init__(self, config: dict[str, Any], weights: WeightFormat, prefix: str = "vision_tower"):
        super().__init__()
        vision = _DEFAULTS | config["vision_config"]
        size, heads = vision["hidden_size"], vision["num_attention_heads"]
        spec = EncoderSpec(
            hidden_size=size,
            intermediate_size=vision["intermediate_size"],
            num_layers=num_used_layers(config, vision["num_hidden_layers"], -1),
            num_heads=heads,
            act=vision["hidden_act"],
            eps=1e-5,
            norm="rms",
            qkv_bias=False,
            bias=False,
            names=_NAMES,
        )
        self.hidden_size, self.patch = size, vision["patch_size"]
        self.patch_conv = PatchEmbedding(size, self.patch, f"{prefix}.patch_conv", bias=False)
        self.ln_pre = named(RMSNorm(size, spec.eps), f"{prefix}.ln_pre")
        self.transformer = Encoder(spec, f"{prefix}.transformer.layers", weights)
        rope = vision.get("rope_parameters") or {}
        self.theta, self.head_dim = rope.get("rope_theta") or vision.get("rope_theta") or 10000.0, size // heads

    def forward(self, images: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the features of each image, `[rows, columns, C]`."""
        grids = [self.patch_conv(image.unsqueeze(0))[0] for image in images]
        lengths = [grid.shape[0] * grid.shape[1] for grid in grids]
        x = self.ln_pre(torch.cat([grid.flatten(0, 1) for grid in grids]))
        cos_sin = torch.cat([self._rotation(*grid.shape[:2], x.device) for grid in grids])
        features = self.transformer(x, lengths, cos_sin).split(lengths)
        return [part.view_as(grid) for part, grid in zip(features, grids)]

    def _rotation(self, rows: int, columns: int, device: torch.device) -> torch.Tensor:
        """Return the rows of `apply_rotary` for a grid: even frequencies turn by the patch's row, odd ones by its
        column.
        """
        exponents = torch.arange(0, self.head_dim, 2, device=device, dtype=torch.float32) / self.head_dim
        frequencies = 1.0 / self.theta**exponents
        of_row = torch.arange(rows, device=device)[:, None] * frequencies[::2]
        of_column = torch.arange(columns, device=device)[:, None] * frequencies[1::2]
        grid = (rows, columns, -1)
        angles = torch.cat((of_row[:, None].expand(grid), of_column[None].expand(grid)), -1).flatten(0, 1)
        return torch.cat((angles.cos(), angles.sin()), -1)


class Mistral3Tower(VisionTower):
    """Pixtral's encoder; `spatial_merge_size` squared patches make one embedding."""

    prefixes = ("vision_tower.", "multi_modal_projector.")
    names: ClassVar[tuple[str, str]] = ("vision_tower", "multi_modal_projector")  # of the encoder and the projector

    def __init__(self, config: dict[str, Any], weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(config, weights)
        encoder, name = self.names
        self.encoder = PixtralEncoder(config, weights, encoder)
        size, self.merge = self.encoder.hidden_size, config.get("spatial_merge_size", 2)
        self.patches_per_embed = self.merge**2
        self.norm = named(RMSNorm(size, config["text_config"].get("rms_norm_eps", 1e-6)), f"{name}.norm")
        merger = f"{name}.patch_merger.merging_layer"
        self.merging_layer = linear(size * self.merge**2, size, merger, weights, bias=False)
        self.projector = Projector(config, size, weights, bias=False, prefix=name)

    def encode(self, images: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
        """Encode images, each with `pixel_values` of `[3, height, width]`."""
        grids = self.encoder([image["pixel_values"].to(self.norm.weight.dtype) for image in images])
        merged = [self._merged(self.norm(grid.flatten(0, 1)).view_as(grid)) for grid in grids]
        embeddings = self.projector(self.merging_layer(torch.cat(merged)))
        return list(embeddings.split([len(part) for part in merged]))

    def _merged(self, grid: torch.Tensor) -> torch.Tensor:
        """Join neighbours; the merging layer's columns are ordered by channel first. Patches without neighbours at the
        lower and right edges are left out.
        """
        rows, columns = (size // self.merge * self.merge for size in grid.shape[:2])
        joined = merge_patches(grid[:rows, :columns].unsqueeze(0), self.merge)[0]
        return joined.unflatten(-1, (-1, grid.shape[-1])).transpose(1, 2).flatten(1)


class LightOnOCRTower(Mistral3Tower):
    """Mistral 3's under other names."""

    prefixes = ("vision_encoder.", "vision_projection.")
    names = ("vision_encoder", "vision_projection")

    @classmethod
    def read_spec(cls, architecture: str, config: dict[str, Any]) -> VisionSpec:
        return super().read_spec(architecture, {"image_token_id": 151655} | config)


# names of Mistral's own files
_LARGE4_NAMES = {
    "vision_tower.": "vision_encoder.",
    "multi_modal_projector.norm.": "pre_mm_projector_norm.",
    "multi_modal_projector.linear_1.": "vision_language_adapter.w_in.",
    "multi_modal_projector.linear_2.": "vision_language_adapter.w_out.",
    "multi_modal_projector.": "",
    "attention.q_proj.": "attention.wq.",
    "attention.k_proj.": "attention.wk.",
    "attention.v_proj.": "attention.wv.",
    "attention.o_proj.": "attention.wo.",
    "feed_forward.gate_proj.": "feed_forward.w1.",
    "feed_forward.up_proj.": "feed_forward.w3.",
    "feed_forward.down_proj.": "feed_forward.w2.",
}


class MistralLarge4Tower(Mistral3Tower):
    """Mistral 3's with other defaults, in files with Mistral's own names and interleaved pairs."""

    prefixes = ("vision_encoder.", "vision_language_adapter.", "patch_merger.", "pre_mm_projector_norm.")
    defaults = {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 30,
        "num_attention_heads": 16,
        "patch_size": 14,
        "hidden_act": "silu",
    }

    def __init__(self, config: dict[str, Any], weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(config | {"vision_config": self.defaults | config["vision_config"]}, weights)
        rename_parts(self, _LARGE4_NAMES)
        rows = RotaryRows(self.encoder.head_dim, self.encoder.head_dim, interleaved=True)
        for parameter in self.encoder.parameters():
            parameter.parts = [_halves(part, rows) for part in parameter.parts]


def _halves(part: Part, rows: RotaryRows) -> Part:
    """Return `part`, with `rows` as the view of those of q and k."""
    return replace(part, view=rows if re.search(r"attention\.w[qk]\.", part.name) else part.view)
