"""Llama 4 (text): layers with rotary embedding attend within chunks of positions, the others to everything with scores
that grow with the position; experts whose inputs are weighed, and a shared expert.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.worker.spec.model import LayerSpec
from quire.worker.spec.moe import MoESpec
from quire.worker.spec.rope import RopeSpec
from quire.worker.transformer.decoder import CausalLM
from quire.worker.transformer.moe_reader import MOE_DEFAULTS, MoEFamily, routing
from quire.worker.transformer.reader import ALIASES, COMMON_DEFAULTS, FULL

CHUNKED = "chunked_attention"


class Llama4(MoEFamily, CausalLM):
    config_defaults = (
        COMMON_DEFAULTS
        | MOE_DEFAULTS
        | {
            "model_type": "llama4_text",
            "vocab_size": 202048,
            "hidden_size": 5120,
            "intermediate_size": 8192,  # of each expert
            "intermediate_size_mlp": 16384,
            "num_hidden_layers": 48,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "num_experts": 16,
            "num_experts_per_tok": 1,
            "moe_layers": None,
            "interleave_moe_layer_step": 1,
            "use_qk_norm": True,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
            "attention_chunk_size": 8192,
            "attn_temperature_tuning": True,
            "floor_scale": 8192,
            "attn_scale": 0.1,
        }
    )
    aliases = ALIASES | MoEFamily.aliases
    facts = {"rope_interleaved": True, "mlp_bias": False}
    renames = {"mlp": "feed_forward", "mlp.gate": "feed_forward.router"}

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        num_layers, interval = values["num_hidden_layers"], values["no_rope_layer_interval"]
        # 1 for a layer with rotary embedding, despite the name
        values["no_rope_layers"] = values["no_rope_layers"] or [int((i + 1) % interval != 0) for i in range(num_layers)]
        if len(values["no_rope_layers"]) < num_layers:
            raise ValueError(f"no_rope_layers has {len(values['no_rope_layers'])} numbers for {num_layers} layers")
        if values["moe_layers"] is None:
            step = values["interleave_moe_layer_step"]
            values["moe_layers"] = list(range(step - 1, num_layers, step))
        values["attention_out_bias"] = values["attention_bias"]
        if values["attn_temperature_tuning"]:
            values["still_query_scale"] = float(values["attn_scale"]), float(values["floor_scale"])

    @classmethod
    def layer_specs(
        cls, values: dict[str, Any], raw: dict[str, Any], ropes: dict[str, RopeSpec]
    ) -> tuple[LayerSpec, ...]:
        kinds = values["layer_types"] or [CHUNKED if rope else FULL for rope in values["no_rope_layers"]]
        unknown, size = set(kinds) - {CHUNKED, FULL}, values["attention_chunk_size"]
        if unknown or len(kinds) != values["num_hidden_layers"]:
            raise ValueError(
                f"layer_types must name {CHUNKED} or {FULL} for each of {values['num_hidden_layers']} layers, found "
                f"{len(kinds)}: {sorted(set(kinds))}"
            )
        if CHUNKED in kinds and (not isinstance(size, int) or size < 1):
            raise ValueError(f"attention_chunk_size must be a positive integer, not {size!r}")
        layers = super().layer_specs(values | {"layer_types": [FULL] * len(kinds)}, raw, ropes)
        return tuple(replace(one, chunk=size if kind == CHUNKED else None) for one, kind in zip(layers, kinds))

    @classmethod
    def layer(cls, values: dict[str, Any], index: int, kind: str, layer: LayerSpec) -> LayerSpec:
        layer = super().layer(values, index, kind, layer)
        if layer.moe is None:
            layer = replace(layer, intermediate_size=values["intermediate_size_mlp"])
        if not values["no_rope_layers"][index]:
            return replace(layer, rope=None)
        return replace(layer, qk_norm="late_plain" if values["use_qk_norm"] else None)

    @classmethod
    def is_sparse(cls, values: dict[str, Any], index: int) -> bool:
        return index in values["moe_layers"]

    @classmethod
    def moe(cls, values: dict[str, Any]) -> MoESpec:
        size = values["intermediate_size"]
        chosen = routing(values, scores="logits", weights="sigmoid")
        return MoESpec(chosen, size, weigh_inputs=True, transposed=True, shared_size=size)
