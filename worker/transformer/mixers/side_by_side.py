"""Attention and Mamba 2 that read the same norm; their outputs are added (Falcon-H1)."""

from __future__ import annotations

import torch
from torch import nn

from quire.worker.layers.linear import PLAIN_WEIGHTS, WeightFormat
from quire.worker.parallel import Exchange
from quire.worker.spec.model import ModelSpec
from quire.worker.transformer.attention import self_attention
from quire.worker.transformer.calls import LayerCall
from quire.worker.transformer.mixers.mamba2 import Mamba2


class AttentionAndMamba2(nn.Module):
    """`mixer_scales` of the layer multiply the input and output of attention, and those of Mamba."""

    def __init__(self, spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__()
        self.attention = self_attention(spec, layer, f"{prefix}.self_attn", weights)
        self.mamba = Mamba2(spec, layer, f"{prefix}.mamba", weights)
        self.scales = spec.layers[layer].mixer_scales

    def forward(self, x: torch.Tensor, call: LayerCall) -> torch.Tensor:
        attention_in, attention_out, mamba_in, mamba_out = self.scales
        attended = self.attention(x * attention_in, call) * attention_out
        return attended + self.mamba(x * mamba_in, call) * mamba_out

    def exchanges(self, num_tokens: int, num_needed: int) -> list[Exchange]:
        """Return the all-reduces of `forward`, in order."""
        return [
            *self.attention.exchanges(num_tokens, num_needed),
            *self.mamba.exchanges(num_tokens, num_needed),
        ]
