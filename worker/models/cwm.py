"""CWM: Llama with windows in three of four layers."""

from __future__ import annotations

from typing import Any

from quire.worker.spec.rope import RopeSpec
from quire.worker.transformer.decoder import CausalLM
from quire.worker.transformer.reader import COMMON_DEFAULTS, FULL, SLIDING

_ROPE = {
    "rope_type": "llama3",
    "factor": 16.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}


class Cwm(CausalLM):
    config_defaults = COMMON_DEFAULTS | {
        "model_type": "cwm",
        "vocab_size": 128256,
        "hidden_size": 6144,
        "intermediate_size": 21504,
        "num_hidden_layers": 64,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "sliding_window": 8192,
    }
    facts = {"attention_bias": False, "attention_out_bias": False}

    @classmethod
    def ropes(cls, values: dict[str, Any], raw: dict[str, Any]) -> dict[str, RopeSpec]:
        given = raw.get("rope_scaling") or raw.get("rope_parameters")
        return super().ropes(values, raw if given else raw | {"rope_scaling": _ROPE})

    @classmethod
    def layer_types(cls, values: dict[str, Any]) -> list[str]:
        return [SLIDING if i % 4 else FULL for i in range(values["num_hidden_layers"])]
