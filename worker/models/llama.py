"""Llama 2, 3 and 3.x: the decoder without changes."""

from __future__ import annotations

from typing import Any

from quire.worker.models.config import COMMON_DEFAULTS
from quire.worker.models.decoder import CausalLM


class Llama(CausalLM):
    config_defaults = COMMON_DEFAULTS | {
        "model_type": "llama",
        "vocab_size": 32000,
        "intermediate_size": 11008,
        "num_key_value_heads": None,
        "max_position_embeddings": 2048,
    }

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        values["attention_out_bias"] = values["attention_bias"]  # one key for all four projections
