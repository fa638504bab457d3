"""LFM3: short convolutions, windows and full attention, norms on both sides of each half of a layer, a gate per head.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.worker.models.lfm2 import Lfm2
from quire.worker.spec.model import LayerSpec
from quire.worker.spec.rope import RopeSpec
from quire.worker.transformer.reader import COMMON_DEFAULTS, FULL, SLIDING, STATE

_ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    FULL: {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.5},
}


class Lfm3(Lfm2):
    config_defaults = COMMON_DEFAULTS | {
        "model_type": "lfm3",
        "vocab_size": 128000,
        "hidden_size": 2048,
        "intermediate_size": 7680,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 128000,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "sliding_window": 256,
        "conv_L_cache": 7,
        "conv_bias": False,
        "use_sandwich_norm": True,
        "use_attention_gate": True,
    }
    renames = {name: found for name, found in Lfm2.renames.items() if not name.startswith("self_attn.")} | {
        "self_attn.g_proj": "self_attn.gate_proj",
        "post_attention_layernorm": "post_operator_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffn_norm",
    }

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        if not values["use_sandwich_norm"]:
            raise ValueError("use_sandwich_norm false is not supported for LFM3")
        values["tie_word_embeddings"] = raw.get("tie_embedding", values["tie_word_embeddings"])
        values["attention_out_bias"] = values["attention_bias"]
        values.update(form="sandwich", head_gate=bool(values["use_attention_gate"]))

    @classmethod
    def ropes(cls, values: dict[str, Any], raw: dict[str, Any]) -> dict[str, RopeSpec]:
        given = raw.get("rope_scaling") or raw.get("rope_parameters")
        return super().ropes(values, raw if given else raw | {"rope_parameters": _ROPES})

    @classmethod
    def layer_types(cls, values: dict[str, Any]) -> list[str]:
        kinds = {0: SLIDING, 2: FULL}
        return [kinds.get(i % 4, STATE) if i else STATE for i in range(values["num_hidden_layers"])]

    @classmethod
    def layer(cls, values: dict[str, Any], index: int, kind: str, layer: LayerSpec) -> LayerSpec:
        layer = super().layer(values, index, kind, layer)
        return replace(layer, head_gate=False) if kind == STATE else layer
