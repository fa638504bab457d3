"""Kimi-Linear: Kimi Delta Attention, latent attention without rotary embedding in some layers, V3's experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.worker.models.deepseek import DeepseekV3
from quire.worker.spec.model import LayerSpec
from quire.worker.spec.rope import RopeSpec
from quire.worker.spec.state import DeltaSpec
from quire.worker.transformer.reader import FULL, STATE

# keys of linear_attn_config, and the names of transformers
_NESTED = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
_PROJECTIONS = "gate_proj", "up_proj", "down_proj"


class KimiLinear(DeepseekV3):
    config_defaults = DeepseekV3.config_defaults | {
        "model_type": "kimi_linear",
        "vocab_size": 163840,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 27,
        "num_attention_heads": 32,
        "max_position_embeddings": 1048576,
        "rms_norm_eps": 1e-5,
        "moe_intermediate_size": 1024,
        "routed_scaling_factor": 2.446,
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "linear_head_dim": 128,
        "linear_num_heads": 32,
        "linear_conv_kernel_dim": 4,
        "linear_attn_config": None,
        "mla_use_nope": True,
        "moe_router_activation_func": "sigmoid",
    }
    aliases = DeepseekV3.aliases | {
        "model_max_length": "max_position_embeddings",
        "moe_renormalize": "norm_topk_prob",
        "num_expert_group": "n_group",
        "num_shared_experts": "n_shared_experts",
    }
    state_kinds = {STATE: STATE}
    renames = {
        "mlp.gate": "block_sparse_moe.gate",
        "mlp.experts": "block_sparse_moe.experts",
        # of experts, but neither of the shared one nor of dense layers
        "gate_proj": "w1",
        "up_proj": "w3",
        "down_proj": "w2",
        **{f"mlp.{name}": f"mlp.{name}" for name in _PROJECTIONS},
        **{f"mlp.shared_expert.{name}": f"block_sparse_moe.shared_experts.{name}" for name in _PROJECTIONS},
    }

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        kinds, nested = values["layer_types"], values["linear_attn_config"] or {}
        super().complete(values, raw)
        for key, served in (("mla_use_nope", True), ("moe_router_activation_func", "sigmoid")):
            if values[key] != served:
                raise ValueError(f"{key} {values[key]!r} is not supported for Kimi-Linear; it must be {served!r}")
        for key, name in _NESTED.items():
            values[name] = nested.get(key, values[name])
        if kinds is None and "full_attn_layers" in nested:
            full = set(nested["full_attn_layers"])  # counted from 1
            kinds = [FULL if i + 1 in full else STATE for i in range(values["num_hidden_layers"])]
        values["layer_types"] = kinds

    @classmethod
    def ropes(cls, values: dict[str, Any], raw: dict[str, Any]) -> dict[str, RopeSpec]:
        return {}

    @classmethod
    def layer_types(cls, values: dict[str, Any]) -> list[str]:
        return [FULL if i and i % 4 == 0 else STATE for i in range(values["num_hidden_layers"])]

    @classmethod
    def layer(cls, values: dict[str, Any], index: int, kind: str, layer: LayerSpec) -> LayerSpec:
        layer = super().layer(values, index, kind, layer)
        return replace(layer, mixer="kimi_delta", state=kimi_delta(values)) if kind == STATE else layer


def kimi_delta(values: dict[str, Any], **changes: Any) -> DeltaSpec:
    """Return Kimi Delta Attention of the sizes in `values`."""
    heads, dim = values["linear_num_heads"], values["linear_head_dim"]
    fields = {"decay_dim": dim, "low_rank": dim, "gate": "sigmoid"}
    return DeltaSpec(heads, heads, dim, dim, values["linear_conv_kernel_dim"], **fields | changes)
