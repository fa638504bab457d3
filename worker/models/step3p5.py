"""Step 3.5 and 3.7: windows in most layers, which have more heads, a gate per head, norms that store w - 1, experts
with sigmoid scores and correction biases, and bounded activations in some layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.worker.spec.model import LayerSpec
from quire.worker.spec.moe import MoESpec
from quire.worker.spec.rope import RopeSpec, read_rope
from quire.worker.transformer.decoder import CausalLM
from quire.worker.transformer.moe_reader import MOE_DEFAULTS, MoEFamily, routing
from quire.worker.transformer.reader import COMMON_DEFAULTS, FULL, SLIDING

_LISTS = "layer_types", "mlp_layer_types", "swiglu_limits", "swiglu_limits_shared", "partial_rotary_factors"


class Step3p5(MoEFamily, CausalLM):
    config_defaults = (
        COMMON_DEFAULTS
        | MOE_DEFAULTS
        | {
            "model_type": "step3p5",
            "vocab_size": 128815,
            "intermediate_size": 11264,
            "num_hidden_layers": 45,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 128000,
            "rms_norm_eps": 1e-5,
            "num_experts": 288,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1280,
            "share_expert_dim": 1280,
            "moe_router_scaling_factor": 1.0,
            "norm_expert_weight": True,
            "mlp_layer_types": None,
            "moe_layers_enum": None,
            "num_sliding_attention_heads": None,
            "attention_other_setting": None,
            "partial_rotary_factors": None,
            "use_rope_layers": None,
            "use_head_wise_attn_gate": True,
            "yarn_only_types": None,
            "swiglu_limits": None,
            "swiglu_limits_shared": None,
        }
    )
    aliases = (
        CausalLM.aliases
        | MoEFamily.aliases
        | {"num_attention_groups": "num_key_value_heads", "moe_top_k": "num_experts_per_tok"}
    )
    facts = {"norm": "rms_offset", "qk_norm": "head", "mlp_bias": False, "attention_out_bias": False}
    renames = {
        "mlp.gate": "moe.gate",
        "mlp.gate.e_score_correction_bias": "moe.router_bias",
        "mlp.experts": "moe",
        "mlp.shared_expert": "share_expert",
    }

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        count = values["num_hidden_layers"]
        for key in _LISTS:  # which are longer by layers that draft tokens
            values[key] = values[key] and values[key][:count]
        listed = values["moe_layers_enum"]
        if listed is not None and values["mlp_layer_types"] is None:
            sparse = {int(i) for i in (listed.split(",") if isinstance(listed, str) else listed)}
            values["mlp_layer_types"] = ["sparse" if i in sparse else "dense" for i in range(count)]
        values["first_k_dense_replace"] = 3
        other = values["attention_other_setting"] or {}
        values["num_sliding_attention_heads"] = values["num_sliding_attention_heads"] or other.get(
            "num_attention_heads"
        )
        for key, name in (("num_attention_groups", "num_key_value_heads"), ("head_dim", "head_dim")):
            if other.get(key, values[name]) != values[name]:
                raise ValueError(f"attention_other_setting with another {key} is not supported for Step 3.5")
        if not all(values["use_rope_layers"] or ()):
            raise ValueError("use_rope_layers with layers without rotary embedding is not supported for Step 3.5")
        values["head_gate"] = bool(values["use_head_wise_attn_gate"])

    @classmethod
    def ropes(cls, values: dict[str, Any], raw: dict[str, Any]) -> dict[str, RopeSpec]:
        given, kinds = raw.get("rope_parameters") or {}, values["layer_types"] or cls.layer_types(values)
        if any(isinstance(value, dict) for value in given.values()):
            return super().ropes(values, raw)
        return {kind: cls._rope(values, raw, kind, kinds.index(kind)) for kind in set(kinds)}

    @classmethod
    def _rope(cls, values: dict[str, Any], raw: dict[str, Any], kind: str, index: int) -> RopeSpec:
        """Return the embedding of the layers of a kind, of which `index` is one, from the lists of the published files.
        """
        scaled = kind in (values["yarn_only_types"] or (FULL,))
        own = {key: values[key] for key in ("rope_theta", "partial_rotary_factors")}
        theta, part = (value[index] if isinstance(value, list) else value for value in own.values())
        values = values | {"rope_theta": theta, "partial_rotary_factor": part or 1.0}
        return read_rope(dict(raw.get("rope_scaling") or {}) if scaled else {}, values, raw)

    @classmethod
    def moe(cls, values: dict[str, Any]) -> MoESpec:
        formula = routing(
            values,
            scores="sigmoid",
            weights="normalized" if values["norm_expert_weight"] else "scores",
            scale=values["moe_router_scaling_factor"],
            correction=True,
            float32=True,
        )
        return MoESpec(formula, values["moe_intermediate_size"], shared_size=values["share_expert_dim"])

    @classmethod
    def layer(cls, values: dict[str, Any], index: int, kind: str, layer: LayerSpec) -> LayerSpec:
        layer = super().layer(values, index, kind, layer)
        if kind == SLIDING and values["num_sliding_attention_heads"]:
            layer = replace(layer, num_heads=values["num_sliding_attention_heads"])
        limit, shared = ((values[key] or {index: 0})[index] for key in ("swiglu_limits", "swiglu_limits_shared"))
        if layer.moe is None:
            if shared:
                raise ValueError("swiglu_limits_shared of a layer without experts is not supported for Step 3.5")
            return layer
        bounds = {"activation": limit, "shared_activation": shared}
        names = {key: f"bounded_silu:{float(bound):g}" if bound else "silu" for key, bound in bounds.items()}
        return replace(layer, moe=replace(layer.moe, **names))
