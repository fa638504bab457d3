"""Jais 2: Llama with layer norms and an MLP of squared ReLU without gate."""

from __future__ import annotations

from typing import Any

from quire.worker.transformer.decoder import CausalLM
from quire.worker.transformer.reader import COMMON_DEFAULTS


class Jais2(CausalLM):
    config_defaults = COMMON_DEFAULTS | {
        "model_type": "jais2",
        "vocab_size": 150272,
        "hidden_size": 3328,
        "intermediate_size": 26624,
        "num_attention_heads": 26,
        "hidden_act": "relu2",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "mlp_bias": True,
    }
    facts = {"norm": "layer_bias", "mlp": "plain"}

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        values["attention_out_bias"] = values["attention_bias"]
