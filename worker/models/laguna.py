"""Laguna: a softplus gate on the attended values, per head or per entry, heads by layer, rotary embeddings by kind of
attention, experts with sigmoid scores and correction biases.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.worker.spec.model import LayerSpec
from quire.worker.spec.moe import MoESpec
from quire.worker.spec.rope import RopeSpec
from quire.worker.transformer.decoder import CausalLM
from quire.worker.transformer.moe_reader import MOE_DEFAULTS, MoEFamily, routing
from quire.worker.transformer.reader import COMMON_DEFAULTS, FULL, SLIDING

_ROPES = {
    FULL: {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5},
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
}
_GATES = {True: "head_gate", "per-head": "head_gate", "per-element": "entry_gate"}


class Laguna(MoEFamily, CausalLM):
    config_defaults = (
        COMMON_DEFAULTS
        | MOE_DEFAULTS
        | {
            "model_type": "laguna",
            "vocab_size": 100352,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 40,
            "num_attention_heads": 48,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "sliding_window": 512,
            "gating": True,
            "num_attention_heads_per_layer": None,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "mlp_layer_types": None,
            "moe_routed_scaling_factor": 1.0,
            "moe_apply_router_weight_on_input": False,
            "moe_router_logit_softcapping": 0.0,
        }
    )
    facts = {"qk_norm": "head", "gate_act": "softplus", "mlp_bias": False}
    renames = {"mlp.gate.e_score_correction_bias": "mlp.experts.e_score_correction_bias"}

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        for key in ("moe_apply_router_weight_on_input", "moe_router_logit_softcapping"):
            if values[key]:
                raise ValueError(f"{key} {values[key]!r} is not supported for Laguna")
        values[_GATES.get(values["gating"], "entry_gate")] = True
        values["attention_out_bias"] = values["attention_bias"]
        values["first_k_dense_replace"] = 1

    @classmethod
    def ropes(cls, values: dict[str, Any], raw: dict[str, Any]) -> dict[str, RopeSpec]:
        given = raw.get("rope_scaling") or raw.get("rope_parameters")
        return super().ropes(values, raw if given else raw | {"rope_parameters": _ROPES})

    @classmethod
    def moe(cls, values: dict[str, Any]) -> MoESpec:
        scale = values["moe_routed_scaling_factor"]
        formula = routing(values, scores="sigmoid", weights="normalized", scale=scale, correction=True)
        shared_size = values["shared_expert_intermediate_size"]
        return MoESpec(formula, values["moe_intermediate_size"], shared_size=shared_size)

    @classmethod
    def layer(cls, values: dict[str, Any], index: int, kind: str, layer: LayerSpec) -> LayerSpec:
        layer, heads = super().layer(values, index, kind, layer), values["num_attention_heads_per_layer"]
        return replace(layer, num_heads=heads[index]) if heads else layer
