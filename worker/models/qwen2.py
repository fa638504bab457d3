"""Qwen 2 and 2.5: biases on q, k and v only, and an optional sliding window in the upper layers."""

from __future__ import annotations

from typing import Any

from quire.worker.transformer.decoder import CausalLM
from quire.worker.transformer.reader import COMMON_DEFAULTS, FULL, SLIDING


class Qwen2(CausalLM):
    config_defaults = COMMON_DEFAULTS | {
        "model_type": "qwen2",
        "vocab_size": 151936,
        "intermediate_size": 22016,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    }

    # fixed for this family, whatever config.json says
    facts = {"attention_bias": True, "attention_out_bias": False, "mlp_bias": False}

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        if not values["use_sliding_window"]:
            values["sliding_window"] = None

    @classmethod
    def layer_types(cls, values: dict[str, Any]) -> list[str]:
        """By default the window applies to the layers from `max_window_layers` on."""
        first, window = values["max_window_layers"], values["sliding_window"]
        return [SLIDING if window and i >= first else FULL for i in range(values["num_hidden_layers"])]
