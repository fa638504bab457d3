"""LFM2: short convolutions, and attention in some layers, with experts in LFM2-MoE."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.worker.spec.model import LayerSpec
from quire.worker.spec.moe import MoESpec
from quire.worker.spec.state import ShortConvSpec
from quire.worker.transformer.decoder import CausalLM
from quire.worker.transformer.moe_reader import MOE_DEFAULTS, MoEFamily, routing
from quire.worker.transformer.reader import COMMON_DEFAULTS, FULL, STATE


class Lfm2(CausalLM):
    config_defaults = COMMON_DEFAULTS | {
        "model_type": "lfm2",
        "vocab_size": 65536,
        "hidden_size": 2560,
        "intermediate_size": 12288,
        "block_ff_dim": None,
        "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
        "num_key_value_heads": 8,
        "max_position_embeddings": 128000,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "rope_theta": 1e6,
        "full_attn_idxs": None,
        "conv_L_cache": 3,
        "conv_bias": False,
    }
    facts = {"qk_norm": "head", "hidden_act": "silu"}
    state_kinds = {"conv": STATE}
    renames = {
        "model.norm": "model.embedding_norm",
        "input_layernorm": "operator_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_norm": "self_attn.q_layernorm",
        "self_attn.k_norm": "self_attn.k_layernorm",
        "self_attn.o_proj": "self_attn.out_proj",
        "mlp": "feed_forward",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
    }

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        values["tie_word_embeddings"] = raw.get("tie_embedding", values["tie_word_embeddings"])
        size = values["block_ff_dim"] or values["intermediate_size"]
        if values["block_auto_adjust_ff_dim"]:
            size = int(values["block_ffn_dim_multiplier"] * int(2 * size / 3))
            multiple = values["block_multiple_of"]
            size = -(-size // multiple) * multiple
        values["intermediate_size"] = size

    @classmethod
    def layer_types(cls, values: dict[str, Any]) -> list[str]:
        full = values["full_attn_idxs"]
        return [FULL if full is None or i in full else STATE for i in range(values["num_hidden_layers"])]

    @classmethod
    def layer(cls, values: dict[str, Any], index: int, kind: str, layer: LayerSpec) -> LayerSpec:
        layer = super().layer(values, index, kind, layer)
        if kind != STATE:
            return layer
        state = ShortConvSpec(values["conv_L_cache"], values["hidden_size"], values["conv_bias"])
        return replace(layer, mixer="short_conv", state=state)


class Lfm2Moe(MoEFamily, Lfm2):
    config_defaults = (
        Lfm2.config_defaults
        | MOE_DEFAULTS
        | {
            "model_type": "lfm2_moe",
            "hidden_size": 2048,
            "intermediate_size": 7168,
            "moe_intermediate_size": 1792,
            "num_dense_layers": 2,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "use_expert_bias": True,
            "norm_topk_prob": True,
            "block_auto_adjust_ff_dim": False,
        }
    )
    renames = Lfm2.renames | {
        "gate_proj": "w1",
        "up_proj": "w3",
        "down_proj": "w2",
        "mlp.gate.e_score_correction_bias": "feed_forward.expert_bias",
    }

    @classmethod
    def moe(cls, values: dict[str, Any]) -> MoESpec:
        formula = routing(
            values,
            scores="sigmoid",
            weights="normalized" if values["norm_topk_prob"] else "scores",
            scale=values["routed_scaling_factor"],
            epsilon=1e-6,
            correction=values["use_expert_bias"],
        )
        return MoESpec(formula, values["moe_intermediate_size"])

    @classmethod
    def is_sparse(cls, values: dict[str, Any], index: int) -> bool:
        return index >= values["num_dense_layers"]
