"""Granite 3 with experts: multipliers of embedding, residual, attention and logits."""

from __future__ import annotations

from typing import Any

from quire.worker.models.decoder import CausalLM
from quire.worker.models.moe_reader import MOE_DEFAULTS, MoEFamily, routing
from quire.worker.models.moe_spec import MoESpec
from quire.worker.models.reader import COMMON_DEFAULTS


class GraniteMoe(MoEFamily, CausalLM):
    config_defaults = (
        COMMON_DEFAULTS
        | MOE_DEFAULTS
        | {
            "model_type": "granitemoe",
            "vocab_size": 32000,
            "intermediate_size": 11008,
            "max_position_embeddings": 2048,
            "embedding_multiplier": 1.0,
            "logits_scaling": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
        }
    )
    facts = {"mlp_bias": False}
    renames = {
        "mlp": "block_sparse_moe",
        "mlp.gate": "block_sparse_moe.router.layer",
        "mlp.experts.gate_up_proj": "block_sparse_moe.input_linear.weight",
        "mlp.experts.down_proj": "block_sparse_moe.output_linear.weight",
    }

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        values.update(
            attention_out_bias=values["attention_bias"],
            embed_scale=values["embedding_multiplier"],
            residual_scale=values["residual_multiplier"],
            logit_scale=1.0 / values["logits_scaling"],
            scale=values["attention_multiplier"],
        )

    @classmethod
    def moe(cls, values: dict[str, Any]) -> MoESpec:
        return MoESpec(routing(values, scores="logits", weights="softmax"), values["intermediate_size"])
