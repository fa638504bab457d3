"""Falcon-H1: attention and Mamba 2 side by side in every layer, with multipliers of nearly everything."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.worker.spec.model import LayerSpec
from quire.worker.transformer.decoder import CausalLM
from quire.worker.transformer.mamba_reader import MAMBA2_DEFAULTS, mamba2
from quire.worker.transformer.reader import COMMON_DEFAULTS, FULL


class FalconH1(CausalLM):
    config_defaults = (
        COMMON_DEFAULTS
        | MAMBA2_DEFAULTS
        | {
            "model_type": "falcon_h1",
            "vocab_size": 128000,
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 8192,
            "mamba_d_ssm": 1024,
            "mamba_norm_before_gate": True,
            "mamba_rms_norm": False,
            "projectors_bias": False,
            "lm_head_multiplier": 1.0,
            "embedding_multiplier": 1.0,
            "mlp_multipliers": None,
            "key_multiplier": 1.0,
            "attention_out_multiplier": 1.0,
            "attention_in_multiplier": 1.0,
            "ssm_multipliers": None,
            "ssm_in_multiplier": 1.0,
            "ssm_out_multiplier": 1.0,
        }
    )
    state_kinds = {"hybrid": FULL}
    renames = {
        "model.norm": "model.final_layernorm",
        "post_attention_layernorm": "pre_ff_layernorm",
        "mlp": "feed_forward",
    }

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        values["layer_types"] = None
        values["attention_out_bias"] = values["attention_bias"]
        values["embed_scale"] = values["embedding_multiplier"]
        values["logit_scale"] = values["lm_head_multiplier"]
        values["gate_scale"], values["down_scale"] = values["mlp_multipliers"] or (1.0, 1.0)
        values["mlp"] = "scaled"

    @classmethod
    def layer(cls, values: dict[str, Any], index: int, kind: str, layer: LayerSpec) -> LayerSpec:
        layer = super().layer(values, index, kind, layer)
        heads, dim = values["mamba_n_heads"], values["mamba_d_head"]
        inner = values["mamba_d_ssm"] or int(values["mamba_expand"] * values["hidden_size"])
        norm = "norm_first" if values["mamba_norm_before_gate"] else "gate_first"
        state = mamba2(
            values,
            head_dim=inner // heads if dim == "auto" else dim,
            norm=norm if values["mamba_rms_norm"] else "none",
            out_bias=values["projectors_bias"],
            scales=tuple(values["ssm_multipliers"]) if values["ssm_multipliers"] else None,
        )
        scales = "attention_in", "attention_out", "ssm_in", "ssm_out"
        return replace(
            layer,
            mixer="attention_mamba2",
            state=state,
            scale=layer.head_dim**-0.5 * values["key_multiplier"],
            mixer_scales=tuple(values[f"{name}_multiplier"] for name in scales),
        )
