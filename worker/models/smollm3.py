"""SmolLM 3: Llama without rotary embedding in every fourth layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.worker.spec.model import LayerSpec
from quire.worker.transformer.decoder import CausalLM
from quire.worker.transformer.reader import COMMON_DEFAULTS, FULL, SLIDING


class SmolLM3(CausalLM):
    config_defaults = COMMON_DEFAULTS | {
        "model_type": "smollm3",
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "rope_theta": 2000000.0,
        "use_sliding_window": False,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
    }

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        values["attention_out_bias"] = values["attention_bias"]
        interval = values["no_rope_layer_interval"]
        # 1 for a layer with rotary embedding, despite the name
        values["no_rope_layers"] = values["no_rope_layers"] or [
            int((i + 1) % interval != 0) for i in range(values["num_hidden_layers"])
        ]

    @classmethod
    def layer_types(cls, values: dict[str, Any]) -> list[str]:
        slides = values["use_sliding_window"] and values["sliding_window"]
        return [SLIDING if slides and not rope else FULL for rope in values["no_rope_layers"]]

    @classmethod
    def layer(cls, values: dict[str, Any], index: int, kind: str, layer: LayerSpec) -> LayerSpec:
        return layer if values["no_rope_layers"][index] else replace(layer, rope=None)
