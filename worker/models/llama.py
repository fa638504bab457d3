"""Llama 2, 3 and 3.x: the decoder without changes. Falcon 3, Yi, TinyLlama and InternLM 3 are Llamas, too."""

from __future__ import annotations

from typing import Any

from quire.worker.models.decoder import CausalLM
from quire.worker.models.reader import COMMON_DEFAULTS


class Llama(CausalLM):
    config_defaults = COMMON_DEFAULTS | {
        "model_type": "llama",
        "vocab_size": 32000,
        "intermediate_size": 11008,
        "max_position_embeddings": 2048,
    }

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        values["attention_out_bias"] = values["attention_bias"]  # one key for all four projections
        values["layer_types"] = None  # all layers attend to all positions
