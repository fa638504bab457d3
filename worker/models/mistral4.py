"""Mistral 4: latent attention whose queries are scaled by their position, and softmax routing among groups of
experts.
"""

from __future__ import annotations

from typing import Any

from quire.worker.models.deepseek import DeepseekV3
from quire.worker.spec.moe import RoutingSpec
from quire.worker.spec.rope import RopeSpec, read_ropes
from quire.worker.transformer.moe_reader import grouped_routing

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}


class Mistral4(DeepseekV3):
    config_defaults = DeepseekV3.config_defaults | {
        "model_type": "mistral4",
        "vocab_size": 131072,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "max_position_embeddings": 1048576,
        "num_experts": 128,
        "num_experts_per_tok": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        "routed_scaling_factor": 1.0,
        "kv_lora_rank": 256,
        "q_lora_rank": 1024,
        "qk_nope_head_dim": 64,
    }

    @classmethod
    def ropes(cls, values: dict[str, Any], raw: dict[str, Any]) -> dict[str, RopeSpec]:
        # the factor is that of a whole head, of which `values` describe the rotated part
        given = dict(raw.get("rope_parameters") or _YARN) | {"partial_rotary_factor": None}
        return read_ropes(values, {**raw, "rope_parameters": given})

    @classmethod
    def routing(cls, values: dict[str, Any]) -> RoutingSpec:
        return grouped_routing(values)
