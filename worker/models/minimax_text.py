"""MiniMax-Text-01 and M1: lightning attention, softmax attention in some layers, experts; the residual stream is the
norm of what it was.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.worker.models.mixtral import Mixtral
from quire.worker.spec.model import LayerSpec
from quire.worker.spec.moe import MoESpec
from quire.worker.spec.state import LightningSpec
from quire.worker.transformer.decoder import CausalLM
from quire.worker.transformer.moe_reader import MOE_DEFAULTS, MoEFamily, routing
from quire.worker.transformer.reader import COMMON_DEFAULTS, FULL, STATE

_FACTORS = ("full_attn", "linear_attn", "mlp")


class MiniMaxText(MoEFamily, CausalLM):
    config_defaults = (
        COMMON_DEFAULTS
        | MOE_DEFAULTS
        | {
            "model_type": "minimax",
            "vocab_size": 32000,
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "rotary_dim": None,
            "attn_type_list": None,
            "postnorm": True,
            "shared_intermediate_size": 0,
        }
        | {f"{name}_{factor}_factor": 1.0 for name in _FACTORS for factor in ("alpha", "beta")}
    )
    # names of the files with which the family was published
    aliases = MoEFamily.aliases | {
        f"layernorm_{theirs}_{factor}": f"{name}_{factor}_factor"
        for name, theirs in zip(_FACTORS, ("full_attention", "linear_attention", "mlp"))
        for factor in ("alpha", "beta")
    }
    facts = {"form": "normed_residual", "attention_bias": False, "attention_out_bias": False, "mlp_bias": False}
    state_kinds = {STATE: STATE}
    renames = Mixtral.renames
    ignored = (r"\.(slope_rate|query_decay|key_decay|diagonal_decay)$",)  # follow from the sizes

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        if not values["postnorm"]:
            raise ValueError("postnorm false is not supported for MiniMax-Text")
        if values["shared_intermediate_size"]:
            raise ValueError("shared_intermediate_size is not supported for MiniMax-Text: there is no shared expert")
        if values["rotary_dim"]:
            head_dim = values["head_dim"] or values["hidden_size"] // values["num_attention_heads"]
            values["partial_rotary_factor"] = values["rotary_dim"] / head_dim
        if values["attn_type_list"] and not values["layer_types"]:
            values["layer_types"] = [FULL if kind else STATE for kind in values["attn_type_list"]]

    @classmethod
    def layer_types(cls, values: dict[str, Any]) -> list[str]:
        return [STATE if i % 2 else FULL for i in range(values["num_hidden_layers"])]

    @classmethod
    def moe(cls, values: dict[str, Any]) -> MoESpec:
        return MoESpec(routing(values, weights="normalized"), values["intermediate_size"])

    @classmethod
    def layer(cls, values: dict[str, Any], index: int, kind: str, layer: LayerSpec) -> LayerSpec:
        own = "linear_attn" if kind == STATE else "full_attn"
        scales = tuple(float(values[f"{name}_{f}_factor"]) for name in (own, "mlp") for f in ("alpha", "beta"))
        layer = replace(super().layer(values, index, kind, layer), mixer_scales=scales)
        if kind != STATE:
            return layer
        decay = 1 - index / (values["num_hidden_layers"] - 1 + 1e-5) + 1e-5
        state = LightningSpec(values["num_attention_heads"], values["head_dim"], decay)
        return replace(layer, mixer="lightning", state=state)
