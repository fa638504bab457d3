"""ERNIE 4.5 (dense): Llama with interleaved pairs of the rotary embedding."""

from __future__ import annotations

from typing import Any

from quire.worker.transformer.decoder import CausalLM
from quire.worker.transformer.reader import COMMON_DEFAULTS


class Ernie4_5(CausalLM):
    config_defaults = COMMON_DEFAULTS | {
        "model_type": "ernie4_5",
        "vocab_size": 103424,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 18,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "rope_theta": 500000.0,
        "use_bias": False,
    }
    facts = {"rope_interleaved": True}

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        values["attention_bias"] = values["attention_out_bias"] = values["mlp_bias"] = values["use_bias"]
