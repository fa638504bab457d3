"""EXAONE 4: norms only after attention and the MLP. With windows, only windowed layers have rotary embeddings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.worker.spec.model import LayerSpec
from quire.worker.transformer.decoder import CausalLM
from quire.worker.transformer.reader import COMMON_DEFAULTS, FULL, pattern


class Exaone4(CausalLM):
    config_defaults = COMMON_DEFAULTS | {
        "model_type": "exaone4",
        "vocab_size": 102400,
        "intermediate_size": 16384,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    }
    facts = {
        "form": "post",
        "qk_norm": "head",
        "attention_bias": False,
        "attention_out_bias": False,
        "mlp_bias": False,
    }

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        if isinstance(values["sliding_window_pattern"], str):  # e.g. "LLLG": local, local, local, global
            values["sliding_window_pattern"] = len(values["sliding_window_pattern"])
        if not values["sliding_window"]:
            values["sliding_window"] = values["layer_types"] = None

    @classmethod
    def layer_types(cls, values: dict[str, Any]) -> list[str]:
        if not values["sliding_window"]:
            return [FULL] * values["num_hidden_layers"]
        return pattern(values["num_hidden_layers"], values["sliding_window_pattern"])

    @classmethod
    def layer(cls, values: dict[str, Any], index: int, kind: str, layer: LayerSpec) -> LayerSpec:
        return replace(layer, rope=None) if values["sliding_window"] and kind == FULL else layer
