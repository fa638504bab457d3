"""The vision encoders of GLM-4.1V to 4.6V and GLM-OCR: Qwen's patches, and a convolution that joins four of them."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from quire.worker.layers.linear import PLAIN, PLAIN_WEIGHTS, ColumnParallelLinear, Part, Shard, WeightFormat
from quire.worker.layers.norm import LayerNorm, RMSNorm
from quire.worker.models.vision.qwen_vl import Grid, QwenVLTower, frame_lengths, in_groups
from quire.worker.spec.vision import VisionSpec
from quire.worker.transformer.vision.layers import (
    EncoderSpec,
    FeedForward,
    LayerNames,
    activation,
    linear,
    named,
    table,
)

_NAMES = LayerNames("norm1", "attn", ("qkv",), "proj", "norm2", ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj")
_MERGER = LayerNames(up=("gate_proj", "up_proj"), down="down_proj")


def _by_patch(weight: torch.Tensor) -> torch.Tensor:
    """Order the columns of a convolution `[out, C, rows, columns]` by patch first."""
    return weight.permute(0, 2, 3, 1).flatten(1)


class Downsample(ColumnParallelLinear):
    """Joins the `merge` x `merge` neighbours of an embedding: a convolution whose stride is its size."""

    def __init__(self, size: int, out: int, merge: int):
        self.merge, self.size = merge, size
        super().__init__(merge * merge * size, [Shard("visual.downsample", out, 0, out)], True, PLAIN)

    def weight_parts(self) -> list[Part]:
        shape = self.out_features, self.size, self.merge, self.merge
        return [Part("visual.downsample.weight", shape, view=_by_patch)]


class Merger(nn.Module):
    """Maps the features of patches `[T, C]` to embeddings `[T / group, out_size]`."""

    def __init__(self, vision: dict[str, Any], out: int, inner: int, eps: float, weights: WeightFormat):
        super().__init__()
        size, merge = vision["hidden_size"], vision["spatial_merge_size"]
        self.norm = named(RMSNorm(size, eps), "visual.post_layernorm")
        self.downsample = Downsample(size, out, merge)
        self.proj = linear(out, out, "visual.merger.proj", weights, bias=False)
        self.proj_norm = named(LayerNorm(out, 1e-5), "visual.merger.post_projection_norm")
        spec = EncoderSpec(out, inner, 0, 1, vision["hidden_act"], eps, bias=False, names=_MERGER)
        self.mlp, self.activate = FeedForward(spec, "visual.merger", weights), activation("gelu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.proj(self.downsample(self.norm(x).reshape(-1, self.downsample.in_features)))
        return self.mlp(self.activate(self.proj_norm(x)))


class GlmOcrTower(QwenVLTower):
    patch_bias = True
    video_token_id = None
    image_token_id: ClassVar[int | None] = 59280  # where config.json names none
    defaults = {
        "depth": 24,
        "hidden_size": 1024,
        "hidden_act": "silu",
        "attention_bias": True,
        "num_heads": 16,
        "in_channels": 3,
        "patch_size": 14,
        "rms_norm_eps": 1e-5,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 1536,
        "intermediate_size": 4096,
    }

    @classmethod
    def read_spec(cls, architecture: str, config: dict[str, Any]) -> VisionSpec:
        config = {"image_token_id": cls.image_token_id} | config  # the tokens of videos are not read
        return super().read_spec(architecture, {key: config[key] for key in config if key != "video_token_id"})

    @classmethod
    def encoder_spec(cls, vision: dict[str, Any]) -> EncoderSpec:
        return EncoderSpec(
            hidden_size=vision["hidden_size"],
            intermediate_size=vision["intermediate_size"],
            num_layers=vision["depth"],
            num_heads=vision["num_heads"],
            act=vision["hidden_act"],
            eps=vision["rms_norm_eps"],
            norm="rms",
            qkv_bias=vision["attention_bias"],
            head_norm=True,
            names=_NAMES,
        )

    def make_merger(self, spec: EncoderSpec, weights: WeightFormat) -> Merger:
        inner = self.out_size * self.vision["in_channels"]
        return Merger(self.vision, self.out_size, inner, spec.eps, weights)


class Glm4vTower(GlmOcrTower):
    """Positions are also embedded, and the language model's sizes are used where GLM-OCR has the encoder's."""

    image_token_id = None
    defaults = GlmOcrTower.defaults | {
        "hidden_size": 1536,
        "attention_bias": False,
        "num_heads": 12,
        "image_size": 336,
        "out_hidden_size": 4096,
        "intermediate_size": 13696,
    }

    def __init__(self, config: dict[str, Any], weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(config, weights)
        size, eps = self.vision["hidden_size"], self.vision["rms_norm_eps"]
        self.side = self.vision["image_size"] // self.vision["patch_size"]
        self.positions = table("visual.embeddings.position_embedding.weight", self.side**2, size)
        self.first_norm = named(RMSNorm(size, eps), "visual.post_conv_layernorm")

    @classmethod
    def encoder_spec(cls, vision: dict[str, Any]) -> EncoderSpec:
        return EncoderSpec(
            hidden_size=vision["hidden_size"],
            intermediate_size=vision["out_hidden_size"],
            num_layers=vision["depth"],
            num_heads=vision["num_heads"],
            act=vision["hidden_act"],
            eps=vision["rms_norm_eps"],
            norm="rms",
            qkv_bias=vision["attention_bias"],
            bias=False,
            names=_NAMES,
        )

    def make_merger(self, spec: EncoderSpec, weights: WeightFormat) -> Merger:
        return Merger(self.vision, self.out_size, self.vision["intermediate_size"], spec.eps, weights)

    def embed(self, x: torch.Tensor, cos_sin: torch.Tensor, grids: list[Grid]) -> torch.Tensor:
        x = self.first_norm(x) + torch.cat([self._positions(grid) for grid in grids])
        return self.merger(self.encoder(x, frame_lengths(grids), cos_sin))

    def _positions(self, grid: Grid) -> torch.Tensor:
        """Return the embeddings of the positions of a grid `[T, C]`: those that were learned of a square, sampled
        bicubically.
        """
        frames, rows, columns = grid
        square = self.positions.float().view(1, self.side, self.side, -1).permute(0, 3, 1, 2)
        y, x = (((torch.arange(n, device=square.device) + 0.5) / n) * 2 - 1 for n in (rows, columns))
        places = torch.stack(torch.meshgrid(y, x, indexing="ij")[::-1], -1)[None]
        found = F.grid_sample(square, places, mode="bicubic", align_corners=False, padding_mode="border")
        return in_groups(found[0].permute(1, 2, 0), self.merge).to(self.positions.dtype).repeat(frames, 1)
