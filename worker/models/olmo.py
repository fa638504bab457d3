"""OLMo 2 and 3: norms only after attention and the MLP, and norms over all heads of q and of k together. OLMo 3 has
windows in three of four layers.
"""

from __future__ import annotations

from typing import Any

from quire.worker.spec.rope import RopeSpec, read_ropes_by_kind
from quire.worker.transformer.decoder import CausalLM
from quire.worker.transformer.reader import COMMON_DEFAULTS, pattern


class Olmo2(CausalLM):
    config_defaults = COMMON_DEFAULTS | {
        "model_type": "olmo2",
        "vocab_size": 50304,
        "intermediate_size": 11008,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
    }
    facts = {"form": "post", "norm": "rms_wide", "qk_norm": "whole", "mlp_bias": False}

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        values["attention_out_bias"] = values["attention_bias"]


class Olmo3(Olmo2):
    config_defaults = Olmo2.config_defaults | {
        "model_type": "olmo3",
        "rope_theta": 500000.0,
        "sliding_window": 4096,
    }

    @classmethod
    def layer_types(cls, values: dict[str, Any]) -> list[str]:
        return pattern(values["num_hidden_layers"], 4)

    @classmethod
    def ropes(cls, values: dict[str, Any], raw: dict[str, Any]) -> dict[str, RopeSpec]:
        return read_ropes_by_kind(values, raw, raw.get("rope_theta") or values["rope_theta"])
