"""ERNIE 4.5 with experts: interleaved rotary embedding, softmax scores with correction biases, shared experts."""

from __future__ import annotations

from typing import Any

from quire.worker.spec.moe import MoESpec
from quire.worker.transformer.decoder import CausalLM
from quire.worker.transformer.moe_reader import MOE_DEFAULTS, MoEFamily, routing
from quire.worker.transformer.reader import COMMON_DEFAULTS


class Ernie45Moe(MoEFamily, CausalLM):
    config_defaults = (
        COMMON_DEFAULTS
        | MOE_DEFAULTS
        | {
            "model_type": "ernie4_5_moe",
            "vocab_size": 103424,
            "hidden_size": 2560,
            "intermediate_size": 12288,
            "num_hidden_layers": 28,
            "num_attention_heads": 20,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
            "use_bias": False,
            "num_experts": 64,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1536,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": -1,
            "moe_layer_interval": 1,
            "moe_norm_min": 1e-12,
        }
    )
    facts = {"rope_interleaved": True, "attention_bias": False, "attention_out_bias": False, "mlp_bias": False}
    renames = {
        "mlp.shared_expert": "mlp.shared_experts",
        "mlp.gate.e_score_correction_bias": "mlp.moe_statics.e_score_correction_bias",
    }

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        if values["use_bias"]:
            raise ValueError("use_bias true is not supported for Ernie4_5_MoeForCausalLM, only false")

    @classmethod
    def is_sparse(cls, values: dict[str, Any], index: int) -> bool:
        first, last = values["moe_layer_start_index"], values["moe_layer_end_index"]
        last = values["num_hidden_layers"] - 1 if last == -1 else last
        return first <= index <= last and (index + 1) % values["moe_layer_interval"] == 0

    @classmethod
    def moe(cls, values: dict[str, Any]) -> MoESpec:
        size = values["moe_intermediate_size"]
        formula = routing(values, weights="normalized", correction=True, epsilon=values["moe_norm_min"], float32=True)
        return MoESpec(formula, size, shared_size=size * values["moe_num_shared_experts"], bias=False)
