"""Hunyuan with experts: q and k are normalised after rotation, and a shared MLP runs in parallel to the experts."""

from __future__ import annotations

from typing import Any

from quire.worker.spec.model import LayerSpec
from quire.worker.spec.moe import MoESpec
from quire.worker.transformer.decoder import CausalLM
from quire.worker.transformer.moe_reader import MOE_DEFAULTS, MoEFamily, routing
from quire.worker.transformer.reader import COMMON_DEFAULTS

_PER_LAYER = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")  # one number, or one per layer


class HunyuanMoe(MoEFamily, CausalLM):
    config_defaults = (
        COMMON_DEFAULTS
        | MOE_DEFAULTS
        | {
            "model_type": "hunyuan_v1_moe",
            "vocab_size": 290943,
            "intermediate_size": 11008,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "num_experts": 1,
            "num_experts_per_tok": 1,
        }
    )
    facts = {"qk_norm": "late", "mlp_bias": False}
    renames = {
        "self_attn.q_norm": "self_attn.query_layernorm",
        "self_attn.k_norm": "self_attn.key_layernorm",
        "mlp.gate": "mlp.gate.wg",
        "mlp.shared_expert": "mlp.shared_mlp",
    }

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        values["attention_out_bias"] = values["attention_bias"]
        for key in _PER_LAYER:
            if isinstance(values[key], list) and len(values[key]) != values["num_hidden_layers"]:
                raise ValueError(f"{key} has {len(values[key])} numbers for {values['num_hidden_layers']} layers")

    @classmethod
    def layer(cls, values: dict[str, Any], index: int, kind: str, layer: LayerSpec) -> LayerSpec:
        own = {key: values[key][index] for key in _PER_LAYER if isinstance(values[key], list)}
        return super().layer(values | own, index, kind, layer)

    @classmethod
    def moe(cls, values: dict[str, Any]) -> MoESpec:
        size = values["moe_intermediate_size"] or values["intermediate_size"]
        formula = routing(values, weights="normalized", float32=True)
        return MoESpec(formula, size, shared_size=values["intermediate_size"])
