"""Command A with experts: Cohere 2 with a mixture of experts in place of the MLP, after some dense layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch

from quire.worker.layers.linear import WeightFormat
from quire.worker.models.cohere import Cohere2
from quire.worker.spec.model import LayerSpec, ModelSpec
from quire.worker.spec.moe import MoESpec, RoutingSpec
from quire.worker.transformer.blocks import MLPS, DecoderLayer, ParallelLayer
from quire.worker.transformer.decoder import Decoder
from quire.worker.transformer.moe import MoE
from quire.worker.transformer.moe_reader import MOE_DEFAULTS, MoEFamily, routing
from quire.worker.transformer.reader import ALIASES, FULL, pattern


class AveragedMoE(MoE):
    """The mean of the experts' and the shared expert's outputs."""

    def run(self, x: torch.Tensor, chosen: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return super().run(x, chosen) * 0.5


class AveragedLayer(ParallelLayer):
    mlps: ClassVar = MLPS | {"moe": AveragedMoE}


class Cohere2MoeDecoder(Decoder):
    @staticmethod
    def layer_cls(spec: ModelSpec) -> type[DecoderLayer]:
        shares = any(layer.moe and layer.moe.shared_size for layer in spec.layers)
        averages = spec.raw.get("shared_expert_combination_strategy", "average") == "average"
        return AveragedLayer if shares and averages else ParallelLayer


class Cohere2Moe(MoEFamily, Cohere2):
    config_defaults = (
        Cohere2.config_defaults
        | MOE_DEFAULTS
        | {
            "model_type": "cohere2_moe",
            "norm_topk_prob": True,
            "num_shared_experts": 0,
            "shared_expert_combination_strategy": "average",
            "expert_selection_fn": "softmax",
            "mlp_layer_types": None,
            "prefix_dense_sliding_window_pattern": 1,
            "prefix_dense_intermediate_size": None,
        }
    )
    aliases = ALIASES | MoEFamily.aliases
    renames: ClassVar = {"mlp.shared_expert": "mlp.shared_experts"}

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        super().complete(values, raw)
        if raw.get("rms_norm_eps") is not None:
            values.update(norm="rms", rms_norm_eps=raw["rms_norm_eps"])
        else:
            values["rms_norm_eps"] = raw.get("layer_norm_eps") or cls.config_defaults["rms_norm_eps"]
        if values["shared_expert_combination_strategy"] not in ("sum", "average"):
            raise ValueError(
                "shared_expert_combination_strategy must be sum or average, not "
                f"{values['shared_expert_combination_strategy']!r}"
            )

    @classmethod
    def layer_types(cls, values: dict[str, Any]) -> list[str]:
        dense = values["first_k_dense_replace"]
        first = pattern(dense, values["prefix_dense_sliding_window_pattern"])
        return first + pattern(values["num_hidden_layers"] - dense, values["sliding_window_pattern"])

    @classmethod
    def layer(cls, values: dict[str, Any], index: int, kind: str, layer: LayerSpec) -> LayerSpec:
        rope, layer = layer.rope, super().layer(values, index, kind, layer)
        if layer.moe is not None:
            return layer
        turns = kind != FULL or values["prefix_dense_sliding_window_pattern"] == 1
        size = values["prefix_dense_intermediate_size"] or layer.intermediate_size
        return replace(layer, intermediate_size=size, rope=rope if turns else None)

    @classmethod
    def moe(cls, values: dict[str, Any]) -> MoESpec:
        size = values["intermediate_size"]
        return MoESpec(cls.routing(values), size, shared_size=values["num_shared_experts"] * size)

    @classmethod
    def routing(cls, values: dict[str, Any]) -> RoutingSpec:
        """Return how the experts are chosen."""
        match values["expert_selection_fn"]:
            case "softmax":
                return routing(values, scores="logits", weights="softmax")
            case "sigmoid":
                return routing(values, scores="sigmoid", weights="normalized" if values["norm_topk_prob"] else "scores")
        raise ValueError(f"expert_selection_fn must be softmax or sigmoid, not {values['expert_selection_fn']!r}")

    def make_decoder(self, spec: ModelSpec, max_model_len: int, weights: WeightFormat) -> Decoder:
        return Cohere2MoeDecoder(spec, max_model_len, weights)
