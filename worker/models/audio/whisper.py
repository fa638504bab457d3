"""Whisper's encoder: log-mel features of 30 seconds to one embedding per 20 ms."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from quire.worker.layers.linear import PLAIN, PLAIN_WEIGHTS, ColumnParallelLinear, Linear, Part, Shard, WeightFormat
from quire.worker.layers.norm import LayerNorm
from quire.worker.spec.vision import VisionSpec
from quire.worker.transformer.vision.layers import Encoder, EncoderSpec, LayerNames, named, table
from quire.worker.transformer.vision.tower import VisionTower

_SIZES = {
    "d_model": 384,
    "encoder_layers": 4,
    "encoder_attention_heads": 6,
    "encoder_ffn_dim": 1536,
    "num_mel_bins": 80,
    "max_source_positions": 1500,
}
_NAMES = LayerNames(norm1="self_attn_layer_norm", norm2="final_layer_norm", up=("fc1",), down="fc2")
_PREFIX, _WIDTH = "model.encoder", 3  # of the convolutions


class WhisperEncoder(VisionTower):
    prefixes = ("model.encoder.",)

    @classmethod
    def read_spec(cls, architecture: str, config: dict[str, Any]) -> VisionSpec:
        length = read_sizes(config)["max_source_positions"]
        return VisionSpec(architecture, config, image_token_id=-1, cross=length, audio=True)

    def __init__(self, config: dict[str, Any], weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(config, weights)
        sizes = read_sizes(config)
        size, self.length = sizes["d_model"], sizes["max_source_positions"]
        spec = EncoderSpec(
            hidden_size=size,
            intermediate_size=sizes["encoder_ffn_dim"],
            num_layers=sizes["encoder_layers"],
            num_heads=sizes["encoder_attention_heads"],
            act=config.get("activation_function", "gelu"),
            eps=1e-5,
            names=_NAMES,
        )
        self.conv1 = Convolution(sizes["num_mel_bins"], size, 1, f"{_PREFIX}.conv1")
        self.conv2 = Convolution(size, size, 2, f"{_PREFIX}.conv2")
        self.positions = table(f"{_PREFIX}.embed_positions.weight", self.length, size)
        self.encoder = Encoder(spec, f"{_PREFIX}.layers", weights)
        self.norm = named(LayerNorm(size, 1e-5), f"{_PREFIX}.layer_norm")
        without_key_biases(self)

    def encode(self, images: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
        mels = torch.stack([features["input_features"].T for features in images])  # [B, frames, mels]
        x = F.gelu(self.conv1(mels.to(self.positions.dtype)))
        x = F.gelu(self.conv2(x)) + self.positions
        x = self.norm(self.encoder(x.flatten(0, 1), [self.length] * len(images)))
        return list(x.view(len(images), self.length, -1))


class Convolution(ColumnParallelLinear):
    """Maps x `[B, frames, C]` to `[B, frames / stride, out_features]`, each from three neighbouring frames: a
    convolution as one matrix product.
    """

    def __init__(self, channels: int, out_features: int, stride: int, name: str):
        self.channels, self.stride, self.name = channels, stride, name
        super().__init__(_WIDTH * channels, [Shard(name, out_features, 0, out_features)], True, PLAIN)

    def weight_parts(self) -> list[Part]:
        shape = (self.out_features, self.channels, _WIDTH)
        return [Part(f"{self.name}.weight", shape, view=partial(torch.flatten, start_dim=1))]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        windows = F.pad(x, (0, 0, 1, 1)).unfold(1, _WIDTH, self.stride)  # [B, frames / stride, C, 3]
        return super().forward(windows.flatten(2).flatten(0, 1)).unflatten(0, (len(x), -1))


def read_sizes(config: dict[str, Any]) -> dict[str, int]:
    """Return the encoder's sizes in config.json. Raises ValueError naming a key that is no positive integer."""
    sizes = {key: config.get(key, default) for key, default in _SIZES.items()}
    for key, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{key} must be a positive integer, not {value!r}")
    size, heads = sizes["d_model"], sizes["encoder_attention_heads"]
    if size % heads:
        raise ValueError(f"d_model {size} is not a multiple of encoder_attention_heads {heads}")
    return sizes


def without_key_biases(model: nn.Module) -> None:
    """Let the biases of keys be zero: Whisper's checkpoints have none."""
    for module in model.modules():
        bias = getattr(module, "bias", None) if isinstance(module, Linear) else None
        if bias is not None and any(part.name.endswith(".k_proj.bias") for part in bias.parts):
            bias.data.zero_()
            bias.parts = [part for part in bias.parts if not part.name.endswith(".k_proj.bias")]
