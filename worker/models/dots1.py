"""dots.llm1: norms of q and k, windows in the upper layers, DeepSeek V3's experts."""

from __future__ import annotations

from typing import Any

from quire.worker.spec.moe import MoESpec
from quire.worker.transformer.decoder import CausalLM
from quire.worker.transformer.moe_reader import MOE_DEFAULTS, MoEFamily, sigmoid_routing
from quire.worker.transformer.reader import COMMON_DEFAULTS, FULL, SLIDING


class Dots1(MoEFamily, CausalLM):
    config_defaults = (
        COMMON_DEFAULTS
        | MOE_DEFAULTS
        | {
            "model_type": "dots1",
            "vocab_size": 152064,
            "hidden_size": 4608,
            "intermediate_size": 10944,
            "num_hidden_layers": 62,
            "max_position_embeddings": 2048,
            "sliding_window": 4096,
            "max_window_layers": 62,
            "num_experts": 128,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1408,
            "n_shared_experts": 2,
        }
    )
    facts = {"qk_norm": "head", "mlp_bias": False}
    renames = {"mlp.shared_expert": "mlp.shared_experts"}

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        values["attention_out_bias"] = values["attention_bias"]

    @classmethod
    def layer_types(cls, values: dict[str, Any]) -> list[str]:
        first, window = values["max_window_layers"], values["sliding_window"]
        return [SLIDING if window and i >= first else FULL for i in range(values["num_hidden_layers"])]

    @classmethod
    def moe(cls, values: dict[str, Any]) -> MoESpec:
        size = values["moe_intermediate_size"]
        return MoESpec(sigmoid_routing(values), size, shared_size=size * (values["n_shared_experts"] or 0))
