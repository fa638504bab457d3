"""Ling 3 (Bailing hybrid): Kimi Delta Attention, latent attention with a gate per head in some layers, DeepSeek V3's
experts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.worker.models.deepseek import DeepseekV3
from quire.worker.models.kimi_linear import KimiLinear, kimi_delta
from quire.worker.spec.model import LayerSpec
from quire.worker.transformer.reader import FULL, STATE


class BailingHybrid(DeepseekV3):
    config_defaults = DeepseekV3.config_defaults | {
        "model_type": "bailing_hybrid",
        "vocab_size": 157184,
        "hidden_size": 2560,
        "intermediate_size": 6144,
        "num_hidden_layers": 42,
        "num_attention_heads": 32,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "rope_theta": 6000000.0,
        "num_experts": 512,
        "moe_intermediate_size": 768,
        "first_k_dense_replace": 2,
        "head_dim": 128,
        "linear_head_dim": None,
        "linear_num_heads": None,
        "linear_conv_kernel_dim": 4,
        "layer_group_size": 6,
        "kda_safe_gate": True,
        "kda_lower_bound": -5.0,
    }
    aliases = KimiLinear.aliases | {"short_conv_kernel_size": "linear_conv_kernel_dim"}
    state_kinds = {STATE: STATE}
    renames = {
        "model.embed_tokens": "model.word_embeddings",
        "self_attn": "attention",
        "o_proj": "dense",
        "mlp.gate.e_score_correction_bias": "mlp.gate.expert_bias",
        "mlp.shared_expert": "mlp.shared_experts",
    }

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        kinds = values["layer_types"]
        values["linear_head_dim"] = values["linear_head_dim"] or values["head_dim"]
        values["linear_num_heads"] = values["linear_num_heads"] or values["num_attention_heads"]
        values["q_lora_rank"] = None  # transformers writes one, but there are no such tensors
        super().complete(values, raw)
        values["layer_types"] = kinds

    @classmethod
    def layer_types(cls, values: dict[str, Any]) -> list[str]:
        size = values["layer_group_size"]
        return [FULL if (i + 1) % size == 0 else STATE for i in range(values["num_hidden_layers"])]

    @classmethod
    def layer(cls, values: dict[str, Any], index: int, kind: str, layer: LayerSpec) -> LayerSpec:
        layer = super().layer(values, index, kind, layer)
        if kind != STATE:
            return replace(layer, head_gate=True)
        bound = float(values["kda_lower_bound"]) if values["kda_safe_gate"] else None
        return replace(layer, mixer="kimi_delta", state=kimi_delta(values, low_rank=0, lower_bound=bound))
