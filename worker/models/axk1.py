"""A.X K1: DeepSeek V3 with a norm of the experts' sum. Its files may lack the router's correction biases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.worker.models.deepseek import DeepseekV3
from quire.worker.spec.moe import RoutingSpec


class AXK1(DeepseekV3):
    config_defaults = DeepseekV3.config_defaults | {
        "model_type": "axk1",
        "vocab_size": 163840,
        "num_attention_heads": 64,
        "max_position_embeddings": 32768,
        "num_experts": 192,
        "first_k_dense_replace": 1,
    }
    facts = DeepseekV3.facts | {"form": "pre_experts_norm"}
    ignored = (r"\.post_mlp_layernorm\.",)  # of dense layers, which do not use it

    @classmethod
    def routing(cls, values: dict[str, Any]) -> RoutingSpec:
        return replace(super().routing(values), optional_correction=True)
