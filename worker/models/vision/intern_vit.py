"""InternVL and Qianfan-OCR: tiles of an image through InternViT, four patches to an embedding."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from quire.worker.layers.linear import PLAIN_WEIGHTS, WeightFormat
from quire.worker.layers.norm import LayerNorm
from quire.worker.transformer.vision.layers import (
    Encoder,
    EncoderSpec,
    LayerNames,
    PatchEmbedding,
    Projector,
    merge_patches,
    named,
    num_used_layers,
    rename_parts,
    table,
)
from quire.worker.transformer.vision.tower import VisionTower

_NAMES = LayerNames(
    norm1="layernorm_before",
    attention="attention",
    out="projection_layer",
    norm2="layernorm_after",
    scales=("lambda_1", "lambda_2"),
)
_DEFAULTS = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 448,
    "patch_size": 14,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
    "norm_type": "layer_norm",
    "attention_bias": False,
    "use_qk_norm": False,
    "use_mean_pooling": True,
    "use_absolute_position_embeddings": True,
}


def one_side(name: str, value: int | list[int]) -> int:
    """Return the side of a square that config.json may give as [height, width]. Raises ValueError if it is no square.
    """
    sides = {value} if isinstance(value, int) else set(value)
    if len(sides) != 1:
        raise ValueError(f"vision_config.{name} {value} is not supported: only squares are")
    return sides.pop()


class InternViT(nn.Module):
    """Maps images `[B, 3, image_size, image_size]` to the features of the image and its patches, `[B, 1 + N, C]`."""

    def __init__(
        self, config: dict[str, Any], weights: WeightFormat, prefix: str = "vision_tower", names: LayerNames = _NAMES
    ):
        super().__init__()
        vision = _DEFAULTS | config["vision_config"]
        if not vision["use_absolute_position_embeddings"]:
            raise ValueError("vision_config.use_absolute_position_embeddings false is not supported")
        patch = one_side("patch_size", vision["patch_size"])
        size, self.side = vision["hidden_size"], one_side("image_size", vision["image_size"]) // patch
        num_layers = num_used_layers(config, vision["num_hidden_layers"], -1)
        spec = EncoderSpec(
            hidden_size=size,
            intermediate_size=vision["intermediate_size"],
            num_layers=num_layers,
            num_heads=vision["num_attention_heads"],
            act=vision["hidden_act"],
            eps=vision["layer_norm_eps"],
            norm="rms" if vision["norm_type"] == "rms_norm" else "layer",
            qkv_bias=vision["attention_bias"],
            qk_norm=vision["use_qk_norm"],
            names=names,
        )
        name, self.hidden_size = f"{prefix}.embeddings", size
        self.patches = PatchEmbedding(size, patch, f"{name}.patch_embeddings.projection", bias=True)
        self.class_token = table(f"{name}.cls_token", 1, 1, size)
        self.positions = table(f"{name}.position_embeddings", 1, self.side**2 + 1, size)
        self.encoder = Encoder(spec, f"{prefix}.encoder.layer", weights)
        normed = not vision["use_mean_pooling"] and config.get("vision_feature_layer", -1) == -1
        self.final_norm = named(LayerNorm(size, spec.eps), f"{prefix}.layernorm") if normed else None

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        x = self.patches(pixels.to(self.positions.dtype)).flatten(1, 2)
        x = torch.cat((self.class_token.expand(len(x), -1, -1), x), 1) + self.positions
        batch, length, _ = x.shape
        x = self.encoder(x.flatten(0, 1), [length] * batch)
        x = x if self.final_norm is None else self.final_norm(x)
        return x.view(batch, length, -1)


class InternVLTower(VisionTower):
    """`pixel_values` of an image is `[tiles, 3, image_size, image_size]`."""

    prefixes = ("vision_tower.", "multi_modal_projector.")
    names: ClassVar[LayerNames] = _NAMES

    def __init__(self, config: dict[str, Any], weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(config, weights)
        if config.get("vision_feature_select_strategy", "default") != "default":
            raise ValueError('vision_feature_select_strategy: InternVL is supported with "default" only')
        self.encoder = InternViT(config, weights, names=self.names)
        self.merge = round(1 / config.get("downsample_ratio", 0.5))
        self.patches_per_embed = self.merge**2
        size = self.encoder.hidden_size * self.merge**2
        self.norm = named(LayerNorm(size, 1e-5), "multi_modal_projector.layer_norm")
        self.projector = Projector(config, size, weights)

    def encode(self, images: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
        tiles = [len(image["pixel_values"]) for image in images]
        features = self.encoder(torch.cat([image["pixel_values"] for image in images]))[:, 1:]
        merged = merge_patches(features.unflatten(1, (self.encoder.side, -1)), self.merge)
        embeddings = self.projector(self.norm(merged.flatten(0, 1)))
        return list(embeddings.split([count * merged.shape[1] for count in tiles]))


class QianfanOCRTower(InternVLTower):
    """InternVL's, in files with the names that InternVL's own code has."""

    prefixes = ("vision_model.", "mlp1.")
    names = LayerNames("norm1", "attn", ("qkv",), "proj", "norm2", scales=("ls1", "ls2"))

    def __init__(self, config: dict[str, Any], weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(config | {"vision_config": {"attention_bias": True} | config["vision_config"]}, weights)
        rename_parts(
            self,
            {
                "vision_tower.encoder.layer.": "vision_model.encoder.layers.",
                "vision_tower.embeddings.cls_token": "vision_model.embeddings.class_embedding",
                "vision_tower.embeddings.patch_embeddings.projection.": "vision_model.embeddings.patch_embedding.",
                "vision_tower.embeddings.position_embeddings": "vision_model.embeddings.position_embedding",
                "vision_tower.": "vision_model.",
                "multi_modal_projector.layer_norm.": "mlp1.0.",
                "multi_modal_projector.linear_1.": "mlp1.1.",
                "multi_modal_projector.linear_2.": "mlp1.3.",
            },
        )
