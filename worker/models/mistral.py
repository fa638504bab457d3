"""Mistral: Llama with a sliding window in every layer. Ministral: in the layers that `layer_types` lists."""

from __future__ import annotations

from quire.worker.models.decoder import CausalLM
from quire.worker.models.reader import COMMON_DEFAULTS, FULL, SLIDING


class Mistral(CausalLM):
    config_defaults = COMMON_DEFAULTS | {
        "model_type": "mistral",
        "vocab_size": 32000,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    }
    facts = {"attention_bias": False, "attention_out_bias": False, "mlp_bias": False}

    @classmethod
    def layer_types(cls, values):
        return [FULL if values["sliding_window"] is None else SLIDING] * values["num_hidden_layers"]
