"""Kolibri 1: norms before and after attention and the MLP, windows with rotary embedding in four of five layers, the
others without; experts that are chosen by their logits and weighed by the sigmoid of these.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.worker.spec.model import LayerSpec
from quire.worker.spec.moe import MoESpec
from quire.worker.transformer.decoder import CausalLM
from quire.worker.transformer.moe_reader import MOE_DEFAULTS, MoEFamily, routing
from quire.worker.transformer.reader import COMMON_DEFAULTS, FULL, pattern


class Kolibri1(MoEFamily, CausalLM):
    config_defaults = (
        COMMON_DEFAULTS
        | MOE_DEFAULTS
        | {
            "model_type": "kolibri1",
            "vocab_size": 128000,
            "hidden_size": 2560,
            "intermediate_size": 512,  # no layer is dense
            "num_hidden_layers": 50,
            "num_attention_heads": 48,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "sliding_window": 513,
            "num_experts": 384,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        }
    )
    facts = {"form": "sandwich", "qk_norm": "head", "mlp_bias": False}
    renames = {
        "post_attention_layernorm": "post_attn_norm",
        "pre_feedforward_layernorm": "post_attention_layernorm",
        "post_feedforward_layernorm": "post_ffn_norm",
        "mlp.gate.e_score_correction_bias": "moe.router.expert_bias",
        "mlp.shared_expert": "mlp.shared_experts",
    }

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        if values["norm_topk_prob"]:
            raise ValueError("norm_topk_prob true is not supported for Kolibri 1")

    @classmethod
    def layer_types(cls, values: dict[str, Any]) -> list[str]:
        return pattern(values["num_hidden_layers"], 5)

    @classmethod
    def moe(cls, values: dict[str, Any]) -> MoESpec:
        formula = routing(values, scores="logits", weights="sigmoid", correction=True, float32=True)
        shared_size = values["shared_expert_intermediate_size"]
        return MoESpec(formula, values["moe_intermediate_size"], shared_size=shared_size)

    @classmethod
    def layer(cls, values: dict[str, Any], index: int, kind: str, layer: LayerSpec) -> LayerSpec:
        layer = super().layer(values, index, kind, layer)
        return replace(layer, rope=None) if kind == FULL and values["sliding_window"] else layer
