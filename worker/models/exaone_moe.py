"""K-EXAONE: the attention of EXAONE 4 with norms before it and before the MLP, and DeepSeek V3's routing."""

from __future__ import annotations

from typing import Any

from quire.worker.models.exaone4 import Exaone4
from quire.worker.spec.moe import MoESpec
from quire.worker.transformer.moe_reader import MOE_DEFAULTS, MoEFamily, sigmoid_routing


class ExaoneMoe(MoEFamily, Exaone4):
    config_defaults = (
        Exaone4.config_defaults
        | MOE_DEFAULTS
        | {
            "model_type": "exaone_moe",
            "num_key_value_heads": 32,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1024,
            "num_shared_experts": 1,
            "norm_topk_prob": True,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
            "mlp_layer_types": None,
        }
    )
    facts = Exaone4.facts | {"form": "pre"}
    renames = {
        "mlp.gate.e_score_correction_bias": "mlp.e_score_correction_bias",
        "mlp.shared_expert": "mlp.shared_experts",
    }

    @classmethod
    def moe(cls, values: dict[str, Any]) -> MoESpec:
        size = values["moe_intermediate_size"]
        return MoESpec(sigmoid_routing(values), size, shared_size=size * values["num_shared_experts"])
