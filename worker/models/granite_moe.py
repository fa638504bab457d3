"""Granite 3 and 4 with experts: multipliers of embedding, residual, attention and logits. In some a shared MLP is added
to the experts. Granite 4 also has models without experts, and models with Mamba layers; Granite-MoE-SWA has
Granite-SWA's attention.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.worker.models.granite import GraniteSWA, ropes_by_theta, with_theta
from quire.worker.spec.model import LayerSpec
from quire.worker.spec.moe import MoESpec
from quire.worker.spec.rope import RopeSpec
from quire.worker.transformer.decoder import CausalLM
from quire.worker.transformer.mamba_reader import MAMBA2_DEFAULTS, mamba2
from quire.worker.transformer.moe_reader import MOE_DEFAULTS, MoEFamily, routing
from quire.worker.transformer.reader import COMMON_DEFAULTS, FULL, STATE


class GraniteMoe(MoEFamily, CausalLM):
    config_defaults = (
        COMMON_DEFAULTS
        | MOE_DEFAULTS
        | {
            "model_type": "granitemoe",
            "vocab_size": 32000,
            "intermediate_size": 11008,
            "max_position_embeddings": 2048,
            "embedding_multiplier": 1.0,
            "logits_scaling": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
        }
    )
    facts = {"mlp_bias": False}
    renames = {
        "mlp": "block_sparse_moe",
        "mlp.gate": "block_sparse_moe.router.layer",
        "mlp.experts.gate_up_proj": "block_sparse_moe.input_linear.weight",
        "mlp.experts.down_proj": "block_sparse_moe.output_linear.weight",
    }

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        values.update(
            attention_out_bias=values["attention_bias"],
            embed_scale=values["embedding_multiplier"],
            residual_scale=values["residual_multiplier"],
            logit_scale=1.0 / values["logits_scaling"],
            scale=values["attention_multiplier"],
        )

    @classmethod
    def moe(cls, values: dict[str, Any]) -> MoESpec:
        return MoESpec(routing(values, scores="logits", weights="softmax"), values["intermediate_size"])


class GraniteMoeShared(GraniteMoe):
    config_defaults = GraniteMoe.config_defaults | {
        "model_type": "granitemoeshared",
        "shared_intermediate_size": 0,
        "shared_fused": True,  # not in GGUF files
    }
    facts = GraniteMoe.facts | {"fused": ("gate_up_proj",)}
    renames = GraniteMoe.renames | {
        "mlp.shared_expert.gate_up_proj": "shared_mlp.input_linear",
        "mlp.shared_expert.down_proj": "shared_mlp.output_linear",
        "mlp.gate_up_proj": "shared_mlp.input_linear",
        "mlp.down_proj": "shared_mlp.output_linear",
    }

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        super().complete(values, raw)
        if not values["shared_fused"]:
            values["fused"] = ()

    @classmethod
    def moe(cls, values: dict[str, Any]) -> MoESpec:
        return replace(super().moe(values), shared_size=values["shared_intermediate_size"])


class GraniteMoeSWA(GraniteMoeShared):
    config_defaults = GraniteMoeShared.config_defaults | {
        "model_type": "granitemoe_swa",
        "sliding_window": 128,
        "layer_rope_theta": None,
    }
    facts = GraniteMoeShared.facts | GraniteSWA.facts
    renames = {
        name: found for name, found in GraniteMoeShared.renames.items() if not name.startswith("mlp.experts")
    } | {"mlp.gate": "block_sparse_moe.router"}

    @classmethod
    def layer_types(cls, values: dict[str, Any]) -> list[str]:
        return GraniteSWA.layer_types(values)

    @classmethod
    def ropes(cls, values: dict[str, Any], raw: dict[str, Any]) -> dict[str, RopeSpec]:
        return ropes_by_theta(values, super().ropes(values, raw)["default"])

    @classmethod
    def layer(cls, values: dict[str, Any], index: int, kind: str, layer: LayerSpec) -> LayerSpec:
        return with_theta(values, index, super().layer(values, index, kind, layer))


class GraniteMoeHybrid(GraniteMoeShared):
    """Granite 4: with `num_local_experts` 0 the shared MLP is the only one."""

    config_defaults = GraniteMoeShared.config_defaults | {
        "model_type": "granitemoehybrid",
        "shared_intermediate_size": 1024,
        "position_embedding_type": None,
        "layers_block_type": None,
        **MAMBA2_DEFAULTS,
    }
    state_kinds = {STATE: STATE, "mamba": STATE, "attention": FULL}

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        super().complete(values, raw)
        values["layer_types"] = values["layer_types"] or values["layers_block_type"]

    @classmethod
    def layer_types(cls, values: dict[str, Any]) -> list[str]:
        return [STATE] * values["num_hidden_layers"]

    @classmethod
    def is_sparse(cls, values: dict[str, Any], index: int) -> bool:
        return values["num_experts"] != 0

    @classmethod
    def layer(cls, values: dict[str, Any], index: int, kind: str, layer: LayerSpec) -> LayerSpec:
        layer = super().layer(values, index, kind, layer)
        if layer.moe is None:
            layer = replace(layer, intermediate_size=values["shared_intermediate_size"])
        if kind == STATE:
            return replace(layer, mixer="mamba2", state=mamba2(values))
        return layer if values["position_embedding_type"] == "rope" else replace(layer, rope=None)
