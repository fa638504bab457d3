"""Qwen3-ASR's encoder (arXiv:2601.21337): log-mel features to 13 embeddings a second, which replace placeholders."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from quire.worker.layers.linear import PLAIN_WEIGHTS, Part, WeightFormat
from quire.worker.layers.norm import LayerNorm
from quire.worker.spec.vision import VisionSpec
from quire.worker.transformer.vision.layers import Encoder, EncoderSpec, LayerNames, activation, linear, named, table
from quire.worker.transformer.vision.tower import VisionTower

_SIZES = {
    "d_model": 1024,
    "encoder_layers": 24,
    "encoder_attention_heads": 16,
    "encoder_ffn_dim": 4096,
    "num_mel_bins": 128,
    "n_window": 50,
    "n_window_infer": 800,
    "downsample_hidden_size": 480,
    "output_dim": 3584,
}
_NAMES = LayerNames(norm1="self_attn_layer_norm", norm2="final_layer_norm", up=("fc1",), down="fc2")
_PREFIX, _PROJECTOR = "audio_tower", "multi_modal_projector"
_CONVOLUTIONS = 3  # each halves the mels and the frames
_AT_ONCE = 8  # parts that the convolutions read together, which bounds their memory


class Qwen3ASREncoder(VisionTower):
    """`input_features` of a piece of audio is `[mels, frames]`.

    The frames are read in parts of `2 * n_window`, whose positions begin anew, and the embeddings of `n_window_infer`
    frames attend to each other. Frames of zeros complete the last part; their embeddings are dropped.
    """

    prefixes = ("audio_tower.", "multi_modal_projector.")

    @classmethod
    def read_spec(cls, architecture: str, config: dict[str, Any]) -> VisionSpec:
        token_id = config.get("audio_token_id")
        if not isinstance(token_id, int):
            raise ValueError("config.json has no audio_token_id")
        read_sizes(config)
        return VisionSpec(architecture, config, token_id, audio=True)

    def __init__(self, config: dict[str, Any], weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(config, weights)
        sizes, audio = read_sizes(config), config.get("audio_config") or {}
        size, channels = sizes["d_model"], sizes["downsample_hidden_size"]
        act = audio.get("activation_function", "gelu")
        self.part, self.activate = 2 * sizes["n_window"], activation(act)
        self.window = length_of(self.part) * (sizes["n_window_infer"] // self.part)
        self.kernels, self.biases = nn.ParameterList(), nn.ParameterList()
        for i in range(1, _CONVOLUTIONS + 1):
            shape = (channels, 1 if i == 1 else channels, 3, 3)
            self.kernels.append(table(f"{_PREFIX}.conv2d{i}.weight", *shape))
            self.biases.append(table(f"{_PREFIX}.conv2d{i}.bias", channels))
        rows = length_of(sizes["num_mel_bins"])
        self.conv_out = linear(channels * rows, size, f"{_PREFIX}.conv_out", weights, bias=False)
        spec = EncoderSpec(
            hidden_size=size,
            intermediate_size=sizes["encoder_ffn_dim"],
            num_layers=sizes["encoder_layers"],
            num_heads=sizes["encoder_attention_heads"],
            act=act,
            eps=1e-5,
            names=_NAMES,
        )
        self.encoder = Encoder(spec, f"{_PREFIX}.layers", weights)
        self.norm = named(LayerNorm(size, 1e-5), f"{_PREFIX}.ln_post")
        self.linear_1 = linear(size, size, f"{_PROJECTOR}.linear_1", weights)
        self.linear_2 = linear(size, sizes["output_dim"], f"{_PROJECTOR}.linear_2", weights)
        for i, layer in enumerate((self.linear_1, self.linear_2), 1):  # the first files have these in the tower
            for kind in ("weight", "bias"):
                parameter = getattr(layer, kind)
                parameter.other_parts = [[_renamed(part, f"{_PREFIX}.proj{i}.{kind}") for part in parameter.parts]]

    def encode(self, images: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
        found = [self._embed(features["input_features"]) for features in images]
        lengths = [len(one) for one in found]
        windows = [min(self.window, n - first) for n in lengths for first in range(0, n, self.window)]
        x = self.norm(self.encoder(torch.cat(found), windows))
        return list(self.linear_2(self.activate(self.linear_1(x))).split(lengths))

    def _embed(self, mel: torch.Tensor) -> torch.Tensor:
        """Return the inputs of the layers for features `[mels, frames]`."""
        frames, dtype = mel.shape[1], self.biases[0].dtype
        parts = F.pad(mel.to(dtype), (0, -frames % self.part)).unflatten(1, (-1, self.part)).transpose(0, 1)
        x = torch.cat([self._convolve(some) for some in parts.unsqueeze(1).split(_AT_ONCE)])
        x = (x + positions(*x.shape[1:]).to(x)).flatten(0, 1)
        return x[: length_of(frames, self.part)]

    def _convolve(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[parts, T, C]` of `[parts, 1, mels, frames]`."""
        for kernel, bias in zip(self.kernels, self.biases):
            x = F.gelu(F.conv2d(x, kernel, bias, stride=2, padding=1))
        x = x.permute(0, 3, 1, 2).flatten(2)
        return self.conv_out(x.flatten(0, 1)).unflatten(0, x.shape[:2])


def length_of(frames: int, part: int = 0) -> int:
    """Return the embeddings of `frames` frames, read in parts of `part` frames (0: at once)."""
    whole, rest = divmod(frames, part) if part else (0, frames)
    for _ in range(_CONVOLUTIONS):
        rest = (rest + 1) // 2
    return rest + (whole * length_of(part) if whole else 0)


def positions(length: int, size: int) -> torch.Tensor:
    """Return sines and cosines `[length, size]` of wavelengths from 2 pi to 20,000 pi."""
    half = size // 2
    rates = torch.exp(-torch.log(torch.tensor(10_000.0)) / (half - 1) * torch.arange(half))
    angles = torch.arange(length)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], 1)


def read_sizes(config: dict[str, Any]) -> dict[str, int]:
    """Return the encoder's sizes in config.json. Raises ValueError naming a key that is no positive integer, or that
    does not fit the others.
    """
    audio = config.get("audio_config") or {}
    sizes = {key: audio.get(key, default) for key, default in _SIZES.items()}
    for key, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"audio_config.{key} must be a positive integer, not {value!r}")
    size, heads = sizes["d_model"], sizes["encoder_attention_heads"]
    if size % heads or size % 2 or size < 4:
        raise ValueError(f"audio_config.d_model {size} must be even and a multiple of encoder_attention_heads {heads}")
    if sizes["n_window_infer"] % (2 * sizes["n_window"]):
        raise ValueError(
            f"audio_config.n_window_infer {sizes['n_window_infer']} must be a multiple of twice n_window "
            f"{sizes['n_window']}"
        )
    if audio.get("scale_embedding"):
        raise ValueError("audio_config.scale_embedding true is not supported: it must be false")
    return sizes


def _renamed(part: Part, name: str) -> Part:
    return replace(part, name=name)
