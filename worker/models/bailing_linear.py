"""Ling and Ring 2.5 and 2.6 (Bailing): lightning attention with rotated heads, latent attention in every n-th layer,
DeepSeek V3's experts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.worker.models.bailing_hybrid import BailingHybrid
from quire.worker.models.deepseek import DeepseekV3
from quire.worker.spec.model import LayerSpec
from quire.worker.spec.moe import MoESpec, RoutingSpec
from quire.worker.spec.rope import RopeSpec, read_rope
from quire.worker.spec.state import LightningSpec
from quire.worker.transformer.moe_reader import MoEFamily, grouped_routing
from quire.worker.transformer.reader import STATE

_LINEAR = "linear"  # name of the embedding of lightning attention
_SERVED = {"score_function": ("sigmoid", "softmax"), "router_dtype": (None, "fp32")}


class BailingLinear(DeepseekV3):
    config_defaults = DeepseekV3.config_defaults | {
        "model_type": "bailing_moe_v2_5",
        "vocab_size": 157184,
        "hidden_size": 4096,
        "intermediate_size": 9216,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "rope_theta": 600000.0,
        "head_dim": 128,
        "partial_rotary_factor": 1.0,
        "first_k_dense_replace": 0,
        "layer_group_size": 8,
        "group_norm_size": 1,
        "use_qk_norm": False,
        "use_bias": False,
        "use_qkv_bias": False,
        "use_linear_silu": None,
        "linear_silu": False,
        "linear_rope": True,
        "num_shared_experts": 1,
        "moe_shared_expert_intermediate_size": None,
        "moe_router_enable_expert_bias": True,
        "score_function": "sigmoid",
        "router_dtype": None,
    }
    aliases = DeepseekV3.aliases | MoEFamily.aliases
    state_kinds = BailingHybrid.state_kinds
    renames = BailingHybrid.renames
    layer_types = BailingHybrid.layer_types

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        kinds, part = values["layer_types"], values["partial_rotary_factor"]
        values["linear_head_dim"] = values["head_dim"] or values["hidden_size"] // values["num_attention_heads"]
        super().complete(values, raw)
        values.update(layer_types=kinds, linear_rotary=part)
        for key, served in _SERVED.items():
            if values[key] not in served:
                raise ValueError(f"{key} {values[key]!r} is not supported for Ling 2.5; it must be one of {served}")
        if not values["linear_rope"]:
            raise ValueError("linear_rope false is not supported for Ling 2.5")
        if values["num_attention_heads"] & (values["num_attention_heads"] - 1):
            raise ValueError("num_attention_heads must be a power of 2 for Ling 2.5")

    @classmethod
    def ropes(cls, values: dict[str, Any], raw: dict[str, Any]) -> dict[str, RopeSpec]:
        rope = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
        own = values | {"head_dim": values["linear_head_dim"], "partial_rotary_factor": values["linear_rotary"]}
        whole = {key: value for key, value in rope.items() if key != "partial_rotary_factor"}
        linear = read_rope(rope, own | {"rope_interleaved": False}, raw)
        return {"default": read_rope(whole, values | {"rope_interleaved": True}, raw), _LINEAR: linear}

    @classmethod
    def routing(cls, values: dict[str, Any]) -> RoutingSpec:
        correction = bool(values["moe_router_enable_expert_bias"])
        return grouped_routing(values, scores=values["score_function"], correction=correction, float32=True)

    @classmethod
    def moe(cls, values: dict[str, Any]) -> MoESpec:
        size = values["moe_intermediate_size"]
        shared = (values["moe_shared_expert_intermediate_size"] or size) * (values["num_shared_experts"] or 0)
        return MoESpec(cls.routing(values), size, shared_size=shared)

    @classmethod
    def layer(cls, values: dict[str, Any], index: int, kind: str, layer: LayerSpec) -> LayerSpec:
        layer = super().layer(values, index, kind, layer)
        if kind != STATE:
            return layer
        silu = values["linear_silu"] if values["use_linear_silu"] is None else values["use_linear_silu"]
        state = LightningSpec(
            values["num_attention_heads"],
            values["linear_head_dim"],
            1 - index / max(values["num_hidden_layers"] - 1, 1) + 1e-5,
            values["group_norm_size"],
            bool(silu),
            values["use_qk_norm"],
            values["use_bias"] or values["use_qkv_bias"],
            values["use_bias"],
        )
        return replace(layer, mixer="rotary_lightning", rope=_LINEAR, head_dim=values["linear_head_dim"], state=state)
