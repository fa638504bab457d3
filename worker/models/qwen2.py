"""Qwen 2 and 2.5: biases on q, k and v only, and an optional sliding window in the upper layers. MiMo adds a head that
drafts tokens.
"""

from __future__ import annotations

from typing import Any, ClassVar

from quire.worker.transformer.decoder import CausalLM
from quire.worker.transformer.mtp_spec import WithMTP
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
        """Return the kinds of layers; by default the window applies from layer `max_window_layers` on."""
        first, window = values["max_window_layers"], values["sliding_window"]
        return [SLIDING if window and i >= first else FULL for i in range(values["num_hidden_layers"])]


class MiMo(WithMTP, Qwen2):
    mtp_names: ClassVar[dict[str, str]] = {
        "layer": "model.mtp_layers.{i}",
        "fc": "model.mtp_layers.{i}.input_proj",
        "pre_fc_norm_embedding": "model.mtp_layers.{i}.token_layernorm",
        "pre_fc_norm_hidden": "model.mtp_layers.{i}.hidden_layernorm",
        "norm": "model.mtp_layers.{i}.final_layernorm",
    }
    mtp_hidden_first = True
    config_defaults = Qwen2.config_defaults | {
        "model_type": "mimo",
        "vocab_size": 151680,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rope_theta": 640000,
        "rms_norm_eps": 1e-5,
    }
