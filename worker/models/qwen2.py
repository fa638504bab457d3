"""Qwen 2 and 2.5: biases on q, k and v only, and an optional sliding window in the upper layers."""

from __future__ import annotations

from typing import Any

from quire.worker.models.config import COMMON_DEFAULTS, LayerSpec, layer_specs
from quire.worker.models.decoder import CausalLM


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

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        # fixed for this family, whatever config.json says
        values.update(attention_bias=True, attention_out_bias=False, mlp_bias=False)

    @classmethod
    def layer_specs(cls, values: dict[str, Any], raw: dict[str, Any]) -> tuple[LayerSpec, ...]:
        """The window applies to the layers that `layer_types` lists, or by default to those from `max_window_layers`
        on.
        """
        window = values["sliding_window"] if values["use_sliding_window"] else None
        first, num_layers = values["max_window_layers"], values["num_hidden_layers"]
        types = raw.get("layer_types") or [
            "sliding_attention" if window is not None and layer >= first else "full_attention"
            for layer in range(num_layers)
        ]
        return layer_specs(window, types, num_layers)
