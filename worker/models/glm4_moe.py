"""GLM-4.5 and later: half of each head is rotated, the first layers are dense, and DeepSeek V3's routing."""

from __future__ import annotations

from typing import Any

from quire.worker.models.qwen_vl import AxialRope
from quire.worker.spec.moe import MoESpec
from quire.worker.transformer.decoder import CausalLM
from quire.worker.transformer.moe_reader import MOE_DEFAULTS, MoEFamily, sigmoid_routing
from quire.worker.transformer.mtp_spec import WithMTP
from quire.worker.transformer.reader import COMMON_DEFAULTS


class Glm4Moe(WithMTP, MoEFamily, CausalLM):
    config_defaults = (
        COMMON_DEFAULTS
        | MOE_DEFAULTS
        | {
            "model_type": "glm4_moe",
            "vocab_size": 151552,
            "intermediate_size": 10944,
            "num_hidden_layers": 46,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "first_k_dense_replace": 1,
            "use_qk_norm": False,
        }
    )
    facts = {"attention_out_bias": False, "mlp_bias": False}
    renames = {"mlp.shared_expert": "mlp.shared_experts"}

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        values["qk_norm"] = "head" if values["use_qk_norm"] else None

    @classmethod
    def moe(cls, values: dict[str, Any]) -> MoESpec:
        size = values["moe_intermediate_size"]
        return MoESpec(sigmoid_routing(values), size, shared_size=size * values["n_shared_experts"])


class Glm4vMoe(AxialRope, Glm4Moe):
    """The language model of GLM-4.5V: rotary embeddings have three axes."""

    default_section, interleaved_axes = (8, 12, 12), False
    config_defaults = Glm4Moe.config_defaults | {
        "model_type": "glm4v_moe_text",
        "vocab_size": 151424,
        "max_position_embeddings": 65536,
        "attention_bias": True,
        "partial_rotary_factor": 1.0,
    }
