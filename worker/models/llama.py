"""Llama 2, 3 and 3.x: the decoder without changes. Falcon 3 and Yi are Llamas; InternLM 3 and Arcee nearly are."""

from __future__ import annotations

from typing import Any

from quire.worker.transformer.decoder import CausalLM
from quire.worker.transformer.reader import ALIASES, COMMON_DEFAULTS


class Llama(CausalLM):
    config_defaults = COMMON_DEFAULTS | {
        "model_type": "llama",
        "vocab_size": 32000,
        "intermediate_size": 11008,
        "max_position_embeddings": 2048,
    }

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        values["attention_out_bias"] = values["attention_bias"]  # one key for all four projections
        values["layer_types"] = None  # all layers attend to all positions


class InternLM3(Llama):
    config_defaults = Llama.config_defaults | {
        "model_type": "internlm3",
        "vocab_size": 128512,
        "intermediate_size": 10240,
        "num_hidden_layers": 48,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "bias": None,
    }
    aliases = ALIASES | {"qkv_bias": "attention_bias"}

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        super().complete(values, raw)
        if values["bias"] is not None:  # of all projections but q, k and v
            values["attention_out_bias"] = values["mlp_bias"] = values["bias"]


class Arcee(Llama):
    """An MLP without gate."""

    config_defaults = Llama.config_defaults | {
        "model_type": "arcee",
        "hidden_size": 2560,
        "intermediate_size": 18432,
        "hidden_act": "relu2",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    }
    facts = {"mlp": "plain"}
