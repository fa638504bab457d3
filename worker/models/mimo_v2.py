"""MiMo-V2-Flash: windows with sinks and twice the KV heads in five of six layers, values that are narrower than keys
and scaled, a third of each head rotated, DeepSeek V3's experts without a shared one. Files of V2.5 hold q, k and v as
one tensor, divided into those of several ranks, whose FP8 blocks begin anew.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.worker.spec.model import LayerSpec, ModelSpec
from quire.worker.spec.moe import MoESpec
from quire.worker.spec.rope import RopeSpec, read_rope
from quire.worker.transformer.decoder import CausalLM
from quire.worker.transformer.moe_reader import MOE_DEFAULTS, MoEFamily, sigmoid_routing
from quire.worker.transformer.mtp_spec import WithMTP
from quire.worker.transformer.reader import COMMON_DEFAULTS, FULL, SLIDING

# keys of windowed layers in the published files, which must be equal to those of the others
_SAME = {
    "swa_num_attention_heads": "num_attention_heads",
    "swa_head_dim": "head_dim",
    "swa_v_head_dim": "v_head_dim",
}


class MiMoV2(WithMTP, MoEFamily, CausalLM):
    config_defaults = (
        COMMON_DEFAULTS
        | MOE_DEFAULTS
        | {
            "model_type": "mimo_v2_flash",
            "vocab_size": 152576,
            "intermediate_size": 16384,
            "num_hidden_layers": 48,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 192,
            "v_head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5000000.0,
            "swa_rope_theta": 10000.0,
            "partial_rotary_factor": 0.334,
            "sliding_window": 129,
            "sliding_window_size": None,
            "hybrid_layer_pattern": None,
            "swa_num_key_value_heads": None,
            "add_swa_attention_sink_bias": True,
            "add_full_attention_sink_bias": False,
            "attention_value_scale": 0.707,
            "attention_projection_layout": None,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "norm_topk_prob": True,
            "n_shared_experts": None,
            "mlp_layer_types": None,
            "moe_layer_freq": None,
        }
        | dict.fromkeys(_SAME)
    )
    aliases = CausalLM.aliases | MoEFamily.aliases | {"layernorm_epsilon": "rms_norm_eps"}
    facts = {"attention_out_bias": False, "mlp_bias": False}
    renames = {"self_attn.sinks": "self_attn.attention_sink_bias"}
    mtp_names = {
        "layer": "model.mtp.layers.{i}",
        "layer.post_attention_layernorm": "model.mtp.layers.{i}.pre_mlp_layernorm",
        "fc": "model.mtp.layers.{i}.eh_proj",
        "pre_fc_norm_embedding": "model.mtp.layers.{i}.enorm",
        "pre_fc_norm_hidden": "model.mtp.layers.{i}.hnorm",
        "norm": "model.mtp.layers.{i}.final_layernorm",
    }
    mtp_default = 3  # of all published files, whose config.json has no key for it

    @classmethod
    def mtp_layer(cls, spec: ModelSpec) -> LayerSpec | None:
        """Return a layer with a window and without experts."""
        windowed = next((layer for layer in spec.layers if layer.window), None)
        return windowed and replace(windowed, mlp="gated", moe=None)

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        for key, name in _SAME.items():
            if values[key] not in (None, values[name]):
                raise ValueError(f"{key} {values[key]!r} that differs from {name} is not supported for MiMo V2")
        if values["add_full_attention_sink_bias"]:
            raise ValueError("add_full_attention_sink_bias true is not supported for MiMo V2")
        if (layout := values["attention_projection_layout"]) not in (None, "split", "fused_qkv"):
            raise ValueError(f"attention_projection_layout {layout!r} is not supported for MiMo V2")
        if values["n_shared_experts"]:
            raise ValueError("n_shared_experts is not supported for MiMo V2")
        if values["sliding_window_size"]:  # the positions before a token's own
            values["sliding_window"] = values["sliding_window_size"] + 1
        if (windows := values["hybrid_layer_pattern"]) and not values["layer_types"]:
            values["layer_types"] = [SLIDING if window == 1 else FULL for window in windows]
        if isinstance(values["moe_layer_freq"], list) and not values["mlp_layer_types"]:
            values["mlp_layer_types"] = ["sparse" if has else "dense" for has in values["moe_layer_freq"]]
        values["first_k_dense_replace"] = 1
        values["routed_scaling_factor"] = values["routed_scaling_factor"] or 1.0
        scale = values["attention_value_scale"]
        values["v_scale"] = 1.0 if scale is None else scale

    @classmethod
    def ropes(cls, values: dict[str, Any], raw: dict[str, Any]) -> dict[str, RopeSpec]:
        given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
        if any(isinstance(value, dict) for value in given.values()):
            return super().ropes(values, raw)
        local = values | {"rope_theta": values["swa_rope_theta"]}
        return {FULL: read_rope(dict(given), values, raw), SLIDING: read_rope({}, local, raw)}

    @classmethod
    def layer_types(cls, values: dict[str, Any]) -> list[str]:
        return [FULL if i == 0 or (i + 1) % 6 == 0 else SLIDING for i in range(values["num_hidden_layers"])]

    @classmethod
    def moe(cls, values: dict[str, Any]) -> MoESpec:
        return MoESpec(sigmoid_routing(values), values["moe_intermediate_size"])

    @classmethod
    def layer(cls, values: dict[str, Any], index: int, kind: str, layer: LayerSpec) -> LayerSpec:
        chunks = values["num_key_value_heads"] if values["attention_projection_layout"] == "fused_qkv" else 0
        layer = super().layer(values, index, kind, layer)
        layer = replace(layer, v_head_dim=values["v_head_dim"], qkv_chunks=chunks)
        if kind == FULL:
            return layer
        heads = values["swa_num_key_value_heads"] or 2 * values["num_key_value_heads"]
        return replace(layer, num_kv_heads=heads, sinks=bool(values["add_swa_attention_sink_bias"]))
