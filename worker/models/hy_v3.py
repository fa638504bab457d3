"""Hunyuan 3: heads of q and k are normalised, and experts have sigmoid scores with correction biases."""

from __future__ import annotations

from typing import Any

from quire.worker.spec.moe import MoESpec
from quire.worker.transformer.decoder import CausalLM
from quire.worker.transformer.moe_reader import MOE_DEFAULTS, MoEFamily, routing
from quire.worker.transformer.reader import COMMON_DEFAULTS


class HYV3(MoEFamily, CausalLM):
    config_defaults = (
        COMMON_DEFAULTS
        | MOE_DEFAULTS
        | {
            "model_type": "hy_v3",
            "vocab_size": 120832,
            "intermediate_size": 13312,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 11158840.0,
            "num_experts": 192,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1536,
            "num_shared_experts": 1,
            "router_scaling_factor": 2.826,
            "mlp_layer_types": None,
        }
    )
    facts = {"qk_norm": "head"}
    renames = {
        "mlp.gate": "mlp.router.gate",
        "mlp.gate.e_score_correction_bias": "mlp.expert_bias",
        "mlp.shared_expert": "mlp.shared_mlp",
    }

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        values["attention_out_bias"] = values["attention_bias"]
        values["first_k_dense_replace"] = 1

    @classmethod
    def moe(cls, values: dict[str, Any]) -> MoESpec:
        scale, size = values["router_scaling_factor"], values["moe_intermediate_size"]
        formula = routing(
            values, scores="sigmoid", weights="normalized", scale=scale, epsilon=1e-20, correction=True, float32=True
        )
        return MoESpec(formula, size, shared_size=size * values["num_shared_experts"])
