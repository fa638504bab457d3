"""MiniMax M2: q and k are normalised over all heads, a part of each head is rotated, and experts have sigmoid scores
with correction biases.
"""

from __future__ import annotations

from typing import Any

from quire.worker.spec.moe import MoESpec
from quire.worker.transformer.decoder import CausalLM
from quire.worker.transformer.moe_reader import MOE_DEFAULTS, MoEFamily, routing
from quire.worker.transformer.reader import COMMON_DEFAULTS


class MiniMaxM2(MoEFamily, CausalLM):
    config_defaults = (
        COMMON_DEFAULTS
        | MOE_DEFAULTS
        | {
            "model_type": "minimax_m2",
            "vocab_size": 200064,
            "hidden_size": 3072,
            "intermediate_size": 1536,
            "num_hidden_layers": 62,
            "num_attention_heads": 48,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 196608,
            "rope_theta": 5000000.0,
            "rotary_dim": None,
            "num_experts": 256,
            "num_experts_per_tok": 8,
        }
    )
    facts = {"qk_norm": "whole", "attention_bias": False, "attention_out_bias": False, "mlp_bias": False}
    renames = {
        "mlp": "block_sparse_moe",
        "mlp.gate.e_score_correction_bias": "block_sparse_moe.e_score_correction_bias",
        "gate_proj": "w1",
        "up_proj": "w3",
        "down_proj": "w2",
    }

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        if values["rotary_dim"]:
            values["partial_rotary_factor"] = values["rotary_dim"] / values["head_dim"]

    @classmethod
    def moe(cls, values: dict[str, Any]) -> MoESpec:
        formula = routing(values, scores="sigmoid", weights="normalized", correction=True)
        return MoESpec(formula, values["intermediate_size"])
