"""Mistral: Llama with a sliding window in every layer. Ministral: in the layers that `layer_types` lists.
Ministral 3 and Mistral 3: queries are scaled by their position.
"""

from __future__ import annotations

from typing import Any

from quire.worker.spec.rope import RopeSpec, read_ropes
from quire.worker.transformer.decoder import CausalLM
from quire.worker.transformer.reader import COMMON_DEFAULTS, FULL, SLIDING


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
    def layer_types(cls, values: dict[str, Any]) -> list[str]:
        return [FULL if values["sliding_window"] is None else SLIDING] * values["num_hidden_layers"]


class Ministral(Mistral):
    config_defaults = Mistral.config_defaults | {"model_type": "ministral"}


class Ministral3(Mistral):
    config_defaults = Mistral.config_defaults | {
        "model_type": "ministral3",
        "vocab_size": 131072,
        "num_hidden_layers": 34,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "sliding_window": None,
    }

    @classmethod
    def ropes(cls, values: dict[str, Any], raw: dict[str, Any]) -> dict[str, RopeSpec]:
        default = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16384}
        return read_ropes(values, {"rope_parameters": default | {"llama_4_scaling_beta": 0.1}} | raw)
