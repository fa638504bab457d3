"""MiniMax M3: heads of q and k are normalised, half of each head is rotated, and MLPs and experts have the bounded
activation of gpt-oss. An index chooses blocks of keys in some layers (`mixers/block_attention.py`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.worker.models.kimi_linear import KimiLinear
from quire.worker.models.minimax_m2 import MiniMaxM2
from quire.worker.spec.cache import IndexSizes
from quire.worker.spec.model import LayerSpec
from quire.worker.spec.moe import MoESpec
from quire.worker.spec.rope import RopeSpec
from quire.worker.transformer.moe_reader import routing
from quire.worker.transformer.reader import FULL

_SPARSE = "minimax_m3_sparse"
# keys of sparse_attention_config, and the names of transformers
_NESTED = {
    "sparse_num_index_heads": "index_n_heads",
    "sparse_index_dim": "index_head_dim",
    "sparse_block_size": "index_block_size",
    "sparse_topk_blocks": "index_topk_blocks",
    "sparse_local_block": "index_local_blocks",
}


class MiniMaxM3(MiniMaxM2):
    config_defaults = MiniMaxM2.config_defaults | {
        "model_type": "minimax_m3_vl_text",
        "hidden_size": 6144,
        "intermediate_size": 3072,
        "dense_intermediate_size": 12288,
        "shared_intermediate_size": 3072,
        "num_hidden_layers": 60,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "max_position_embeddings": 524288,
        "rotary_dim": 64,
        "num_experts": 128,
        "num_experts_per_tok": 4,
        "routed_scaling_factor": 2.0,
        "mlp_layer_types": None,
        "moe_layer_freq": None,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "sparse_attention_config": None,
        "index_block_size": 128,
        "index_topk_blocks": 16,
        "index_local_blocks": 1,
        "index_n_heads": 4,
        "index_head_dim": 128,
    }
    gated_activations = ("clamped_silu",)
    facts = MiniMaxM2.facts | {"qk_norm": "head", "norm": "rms_offset", "hidden_act": "clamped_silu"}
    state_kinds = {_SPARSE: FULL}
    renames = KimiLinear.renames | {
        "mlp.gate.e_score_correction_bias": "block_sparse_moe.e_score_correction_bias",
        **{f"self_attn.indexer.{name}": f"self_attn.index_{name}" for name in ("q_proj", "k_proj", "q_norm", "k_norm")},
    }

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        super().complete(values, raw)
        if (values["swiglu_alpha"], values["swiglu_limit"]) != (1.702, 7.0):
            raise ValueError("swiglu_alpha and swiglu_limit must be 1.702 and 7 for MiniMax M3")
        nested = values["sparse_attention_config"] or {}
        for key, name in _NESTED.items():
            values[name] = nested.get(key, values[name])
        frequency = nested.get("sparse_attention_freq")
        if frequency and values["layer_types"] is None:
            values["layer_types"] = [_SPARSE if sparse else FULL for sparse in frequency]
        if values["moe_layer_freq"] and values["mlp_layer_types"] is None:
            values["mlp_layer_types"] = ["sparse" if sparse else "dense" for sparse in values["moe_layer_freq"]]
        # of the dense layers; experts have their own
        values["expert_size"], values["intermediate_size"] = (
            values["intermediate_size"],
            values["dense_intermediate_size"],
        )

    @classmethod
    def layer_specs(
        cls, values: dict[str, Any], raw: dict[str, Any], ropes: dict[str, RopeSpec]
    ) -> tuple[LayerSpec, ...]:
        layers, kinds = super().layer_specs(values, raw, ropes), values["layer_types"] or ()
        if _SPARSE not in kinds:
            return layers
        sizes = _index_sizes(values)
        return tuple(
            replace(layer, mixer="block_attention", index=sizes) if kind == _SPARSE else layer
            for layer, kind in zip(layers, kinds)
        )

    @classmethod
    def moe(cls, values: dict[str, Any]) -> MoESpec:
        formula = routing(
            values, scores="sigmoid", weights="normalized", scale=values["routed_scaling_factor"], correction=True
        )
        return MoESpec(
            formula,
            values["expert_size"],
            activation="clamped_silu",
            shared_size=values["shared_intermediate_size"],
        )


def _index_sizes(values: dict[str, Any]) -> IndexSizes:
    """Return the sizes of the index. Raises ValueError naming the key."""
    for key in ("index_n_heads", "index_head_dim", "index_block_size", "index_topk_blocks", "index_local_blocks"):
        least = 0 if key == "index_local_blocks" else 1
        if not isinstance(values[key], int) or values[key] < least:
            raise ValueError(f"{key} must be an integer of at least {least}, not {values[key]!r}")
    if values["index_n_heads"] != values["num_key_value_heads"]:
        raise ValueError(
            f"index_n_heads {values['index_n_heads']} must be num_key_value_heads {values['num_key_value_heads']}"
        )
    size = values["index_block_size"]
    return IndexSizes(
        values["index_topk_blocks"] * size,
        values["index_n_heads"],
        values["index_head_dim"],
        block=size,
        local=min(values["index_local_blocks"], values["index_topk_blocks"]),
    )
