"""The parts of a mixture-of-experts layer, read from config.json. Torch-free."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from quire.worker.spec.model import LayerSpec
from quire.worker.spec.moe import MoESpec, RoutingSpec

# keys of config.json that most families share, with their defaults
MOE_DEFAULTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": None,
    "norm_topk_prob": False,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 0,
    "mlp_only_layers": None,
    "decoder_sparse_step": 1,
}


class MoEFamily:
    """Reads the experts' keys of a family's config.json; a mixin of `ConfigReader`."""

    aliases: ClassVar[dict[str, str]] = {
        "num_local_experts": "num_experts",
        "n_routed_experts": "num_experts",
        "moe_num_experts": "num_experts",
        "moe_k": "num_experts_per_tok",
        "moe_topk": "num_experts_per_tok",
        "top_k_experts": "num_experts_per_tok",
        "num_experts_per_token": "num_experts_per_tok",
    }

    @classmethod
    def moe(cls, values: dict[str, Any]) -> MoESpec:
        """Return the spec of the layers with experts."""
        raise NotImplementedError

    @classmethod
    def is_sparse(cls, values: dict[str, Any], index: int) -> bool:
        """Return whether layer `index` has experts."""
        if kinds := values.get("mlp_layer_types"):
            return kinds[index] == "sparse"
        step, dense = values["decoder_sparse_step"], values["mlp_only_layers"] or []
        return index >= values["first_k_dense_replace"] and index not in dense and (index + 1) % step == 0

    @classmethod
    def layer(cls, values: dict[str, Any], index: int, kind: str, layer: LayerSpec) -> LayerSpec:
        layer = super().layer(values, index, kind, layer)
        return replace(layer, mlp="moe", moe=cls.moe(values)) if cls.is_sparse(values, index) else layer


def routing(values: dict[str, Any], **formula: Any) -> RoutingSpec:
    """Return the routing among the experts of config.json by the given formula.

    Raises ValueError, naming the key, for numbers that do not fit each other.
    """
    num, top_k = values["num_experts"], values["num_experts_per_tok"]
    for key in ("num_experts", "num_experts_per_tok"):
        if not isinstance(values[key], int) or values[key] < 1:
            raise ValueError(f"{key} must be a positive integer, not {values[key]!r}")
    groups, top_groups = formula.get("num_groups", 1) or 1, formula.get("top_groups", 1) or 1
    if num % groups or not 0 < top_groups <= groups:
        raise ValueError(f"n_group {groups} must divide the {num} experts, and topk_group {top_groups} not exceed it")
    if top_k > num // groups * top_groups:
        raise ValueError(f"num_experts_per_tok {top_k} is more than the {num // groups * top_groups} experts to choose")
    return RoutingSpec(num, top_k, **formula | {"num_groups": groups, "top_groups": top_groups})


def grouped_routing(values: dict[str, Any], **formula: Any) -> RoutingSpec:
    """Return `routing` of experts in groups, whose score is the sum of their two best, with scaled weights."""
    return routing(
        values,
        weights="normalized" if values["norm_topk_prob"] else "scores",
        scale=values["routed_scaling_factor"],
        epsilon=1e-20,
        num_groups=values["n_group"],
        top_groups=values["topk_group"],
        group_best=2,
        **formula,
    )


def sigmoid_routing(values: dict[str, Any]) -> RoutingSpec:
    """Return the routing of DeepSeek V3 (https://arxiv.org/abs/2412.19437), which Kimi K2 and GLM-4.5 share: groups,
    sigmoid scores and correction biases.
    """
    return grouped_routing(values, scores="sigmoid", correction=True, float32=True)


def softmax_routing(values: dict[str, Any]) -> RoutingSpec:
    """Return softmax over all experts, whose chosen scores are the weights, normalized with `norm_topk_prob`."""
    return routing(values, weights="normalized" if values["norm_topk_prob"] else "scores")
