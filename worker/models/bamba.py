"""Bamba: Mamba 2, and attention in some layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.worker.spec.model import LayerSpec
from quire.worker.transformer.decoder import CausalLM
from quire.worker.transformer.mamba_reader import MAMBA2_DEFAULTS, mamba2
from quire.worker.transformer.reader import COMMON_DEFAULTS, FULL, STATE


class Bamba(CausalLM):
    config_defaults = (
        COMMON_DEFAULTS
        | MAMBA2_DEFAULTS
        | {
            "model_type": "bamba",
            "vocab_size": 128000,
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 262144,
            "attn_layer_indices": None,
            "layers_block_type": None,
            "partial_rotary_factor": 0.5,
        }
    )
    state_kinds = {STATE: STATE, "mamba": STATE, "attention": FULL}
    renames = {
        "model.norm": "model.final_layernorm",
        "post_attention_layernorm": "pre_ff_layernorm",
        "mlp": "feed_forward",
    }

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        values["attention_out_bias"] = values["attention_bias"]
        values["layer_types"] = values["layer_types"] or values["layers_block_type"]

    @classmethod
    def layer_types(cls, values: dict[str, Any]) -> list[str]:
        full = values["attn_layer_indices"] or ()
        return [FULL if i in full else STATE for i in range(values["num_hidden_layers"])]

    @classmethod
    def layer(cls, values: dict[str, Any], index: int, kind: str, layer: LayerSpec) -> LayerSpec:
        layer = super().layer(values, index, kind, layer)
        return replace(layer, mixer="mamba2", state=mamba2(values)) if kind == STATE else layer
