"""Nemotron 3 and 4: layer norms that store w - 1, squared ReLU without gate, half of a head rotated."""

from __future__ import annotations

from typing import Any

from quire.worker.transformer.decoder import CausalLM
from quire.worker.transformer.reader import COMMON_DEFAULTS


class Nemotron(CausalLM):
    config_defaults = COMMON_DEFAULTS | {
        "model_type": "nemotron",
        "vocab_size": 256000,
        "hidden_size": 6144,
        "intermediate_size": 24576,
        "num_attention_heads": 48,
        "hidden_act": "relu2",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
    }
    facts = {"norm": "layer_offset_bias", "mlp": "plain"}

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        values["attention_out_bias"] = values["attention_bias"]
