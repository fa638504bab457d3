"""Mellum 2: Qwen 3 with experts, windows in some layers and rotary embeddings by kind of attention."""

from __future__ import annotations

from typing import Any

from quire.worker.models.qwen_moe import Qwen3Moe
from quire.worker.spec.rope import RopeSpec
from quire.worker.transformer.reader import FULL, SLIDING

_ROPES = {FULL: {"rope_theta": 500000.0}, SLIDING: {"rope_theta": 10000.0}}


class Mellum(Qwen3Moe):
    config_defaults = Qwen3Moe.config_defaults | {
        "model_type": "mellum",
        "vocab_size": 98304,
        "hidden_size": 2304,
        "intermediate_size": 7168,
        "num_hidden_layers": 28,
        "num_attention_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "sliding_window": 1024,
        "num_experts": 64,
        "moe_intermediate_size": 896,
        "norm_topk_prob": True,
        "mlp_layer_types": None,
    }

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        values["attention_out_bias"] = values["attention_bias"]

    @classmethod
    def ropes(cls, values: dict[str, Any], raw: dict[str, Any]) -> dict[str, RopeSpec]:
        given = raw.get("rope_scaling") or raw.get("rope_parameters")
        return super().ropes(values, raw if given else raw | {"rope_parameters": _ROPES})

    @classmethod
    def layer_types(cls, values: dict[str, Any]) -> list[str]:
        return [FULL] * values["num_hidden_layers"]
