"""AFMoE (Trinity): norms before and after attention and the MLP, a gate per entry of the attended values, windows with
rotary embedding in three of four layers, the others without; experts with sigmoid scores and correction biases.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.worker.spec.model import LayerSpec
from quire.worker.spec.moe import MoESpec
from quire.worker.transformer.decoder import CausalLM
from quire.worker.transformer.moe_reader import MOE_DEFAULTS, MoEFamily, routing
from quire.worker.transformer.reader import COMMON_DEFAULTS, FULL, pattern


class Afmoe(MoEFamily, CausalLM):
    config_defaults = (
        COMMON_DEFAULTS
        | MOE_DEFAULTS
        | {
            "model_type": "afmoe",
            "vocab_size": 200192,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_attention_heads": 16,
            "head_dim": 128,
            "max_position_embeddings": 16384,
            "rms_norm_eps": 1e-5,
            "sliding_window": 1024,
            "global_attn_every_n_layers": 4,
            "num_experts": 64,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1408,
            "num_shared_experts": 2,
            "route_scale": 1.0,
            "mup_enabled": False,
        }
    )
    aliases = CausalLM.aliases | MoEFamily.aliases | {"num_dense_layers": "first_k_dense_replace"}
    facts = {"form": "sandwich", "qk_norm": "head", "entry_gate": True, "norm": "rms_wide", "mlp_bias": False}
    renames = {
        "self_attn.g_proj": "self_attn.gate_proj",
        "pre_feedforward_layernorm": "pre_mlp_layernorm",
        "post_feedforward_layernorm": "post_mlp_layernorm",
        "mlp.gate": "mlp.router.gate",
        "mlp.gate.e_score_correction_bias": "mlp.expert_bias",
        "mlp.shared_expert": "mlp.shared_experts",
    }

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        values["attention_out_bias"] = values["attention_bias"]
        if "num_dense_layers" not in raw:
            values["first_k_dense_replace"] = 1
        if values["mup_enabled"]:
            values["embed_scale"] = values["hidden_size"] ** 0.5

    @classmethod
    def layer_types(cls, values: dict[str, Any]) -> list[str]:
        return pattern(values["num_hidden_layers"], values["global_attn_every_n_layers"])

    @classmethod
    def moe(cls, values: dict[str, Any]) -> MoESpec:
        formula = routing(
            values,
            scores="sigmoid",
            weights="normalized",
            scale=values["route_scale"],
            epsilon=1e-20,
            correction=True,
        )
        size = values["moe_intermediate_size"]
        return MoESpec(formula, size, shared_size=size * values["num_shared_experts"])

    @classmethod
    def layer(cls, values: dict[str, Any], index: int, kind: str, layer: LayerSpec) -> LayerSpec:
        layer = super().layer(values, index, kind, layer)
        return replace(layer, rope=None) if kind == FULL else layer
