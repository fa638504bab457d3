"""Jamba: Mamba 1 with norms of dt, B and C, attention without rotary embedding and experts in some layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.worker.spec.model import LayerSpec
from quire.worker.spec.moe import MoESpec
from quire.worker.spec.rope import RopeSpec
from quire.worker.transformer.decoder import CausalLM
from quire.worker.transformer.mamba_reader import mamba1
from quire.worker.transformer.moe_reader import MOE_DEFAULTS, MoEFamily, softmax_routing
from quire.worker.transformer.reader import COMMON_DEFAULTS, FULL, STATE


class Jamba(MoEFamily, CausalLM):
    config_defaults = (
        COMMON_DEFAULTS
        | MOE_DEFAULTS
        | {
            "model_type": "jamba",
            "vocab_size": 65536,
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 262144,
            "num_experts": 16,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "attn_layer_period": 8,
            "attn_layer_offset": 4,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_dt_rank": "auto",
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
            "mlp_layer_types": None,  # of GGUF files
        }
    )
    facts = {"rope": None}
    state_kinds = {STATE: STATE, "mamba": STATE, "attention": FULL}
    renames = {
        "model.norm": "model.final_layernorm",
        "post_attention_layernorm": "pre_ff_layernorm",
        "mlp": "feed_forward",
        "mlp.gate": "feed_forward.router",
    }

    @classmethod
    def ropes(cls, values: dict[str, Any], raw: dict[str, Any]) -> dict[str, RopeSpec]:
        return {}

    @classmethod
    def layer_types(cls, values: dict[str, Any]) -> list[str]:
        period, offset = values["attn_layer_period"], values["attn_layer_offset"]
        return [FULL if i % period == offset else STATE for i in range(values["num_hidden_layers"])]

    @classmethod
    def moe(cls, values: dict[str, Any]) -> MoESpec:
        return MoESpec(softmax_routing(values), values["intermediate_size"])

    @classmethod
    def is_sparse(cls, values: dict[str, Any], index: int) -> bool:
        if kinds := values["mlp_layer_types"]:
            return kinds[index] == "sparse"
        of_experts = index % values["expert_layer_period"] == values["expert_layer_offset"]
        return of_experts and values["num_experts"] > 1

    @classmethod
    def layer(cls, values: dict[str, Any], index: int, kind: str, layer: LayerSpec) -> LayerSpec:
        layer = replace(super().layer(values, index, kind, layer), rope=None)
        if kind != STATE:
            return layer
        keys = ("d_state", "state_size"), ("d_conv", "conv_kernel"), ("dt_rank", "time_step_rank")
        sizes = {name: values[f"mamba_{key}"] for key, name in keys}
        sizes |= {"use_conv_bias": values["mamba_conv_bias"], "use_bias": values["mamba_proj_bias"]}
        state = mamba1(
            values | sizes,
            int(values["mamba_expand"] * values["hidden_size"]),
            norms="weight",
            eps=values["rms_norm_eps"],
        )
        return replace(layer, mixer="mamba1", state=state)
