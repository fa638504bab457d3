"""The MLP of a decoder layer."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from quire.worker.layers.activation import ACTIVATIONS
from quire.worker.layers.linear import (
    PLAIN_WEIGHTS,
    GateUpParallelLinear,
    MergedColumnParallelLinear,
    RowParallelLinear,
    WeightFormat,
)
from quire.worker.parallel import Exchange
from quire.worker.spec.model import ModelSpec


class MLP(nn.Module):
    """Maps x `[T, H]` to `[T, H]`: down(activation(gate(x)) * up(x))."""

    native_twin: ClassVar = "mlp"

    def __init__(self, spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__()
        self.gate_up_proj = GateUpParallelLinear(
            spec.hidden_size,
            spec.layers[layer].intermediate_size,
            spec.mlp_bias,
            prefix,
            weights.linear(f"{prefix}.gate_up_proj"),
            spec.hidden_act,
            "gate_up_proj" in spec.fused,
        )
        self.down_proj = _down(spec, layer, prefix, weights)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.gate_up_proj(x))

    def round_for_products(self) -> None:
        """See `DecoderLayer.round_for_products`."""
        self.gate_up_proj.round_for(self.down_proj)

    def exchanges(self, num_tokens: int) -> list[Exchange]:
        """Return the all-reduces of `forward`, in order."""
        return [((num_tokens, self.down_proj.out_features), None)]


class ScaledMLP(MLP):
    """Multiplies the gate, before its activation, and the output by constants (Falcon-H1)."""

    def __init__(self, spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(spec, layer, prefix, weights)
        self.gate_up_proj.gated = None  # the activation is not that of a fused product
        self.scales, self.activation = (spec.gate_scale, spec.down_scale), ACTIVATIONS[spec.hidden_act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj.product(x).chunk(2, -1)
        return self.down_proj(self.activation(gate * self.scales[0]) * up) * self.scales[1]


class PlainMLP(nn.Module):
    """Maps x `[T, H]` to `[T, H]`: down(activation(up(x)))."""

    def __init__(self, spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__()
        self.up_proj = MergedColumnParallelLinear(
            spec.hidden_size,
            spec.layers[layer].intermediate_size,
            ("up_proj",),
            spec.mlp_bias,
            prefix,
            "intermediate_size",
            weights.linear(f"{prefix}.up_proj"),
        )
        self.down_proj = _down(spec, layer, prefix, weights)
        self.activation = ACTIVATIONS[spec.hidden_act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.activation(self.up_proj(x)))

    def exchanges(self, num_tokens: int) -> list[Exchange]:
        return [((num_tokens, self.down_proj.out_features), None)]


def _down(spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat) -> RowParallelLinear:
    return RowParallelLinear(
        spec.layers[layer].intermediate_size,
        spec.hidden_size,
        spec.mlp_bias,
        f"{prefix}.down_proj",
        "intermediate_size",
        weights.linear(f"{prefix}.down_proj"),
    )
