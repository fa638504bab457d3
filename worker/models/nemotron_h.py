"""Nemotron-H and Nemotron 3: layers of a single mixer, MLP or mixture of experts; attention has no rotary embedding.
Experts have no gate, and may have a width of their own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.worker.spec.model import LayerSpec
from quire.worker.spec.moe import MoESpec
from quire.worker.spec.rope import RopeSpec
from quire.worker.transformer.decoder import CausalLM
from quire.worker.transformer.mamba_reader import pure_mamba2
from quire.worker.transformer.moe_reader import MOE_DEFAULTS, MoEFamily, sigmoid_routing
from quire.worker.transformer.reader import COMMON_DEFAULTS, FULL, STATE

_MLP, _MOE = "mlp", "moe"
_PATTERN = {"M": STATE, "-": _MLP, "*": FULL, "E": _MOE}


class NemotronH(CausalLM):
    config_defaults = (
        COMMON_DEFAULTS
        | MOE_DEFAULTS
        | {
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
            "time_step_limit": (0.0, float("inf")),
            "norm_topk_prob": True,
            "n_shared_experts": 1,
            "moe_intermediate_size": 7688,
            "moe_shared_expert_intermediate_size": 7688,
            "moe_latent_size": None,
        }
    )
    aliases = (
        CausalLM.aliases | MoEFamily.aliases | {"mlp_hidden_act": "hidden_act", "mamba_dt_limit": "time_step_limit"}
    )
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
        "mlp.shared_expert": "mixer.shared_experts",
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
    def moe(cls, values: dict[str, Any]) -> MoESpec:
        """Return the spec of the layers with experts."""
        latent = values["moe_latent_size"] or 0
        if latent and values["mlp_bias"]:
            raise ValueError("mlp_bias true is not supported with moe_latent_size")
        return MoESpec(
            sigmoid_routing(values),
            values["moe_intermediate_size"],
            activation=values["hidden_act"],
            gated=False,
            latent_size=latent,
            bias=values["mlp_bias"],
            shared_size=values["moe_shared_expert_intermediate_size"] if values["n_shared_experts"] else 0,
        )

    @classmethod
    def layer(cls, values: dict[str, Any], index: int, kind: str, layer: LayerSpec) -> LayerSpec:
        layer = super().layer(values, index, kind, layer)
        match kind:
            case "mlp":
                return replace(layer, mixer="none", attends=False)
            case "moe":
                return replace(layer, mixer="none", mlp="moe", attends=False, moe=cls.moe(values))
            case "full_attention":
                return replace(layer, mlp="none", rope=None)
        state = pure_mamba2(values, values["mamba_num_heads"], values["mamba_head_dim"], values["ssm_state_size"])
        return replace(layer, mixer="mamba2", mlp="none", state=state)
