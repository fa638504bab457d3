"""Nemotron-H: layers of a single mixer, MLP or mixture of experts; attention has no rotary embedding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.worker.transformer.config import LayerSpec
from quire.worker.transformer.decoder import CausalLM
from quire.worker.transformer.reader import COMMON_DEFAULTS, FULL, STATE
from quire.worker.transformer.rope import RopeSpec
from quire.worker.transformer.state_spec import Mamba2Spec

_MLP, _MOE = "mlp", "moe"
_PATTERN = {"M": STATE, "-": _MLP, "*": FULL, "E": _MOE}


class NemotronH(CausalLM):
    config_defaults = COMMON_DEFAULTS | {
        "model_type": "nemotron_h",
        "vocab_size": 131072,
        "intermediate_size": 21504,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "hidden_act": "relu2",
        "hybrid_override_pattern": None,
        "layers_block_type": None,
        "ssm_state_size": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "conv_kernel": 4,
        "use_conv_bias": True,
        "use_bias": False,
        "time_step_min": 0.001,
    }
    aliases = CausalLM.aliases | {"mlp_hidden_act": "hidden_act"}
    facts = {"form": "single", "mlp": "plain", "rope": None}
    state_kinds = {STATE: STATE, "mamba": STATE, "attention": FULL, _MLP: _MLP, _MOE: _MOE}
    renames = {
        "model.embed_tokens": "backbone.embeddings",
        "model.norm": "backbone.norm_f",
        "model": "backbone",
        "input_layernorm": "norm",
        "mamba": "mixer",
        "self_attn": "mixer",
        "mlp": "mixer",
    }

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        values["attention_out_bias"] = values["attention_bias"]
        if values["hybrid_override_pattern"] and not values["layers_block_type"]:
            if unknown := set(values["hybrid_override_pattern"]) - _PATTERN.keys():
                raise ValueError(f"hybrid_override_pattern has unknown letters: {', '.join(sorted(unknown))}")
            values["layers_block_type"] = [_PATTERN[letter] for letter in values["hybrid_override_pattern"]]
        values["layer_types"] = values["layer_types"] or values["layers_block_type"]
        if values["layer_types"]:
            values["num_hidden_layers"] = len(values["layer_types"])

    @classmethod
    def ropes(cls, values: dict[str, Any], raw: dict[str, Any]) -> dict[str, RopeSpec]:
        return {}

    @classmethod
    def layer(cls, values: dict[str, Any], index: int, kind: str, layer: LayerSpec) -> LayerSpec:
        layer = super().layer(values, index, kind, layer)
        match kind:
            case "mlp":
                return replace(layer, mixer="none", attends=False)
            case "moe":
                raise ValueError("layers of the type moe are not implemented: their experts have no gate")
            case "full_attention":
                return replace(layer, mlp="none", rope=None)
        state = Mamba2Spec(
            values["mamba_num_heads"],
            values["mamba_head_dim"],
            values["ssm_state_size"],
            values["n_groups"],
            values["conv_kernel"],
            values["use_conv_bias"],
            values["use_bias"],
            float(values["time_step_min"]),
            norm_groups=values["n_groups"],
            eps=values["rms_norm_eps"],
        )
        return replace(layer, mixer="mamba2", mlp="none", state=state)
