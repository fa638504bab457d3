"""The vision encoder of LFM3-VL: layers of gated convolutions over the grid of a frame's patches, and of attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from quire.worker.layers.linear import PLAIN_WEIGHTS, Part, WeightFormat
from quire.worker.layers.norm import LayerNorm, RMSNorm
from quire.worker.models.vision import qwen_vl
from quire.worker.models.vision.qwen_vl import Grid, QwenVLTower, frame_lengths, in_groups
from quire.worker.spec.vision import VisionSpec, read_image_token_id
from quire.worker.transformer.reader import text_part
from quire.worker.transformer.vision.layers import (
    EncoderSpec,
    FeedForward,
    LayerNames,
    SelfAttention,
    activation,
    linear,
    named,
    table,
)

_TOWER, _PROJECTOR = "vision_tower", "multi_modal_projector"
_NAMES = LayerNames(
    norm1="operator_norm",
    norm2="ffn_norm",
    up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
    qk_norms=("q_layernorm", "k_layernorm"),
)


class PatchEmbedding(qwen_vl.PatchEmbedding):
    """The checkpoint holds a linear layer."""

    name = f"{_TOWER}.patchifier"

    def weight_parts(self) -> list[Part]:
        return [Part(f"{self.name}.weight", (self.out_features, 3 * self.frames * self.patch**2))]


@dataclass(frozen=True, slots=True)
class Frames:
    """The frames of a batch of images: their grids of patches, and the rows of `apply_rotary`."""

    grids: list[Grid]
    merge: int
    cos_sin: torch.Tensor

    @property
    def lengths(self) -> list[int]:
        return frame_lengths(self.grids)


class ShortConv(nn.Module):
    """A convolution of each channel over rows and columns, between two gates."""

    def __init__(self, size: int, kernel: int, prefix: str, weights: WeightFormat):
        super().__init__()
        self.in_proj = linear(size, 3 * size, f"{prefix}.in_proj", weights, bias=False)
        self.kernel = table(f"{prefix}.spatial_conv.weight", size, 1, kernel, kernel)
        self.out_proj = linear(size, size, f"{prefix}.out_proj", weights, bias=False)

    def forward(self, x: torch.Tensor, frames: Frames) -> torch.Tensor:
        before, after, values = self.in_proj(x).chunk(3, -1)
        parts = (before * values).split(frames.lengths)
        shapes = [grid[1:] for grid in frames.grids for _ in range(grid[0])]
        found = torch.cat([self._convolved(part, *shape, frames.merge) for part, shape in zip(parts, shapes)])
        return self.out_proj(after * found)

    def _convolved(self, frame: torch.Tensor, rows: int, columns: int, merge: int) -> torch.Tensor:
        """Convolve the patches of a frame, which are in the order of embeddings."""
        square = frame.view(rows // merge, columns // merge, merge, merge, -1).transpose(1, 2)
        image = square.reshape(1, rows, columns, -1).permute(0, 3, 1, 2)
        found = F.conv2d(image, self.kernel, padding=self.kernel.shape[-1] // 2, groups=len(self.kernel))
        return in_groups(found[0].permute(1, 2, 0), merge)


class Layer(nn.Module):
    def __init__(self, spec: EncoderSpec, kernel: int | None, prefix: str, weights: WeightFormat):
        """Convolve with `kernel`; attend without one."""
        super().__init__()
        self.norm1, self.norm2 = (spec.make_norm(f"{prefix}.{name}") for name in (spec.names.norm1, spec.names.norm2))
        self.conv = ShortConv(spec.hidden_size, kernel, f"{prefix}.conv", weights) if kernel else None
        self.attention = None if kernel else SelfAttention(spec, prefix, weights)
        self.mlp = FeedForward(spec, prefix, weights)

    def forward(self, x: torch.Tensor, frames: Frames) -> torch.Tensor:
        if self.conv is not None:
            x = x + self.conv(self.norm1(x), frames)
        else:
            x = x + self.attention(self.norm1(x), frames.lengths, frames.cos_sin)
        return x + self.mlp(self.norm2(x))


class Projector(nn.Module):
    """Maps features of patches `[T, C]` to embeddings `[T / group, size]`, with a norm of each patch first."""

    def __init__(self, config: dict[str, Any], size: int, group: int, weights: WeightFormat):
        super().__init__()
        self.joined, bias = size * group, config.get("projector_bias", True)
        inner = config.get("projector_hidden_size", 4096)
        self.norm = named(LayerNorm(size, 1e-6), f"{_PROJECTOR}.layer_norm")
        self.linear_1 = linear(self.joined, inner, f"{_PROJECTOR}.linear_1", weights, bias)
        self.linear_2 = linear(inner, text_part(config)["hidden_size"], f"{_PROJECTOR}.linear_2", weights, bias)
        self.activate = activation(config.get("projector_hidden_act", "gelu"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear_2(self.activate(self.linear_1(self.norm(x).reshape(-1, self.joined))))


class Lfm3VLTower(QwenVLTower):
    """Features as of `QwenVLTower`; positions have one axis."""

    prefixes = (f"{_TOWER}.", f"{_PROJECTOR}.")
    patch_embedding = PatchEmbedding
    video_token_id = 125029
    theta = 1000000.0
    defaults = {
        "hidden_size": 1024,
        "intermediate_size": 2560,
        "num_hidden_layers": 14,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "layer_types": None,
        "conv_kernel_size": 3,
        "norm_eps": 1e-5,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }

    @classmethod
    def read_spec(cls, architecture: str, config: dict[str, Any]) -> VisionSpec:
        return VisionSpec(architecture, config, read_image_token_id({"image_token_id": 125030} | config))

    def __init__(self, config: dict[str, Any], weights: WeightFormat = PLAIN_WEIGHTS):
        self.config = config
        super().__init__(config, weights)
        size, vision = self.vision["hidden_size"], self.vision
        self.norm = named(RMSNorm(size, vision["norm_eps"]), f"{_TOWER}.embedding_norm")
        kinds = vision["layer_types"] or [
            "conv" if i < 2 or i % 2 else "full_attention" for i in range(vision["num_hidden_layers"])
        ]
        spec, kernels = self.encoder_spec(vision), [vision["conv_kernel_size"] if k == "conv" else None for k in kinds]
        self.layers = nn.ModuleList(
            [Layer(spec, kernel, f"{_TOWER}.layers.{i}", weights) for i, kernel in enumerate(kernels)]
        )

    @classmethod
    def encoder_spec(cls, vision: dict[str, Any]) -> EncoderSpec:
        return EncoderSpec(
            hidden_size=vision["hidden_size"],
            intermediate_size=vision["intermediate_size"],
            num_layers=0,  # `layers` has them
            num_heads=vision["num_attention_heads"],
            num_kv_heads=vision["num_key_value_heads"],
            act="silu",
            eps=vision["norm_eps"],
            norm="rms",
            qkv_bias=False,
            bias=False,
            head_norm=True,
            names=_NAMES,
        )

    def make_merger(self, spec: EncoderSpec, weights: WeightFormat) -> Projector:
        return Projector(self.config, spec.hidden_size, self.merge**2, weights)

    def embed(self, x: torch.Tensor, cos_sin: torch.Tensor, grids: list[Grid]) -> torch.Tensor:
        x, frames = self.norm(x), Frames(grids, self.merge, cos_sin)
        for layer in self.layers:
            x = layer(x, frames)
        return self.merger(x)
