"""Mistral: Llama with a sliding window in every layer."""

from __future__ import annotations

from typing import Any

from quire.worker.models.config import COMMON_DEFAULTS, LayerSpec, layer_specs
from quire.worker.models.decoder import CausalLM


class Mistral(CausalLM):
    config_defaults = COMMON_DEFAULTS | {
        "model_type": "mistral",
        "vocab_size": 32000,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    }

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        values.update(attention_bias=False, attention_out_bias=False, mlp_bias=False)

    @classmethod
    def layer_specs(cls, values: dict[str, Any], raw: dict[str, Any]) -> tuple[LayerSpec, ...]:
        window, num_layers = values["sliding_window"], values["num_hidden_layers"]
        types = ["full_attention" if window is None else "sliding_attention"] * num_layers
        if raw.get("layer_types") and list(raw["layer_types"]) != types:
            raise ValueError("layer_types that mix attention kinds are not supported for MistralForCausalLM")
        return layer_specs(window, types, num_layers)
