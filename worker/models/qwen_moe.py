"""Qwen 2 and 3 with experts. Qwen 2 has a shared expert with a gate."""

from __future__ import annotations

from typing import Any

from quire.worker.models.qwen2 import Qwen2
from quire.worker.models.qwen3 import Qwen3
from quire.worker.spec.moe import MoESpec
from quire.worker.transformer.moe_reader import MOE_DEFAULTS, MoEFamily, softmax_routing
from quire.worker.transformer.reader import FULL, SLIDING


class Qwen2Moe(MoEFamily, Qwen2):
    config_defaults = (
        Qwen2.config_defaults
        | MOE_DEFAULTS
        | {
            "model_type": "qwen2_moe",
            "intermediate_size": 5632,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "hidden_size": 2048,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "qkv_bias": True,
        }
    )

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        super().complete(values, raw)
        values["attention_bias"] = values["qkv_bias"]

    @classmethod
    def layer_types(cls, values: dict[str, Any]) -> list[str]:
        """Return the kinds of layers; by default the window applies to every other one before `max_window_layers`."""
        first, window = values["max_window_layers"], values["sliding_window"]
        return [SLIDING if window and (i + 1) % 2 and i < first else FULL for i in range(values["num_hidden_layers"])]

    @classmethod
    def moe(cls, values: dict[str, Any]) -> MoESpec:
        return MoESpec(
            softmax_routing(values),
            values["moe_intermediate_size"],
            shared_size=values["shared_expert_intermediate_size"],
            shared_gate=True,
        )


class Qwen3Moe(MoEFamily, Qwen3):
    config_defaults = (
        Qwen3.config_defaults
        | MOE_DEFAULTS
        | {
            "model_type": "qwen3_moe",
            "intermediate_size": 6144,
            "num_hidden_layers": 24,
            "num_key_value_heads": 4,
            "hidden_size": 2048,
            "head_dim": None,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        }
    )

    @classmethod
    def layer_types(cls, values: dict[str, Any]) -> list[str]:
        return [SLIDING if values["sliding_window"] else FULL] * values["num_hidden_layers"]

    @classmethod
    def moe(cls, values: dict[str, Any]) -> MoESpec:
        return MoESpec(softmax_routing(values), values["moe_intermediate_size"])
