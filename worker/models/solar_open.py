"""Solar Open: GLM-4.5 with experts in every layer."""

from __future__ import annotations

from typing import Any

from quire.worker.models.glm4_moe import Glm4Moe


class SolarOpen(Glm4Moe):
    config_defaults = Glm4Moe.config_defaults | {
        "model_type": "solar_open",
        "vocab_size": 196608,
        "intermediate_size": None,
        "num_hidden_layers": 48,
        "num_attention_heads": 64,
        "head_dim": 128,
        "rope_theta": 1000000.0,
        "partial_rotary_factor": 1.0,
        "moe_intermediate_size": 1280,
        "first_k_dense_replace": 0,
    }

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        super().complete(values, raw)
        values["intermediate_size"] = values["moe_intermediate_size"]  # no layer is dense
