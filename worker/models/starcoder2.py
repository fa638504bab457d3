"""StarCoder 2: layer norms, an MLP without gate, biases everywhere."""

from __future__ import annotations

from typing import Any

from quire.worker.transformer.decoder import CausalLM
from quire.worker.transformer.reader import COMMON_DEFAULTS, FULL, SLIDING


class Starcoder2(CausalLM):
    config_defaults = COMMON_DEFAULTS | {
        "model_type": "starcoder2",
        "vocab_size": 49152,
        "hidden_size": 3072,
        "intermediate_size": 12288,
        "num_hidden_layers": 30,
        "num_attention_heads": 24,
        "num_key_value_heads": 2,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "use_bias": True,
    }
    facts = {"norm": "layer_bias", "mlp": "plain"}
    renames = {"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        values["attention_bias"] = values["attention_out_bias"] = values["mlp_bias"] = values["use_bias"]

    @classmethod
    def layer_types(cls, values: dict[str, Any]) -> list[str]:
        return [SLIDING if values["sliding_window"] else FULL] * values["num_hidden_layers"]
