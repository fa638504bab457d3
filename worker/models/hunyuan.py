"""Hunyuan (dense): heads of q and k are normalised after they are rotated."""

from __future__ import annotations

from typing import Any

from quire.worker.transformer.decoder import CausalLM
from quire.worker.transformer.reader import COMMON_DEFAULTS


class HunYuanDenseV1(CausalLM):
    config_defaults = COMMON_DEFAULTS | {
        "model_type": "hunyuan_v1_dense",
        "vocab_size": 290943,
        "intermediate_size": 11008,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
    }
    facts = {"qk_norm": "late", "mlp_bias": False}
    renames = {"self_attn.q_norm": "self_attn.query_layernorm", "self_attn.k_norm": "self_attn.key_layernorm"}

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        values["attention_out_bias"] = values["attention_bias"]
