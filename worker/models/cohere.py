"""Command R and A: attention and the MLP read one layer norm, and pairs of the rotary embedding are interleaved."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.worker.spec.model import LayerSpec
from quire.worker.transformer.decoder import CausalLM
from quire.worker.transformer.reader import COMMON_DEFAULTS, FULL, pattern


class Cohere(CausalLM):
    config_defaults = COMMON_DEFAULTS | {
        "model_type": "cohere",
        "vocab_size": 256000,
        "hidden_size": 8192,
        "intermediate_size": 22528,
        "num_hidden_layers": 40,
        "num_attention_heads": 64,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "rope_theta": 500000.0,
        "logit_scale": 0.0625,
        "use_qk_norm": False,
    }
    facts = {"form": "parallel", "norm": "layer", "rope_interleaved": True, "mlp_bias": False}

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        values["attention_out_bias"] = values["attention_bias"]
        values["qk_norm"] = "layer" if values["use_qk_norm"] else None


class Cohere2(Cohere):
    """Three of four layers have a window; the others have no rotary embedding."""

    config_defaults = Cohere.config_defaults | {
        "model_type": "cohere2",
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "head_dim": 128,
    }

    @classmethod
    def layer_types(cls, values: dict[str, Any]) -> list[str]:
        return pattern(values["num_hidden_layers"], values["sliding_window_pattern"])

    @classmethod
    def layer(cls, values: dict[str, Any], index: int, kind: str, layer: LayerSpec) -> LayerSpec:
        return replace(layer, rope=None) if kind == FULL else layer
