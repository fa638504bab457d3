"""Youtu-LLM: DeepSeek V3's latent attention with a dense MLP in every layer."""

from __future__ import annotations

from typing import Any

from quire.worker.transformer.decoder import CausalLM
from quire.worker.transformer.mla import MLA_DEFAULTS, MLAFamily
from quire.worker.transformer.reader import COMMON_DEFAULTS


class Youtu(MLAFamily, CausalLM):
    config_defaults = (
        COMMON_DEFAULTS
        | MLA_DEFAULTS
        | {
            "model_type": "youtu",
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_attention_heads": 16,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
            "rope_interleave": True,
        }
    )
    facts = {"mlp_bias": False}

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        super().complete(values, raw)
        values["rope_interleaved"] = values["rope_interleave"]
