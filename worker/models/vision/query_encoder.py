"""The second encoder of DeepSeek-OCR-2: a Qwen 2 over an image's features and learned queries, whose results are the
features of the image.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from quire.worker.layers.linear import WeightFormat
from quire.worker.layers.norm import RMSNorm
from quire.worker.layers.rotary import apply_rotary
from quire.worker.transformer.vision.layers import EncoderSpec, FeedForward, LayerNames, linear, named, table

_NAMES = LayerNames(
    norm1="input_layernorm",
    out="o_proj",
    norm2="post_attention_layernorm",
    up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
)
SMALL, LARGE = 144, 256  # queries of an image of 768 and of 1024 pixels a side


@dataclass(frozen=True)
class QuerySpec:
    """The sizes of the encoder."""

    hidden_size: int = 896
    intermediate_size: int = 4864
    num_layers: int = 24
    num_heads: int = 14
    num_kv_heads: int = 2
    eps: float = 1e-6
    theta: float = 1e6

    @property
    def layers(self) -> EncoderSpec:
        """Return the parts of a layer that other encoders also have."""
        sizes = self.hidden_size, self.intermediate_size, self.num_layers, self.num_heads
        return EncoderSpec(*sizes, "silu", self.eps, norm="rms", bias=False, names=_NAMES)


class QueryEncoder(nn.Module):
    """Maps features `[B, N, C]` to `[B, Q, C]`, with Q = 144 for N up to 144, else 256."""

    def __init__(self, spec: QuerySpec, prefix: str, weights: WeightFormat):
        super().__init__()
        self.small = table(f"{prefix}.query_768.weight", SMALL, spec.hidden_size)
        self.large = table(f"{prefix}.query_1024.weight", LARGE, spec.hidden_size)
        layers = [QueryLayer(spec, f"{prefix}.model.model.layers.{i}", weights) for i in range(spec.num_layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = named(RMSNorm(spec.hidden_size, spec.eps), f"{prefix}.model.model.norm")
        self.theta, self.head_dim = spec.theta, spec.hidden_size // spec.num_heads

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        batch, num_features, _ = features.shape
        queries = self.small if num_features <= SMALL else self.large
        x = torch.cat((features, queries.expand(batch, -1, -1)), 1)
        rotation = self._rotation(x.shape[1], x.device).repeat(batch, 1)
        for layer in self.layers:
            x = layer(x, num_features, rotation)
        return self.norm(x[:, num_features:].contiguous())

    def _rotation(self, length: int, device: torch.device) -> torch.Tensor:
        """Return the rows of `apply_rotary` for positions 0 .. length - 1."""
        exponents = torch.arange(0, self.head_dim, 2, device=device, dtype=torch.float32) / self.head_dim
        angles = torch.arange(length, device=device)[:, None] / self.theta**exponents
        return torch.cat((angles.cos(), angles.sin()), -1)


class QueryLayer(nn.Module):
    """Maps x `[B, T, C]` to the same shape."""

    def __init__(self, spec: QuerySpec, prefix: str, weights: WeightFormat):
        super().__init__()
        layers, attention = spec.layers, f"{prefix}.{_NAMES.attention}"
        self.sizes = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        self.head_dim = spec.hidden_size // spec.num_heads
        outputs = [heads * self.head_dim for heads in self.sizes]
        names = [f"{attention}.{name}" for name in _NAMES.qkv]
        self.norm1, self.norm2 = (layers.make_norm(f"{prefix}.{name}") for name in (_NAMES.norm1, _NAMES.norm2))
        self.qkv = linear(spec.hidden_size, outputs, names, weights)
        self.out = linear(spec.hidden_size, spec.hidden_size, f"{attention}.{_NAMES.out}", weights, bias=False)
        self.mlp = FeedForward(layers, prefix, weights)

    def forward(self, x: torch.Tensor, num_features: int, rotation: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, 1)
        qkv = self.qkv(self.norm1(flat)).unflatten(-1, (-1, self.head_dim))
        q, k, v = qkv.split(self.sizes, 1)
        q, k = apply_rotary(q, rotation), apply_rotary(k, rotation)
        q, k, v = (part.unflatten(0, x.shape[:2]).transpose(1, 2) for part in (q, k, v))
        attended = _attend(q, k, v, num_features).transpose(1, 2).flatten(2).flatten(0, 1)
        flat = flat + self.out(attended)
        return (flat + self.mlp(self.norm2(flat))).view(x.shape)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, num_features: int) -> torch.Tensor:
    """Let features attend to all features, queries to these and to the queries up to themselves: `[B, heads, T, D]`
    each, k and v with fewer heads.
    """
    k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (k, v))
    length = q.shape[2]
    visible = torch.ones(length - num_features, length, dtype=torch.bool, device=q.device).tril(num_features)
    of_features = F.scaled_dot_product_attention(q[:, :, :num_features], k[:, :, :num_features], v[:, :, :num_features])
    of_queries = F.scaled_dot_product_attention(q[:, :, num_features:], k, v, visible)
    return torch.cat((of_features, of_queries), 2)
