"""Qwen 3: RMSNorm over every head of q and k before the rotary embedding."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from quire.worker.layers.linear import PLAIN_WEIGHTS, WeightFormat
from quire.worker.layers.norm import RMSNorm
from quire.worker.models.config import ModelSpec
from quire.worker.models.decoder import SelfAttention
from quire.worker.models.qwen2 import Qwen2


class Qwen3Attention(SelfAttention):
    native_twin: ClassVar = "attention"  # it applies the norms of `head_norms`

    def __init__(self, spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(spec, layer, prefix, weights)
        self.q_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps)
        self.k_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps)

    def head_norms(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.q_norm.weight, self.k_norm.weight


class Qwen3(Qwen2):
    attention_cls = Qwen3Attention
    config_defaults = Qwen2.config_defaults | {"model_type": "qwen3", "head_dim": 128}

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        values.update(attention_out_bias=values["attention_bias"], mlp_bias=False)  # one key for all four projections
